# SPDX-License-Identifier: Apache-2.0
"""Output of the command line: answers and tables go to standard output, the rest to standard error.

Both are plain text when they are not a terminal: no colours, no wrapped lines, no moving bars.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
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


@contextmanager
def job_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar like `progress` that appears with the first report of what is done and of the total."""
    with ExitStack() as stack:
        bars: list[tuple[Progress, TaskID]] = []

        def report(done: int, total: int) -> None:
            if not bars:
                bar = stack.enter_context(_progress_bar(what))
                bars.append((bar, bar.add_task(what, total=total)))
            for bar, task in bars:
                bar.update(task, completed=done, total=total)

        yield report


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar on standard error, shown on a terminal only; call what it yields for each thing done."""
    with _progress_bar(what) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def _progress_bar(what: str) -> Progress:
    console = stderr()
    return Progress(
        *(TextColumn(what), BarColumn(), MofNCompleteColumn()),
        *(TimeElapsedColumn(), TimeRemainingColumn()),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
