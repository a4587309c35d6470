# SPDX-License-Identifier: Apache-2.0
"""Time as a parameter: whoever needs it is given a `Clock`, so the same code runs in virtual time."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

MAX_TIMEOUT_S = 86_400
"""Longest time-out that a flag or a request may ask for: ZeroMQ counts milliseconds in 32 bits."""


class Clock(Protocol):
    def now(self) -> float:
        """Seconds from some fixed point; never goes back."""
        ...


class MonotonicClock:
    def now(self) -> float:
        return time.monotonic()


class LoopClock:
    """The time of the event loop that asks, real or virtual."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()


class VirtualClock:
    """Stands still until told to move."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def advance_to(self, instant: float) -> None:
        self._now = max(self._now, instant)
