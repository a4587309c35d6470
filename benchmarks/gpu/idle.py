# SPDX-License-Identifier: Apache-2.0
"""Time in which a device has nothing to do between steps, by its own clock.

A mark on an idle device is passed at once, and not when the work behind it begins: between marks around a launch,
time in which the device waits for the host looks like work. So a step is measured in two ways: what it takes if it
was all launched before it could begin, and how much lies between the ends of steps as the host launches them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

MarkT = TypeVar("MarkT")
_cuda: Any = torch.cuda
"""Type checkers know too little of it."""
_HELD_SECONDS = 0.05
"""Seconds for which the device is held up at first, in which the host is to launch two steps."""
_ATTEMPTS = 5
"""Attempts of which each holds the device up twice as long as the one before."""
_CYCLES_PER_S = 2e9
"""Cycles that a GPU has in a second, about."""


class Clock(Protocol[MarkT]):
    """Clock of a device that does work in the order in which it is launched."""

    def mark(self) -> MarkT:
        """A mark behind all that was launched so far."""

    def passed(self, mark: MarkT) -> bool:
        """True if the device has passed the mark."""

    def seconds(self, first: MarkT, last: MarkT) -> float:
        """Seconds between two marks, which the device will have passed."""

    def hold(self, seconds: float) -> None:
        """Lets the device do nothing for about so long, before it does what is launched from now on."""


class GpuClock:
    """The clock of the current stream of a GPU."""

    def mark(self) -> Any:
        event = _cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, mark: Any) -> bool:
        done: bool = mark.query()
        return done

    def seconds(self, first: Any, last: Any) -> float:
        last.synchronize()
        milliseconds: float = first.elapsed_time(last)
        return milliseconds / 1e3

    def hold(self, seconds: float) -> None:
        _cuda._sleep(int(seconds * _CYCLES_PER_S))


def busy_seconds(
    clock: Clock[MarkT], launch: Callable[[], bool], finish: Callable[[], None]
) -> float | None:
    """Seconds that the device takes for a step which was launched before the one in front of it was done.

    `launch` launches a step, and gives False if it could not; `finish` waits for two. None is returned if the host
    cannot launch steps while the device is held up.
    """
    seconds = _HELD_SECONDS
    for _ in range(_ATTEMPTS):
        clock.hold(seconds)
        held = clock.mark()
        launched = [launch()]
        first = clock.mark()
        launched.append(launch())
        last = clock.mark()
        in_time = all(launched) and not clock.passed(held)
        finish()
        if in_time:
            return clock.seconds(first, last)
        seconds *= 2
    return None


def idle_share(clock: Clock[MarkT], ends: Sequence[MarkT], busy: float) -> float:
    """Share of the time between the ends of steps in which the device had nothing to do; a step took it `busy`."""
    passed = clock.seconds(ends[0], ends[-1])
    return max(0.0, 1.0 - busy * (len(ends) - 1) / passed)
