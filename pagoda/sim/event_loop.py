"""An asyncio event loop whose time is virtual: when nothing is left to do now, the clock jumps to what comes next.

Nothing is real about it: no sockets, no threads, no signals. A program that only waits for its own tasks and
timers runs in it as fast as it can compute, and in the same way every time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from pagoda.ipc.clock import VirtualClock

T = TypeVar("T")

_RESOLUTION_S = 1e-7
"""Timers that are due within this are due now. Larger than a rounding error after years, which would stop time."""


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """`time()` starts at 0 and counts virtual seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._clock_resolution = _RESOLUTION_S
        self.clock = VirtualClock()
        self._selector = _TimeSelector(self.clock)

    def time(self) -> float:
        return self.clock.now()

    def _process_events(self, event_list: object) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody outside of it wakes this loop, and from inside it is never asleep."""


class _TimeSelector:
    """Selector of the event loop: moves the clock instead of waiting."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def select(self, timeout: float | None) -> list[object]:
        """
        Raises:
            RuntimeError: every task waits for another, and no timer will wake any of them.
        """
        if timeout is None:
            raise RuntimeError("Deadlock: no ready task and no timer.")
        self._clock.advance_to(self._clock.now() + timeout)
        return []


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, in a virtual time that begins with it."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)
