# SPDX-License-Identifier: Apache-2.0
"""The event loop of servers and commands."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop where there is one: it halves the cost of a stream's event."""
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def run(work: Coroutine[object, object, T]) -> T:
    """Runs `work` on an event loop of its own."""
    with asyncio.Runner(loop_factory=new_event_loop) as loop:
        return loop.run(work)
