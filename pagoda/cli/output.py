# SPDX-License-Identifier: Apache-2.0
"""Output of the command line: answers and tables go to standard output, the rest to standard error.

Both are plain text when they are not a terminal: no colours, no wrapped lines, no moving bars.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.style import Style
from rich.table import Table

_PLAIN_WIDTH = 240
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_UNPRINTABLE = "\N{REPLACEMENT CHARACTER}"


def stdout() -> Console:
    """A console on standard output that never reads `[brackets]` in what it prints as markup."""
    return _console(stderr=False)


def stderr() -> Console:
    """The same on standard error, for progress, hints and errors."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    return console


def write_answer(text: str, *, dim: bool = False) -> None:
    """Writes a piece of a model's answer to standard output as it stands, at once.

    On a terminal, control characters are shown rather than obeyed: an answer must not be able to move
    the cursor or to rename the window.
    """
    console = stdout()
    shown = _CONTROL.sub(_UNPRINTABLE, text) if console.is_terminal else text
    if dim and console.is_terminal:
        console.print(shown, style=Style(dim=True), end="", soft_wrap=True)
    else:
        sys.stdout.write(shown)
    sys.stdout.flush()


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table whose first column is text and whose others are figures."""
    result = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        result.add_column(column, justify="right" if index else "left")
    for row in rows:
        result.add_row(*row)
    return result


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Two columns without a frame: what, and what about it."""
    result = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    result.add_column(style="bold", no_wrap=True)
    result.add_column(overflow="fold")
    for name, value in rows:
        result.add_row(name, value)
    return result
