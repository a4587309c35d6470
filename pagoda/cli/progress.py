# SPDX-License-Identifier: Apache-2.0
"""Progress bars, which servers do not import."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from pagoda.cli.output import stderr


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
