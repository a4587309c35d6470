# SPDX-License-Identifier: Apache-2.0
"""Round trips to a host, by which a router knows how far away it is."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from pagoda.plugins.router.messages import HostPing

_INTERVAL_S = 30.0
_FIRST = 4
"""Round trips that are measured one after the other at the beginning."""


class RoundTrips:
    """Pings a host now and then. The shortest of the latest round trips counts: others have waited somewhere."""

    def __init__(self, send: Callable[[HostPing], None]) -> None:
        self._send = send
        self._number = 0
        self._sent_at: float | None = None
        """Instant of the ping that is not answered; None without one."""
        self._latest: deque[float] = deque(maxlen=_FIRST)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self.stop()
        self._number += 1
        self._sent_at = asyncio.get_running_loop().time()
        self._send(HostPing(self._number))

    def pong(self, number: int) -> float:
        """Takes the answer to a ping; returns the seconds of a round trip. Other answers say nothing."""
        loop = asyncio.get_running_loop()
        if number == self._number and self._sent_at is not None:
            self._latest.append(loop.time() - self._sent_at)
            self._sent_at = None
            self._timer = loop.call_later(self._pause_s, self.start)
        return min(self._latest, default=0.0)

    @property
    def _pause_s(self) -> float:
        return 0.0 if len(self._latest) < _FIRST else _INTERVAL_S

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
