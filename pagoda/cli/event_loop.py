"""Running coroutines from a command."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import TypeVar

T = TypeVar("T")


def run(work: Coroutine[object, object, T]) -> T:
    """Runs `work` on a fresh event loop. Ctrl-C cancels it and raises KeyboardInterrupt."""
    with runner() as loop:
        return loop.run(work)


def runner() -> asyncio.Runner:
    """An event loop for several coroutines in turn: uvloop where there is one."""
    return asyncio.Runner(loop_factory=_loop_factory())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    if sys.platform == "win32":
        return asyncio.new_event_loop
    import uvloop

    return uvloop.new_event_loop
