"""Running coroutines from a command."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from pagoda.frontend.event_loop import new_event_loop

T = TypeVar("T")


def run(work: Coroutine[object, object, T]) -> T:
    """Runs `work` on a fresh event loop. Ctrl-C cancels it and raises KeyboardInterrupt."""
    with runner() as loop:
        return loop.run(work)


def runner() -> asyncio.Runner:
    """An event loop for several coroutines in turn."""
    return asyncio.Runner(loop_factory=new_event_loop)
