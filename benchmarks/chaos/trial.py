"""One row of the table of reliability: a fault, what is asked of the server, and the function that tries it."""

from __future__ import annotations

from collections.abc import Callable
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
