# SPDX-License-Identifier: Apache-2.0
"""One row of the table of reliability: a fault, what is asked of the server, and the function that tries it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """Measurement of a trial."""

    measured: str
    """Figures in words, for the table."""
    holds: bool
    """The figures are what is asked for."""


@dataclass(frozen=True)
class Trial:
    """A row of the table."""

    name: str
    """The argument of `python -m benchmarks.chaos` that runs this trial alone."""
    fault: str
    """The fault that is provoked in the server."""
    asked: str
    """The required behaviour of the server."""
    run: Callable[[bool], Outcome]
    """Tries it. The argument is True for the short form, which has the same shape with smaller numbers."""
    limit_s: float = 4 * 3600.0
    """Seconds after which the trial ends and falls short, whatever it waits for."""


class TooLongError(KeyboardInterrupt):
    """The time of a trial is over. Event loops let go of no other exception."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises TooLongError in the main thread, which this is called in, after so many seconds."""

    def end(*_: object) -> None:
        raise TooLongError(f"it was not over after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
