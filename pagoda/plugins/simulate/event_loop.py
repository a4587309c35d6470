# SPDX-License-Identifier: Apache-2.0
"""An asyncio event loop whose time is virtual: when nothing is left to do now, the clock jumps to what comes next.

Nothing is real about the loop: no sockets, no threads, no signals. A program that only waits for its own tasks and
timers runs in it as fast as it can compute, and in the same way every time. A loop that wakes late, as on a busy
machine, lets timers of different instants run in one turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from pagoda.ipc.clock import VirtualClock

T = TypeVar("T")

_RESOLUTION_S = 1e-7
"""Timers that are due within this are due now. Larger than a rounding error after years, which would stop time."""


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """Event loop whose `time()` starts at 0 and counts virtual seconds."""

    def __init__(self, lateness_s: Callable[[], float] = lambda: 0.0) -> None:
        """`lateness_s` says how late the loop wakes, each time that it has slept."""
        super().__init__()
        self._clock_resolution = _RESOLUTION_S
        self.clock = VirtualClock()
        self._selector = _TimeSelector(self.clock, lateness_s)

    def time(self) -> float:
        return self.clock.now()

    def _process_events(self, event_list: object) -> None:  # noqa: ARG002
        """Moves the clock to the next timer if that counts as due: else its work would find itself too early, and
        set the same timer again and again."""
        scheduled: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        if scheduled and scheduled[0].when() <= self.clock.now() + _RESOLUTION_S:
            self.clock.advance_to(scheduled[0].when())

    def _write_to_self(self) -> None:
        """Does nothing: no thread but the loop's own wakes it, and then it is not asleep."""


class _TimeSelector:
    """Selector of the event loop: moves the clock instead of waiting."""

    def __init__(self, clock: VirtualClock, lateness_s: Callable[[], float]) -> None:
        self._clock = clock
        self._lateness_s = lateness_s

    def select(self, timeout: float | None) -> list[object]:
        """
        Raises:
            RuntimeError: every task waits for another, and no timer will wake any of them.
        """
        if timeout is None:
            raise RuntimeError("Deadlock: no ready task and no timer.")
        if timeout > 0:
            self._clock.advance_to(self._clock.now() + timeout + self._lateness_s())
        return []


def run(work: Coroutine[Any, Any, T], *, lateness_s: Callable[[], float] = lambda: 0.0) -> T:
    """The result of `work`, in a virtual time that begins with it; `lateness_s` is as in `VirtualTimeLoop`."""
    with asyncio.Runner(loop_factory=partial(VirtualTimeLoop, lateness_s)) as runner:
        return runner.run(work)
