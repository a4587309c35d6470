# SPDX-License-Identifier: Apache-2.0
"""The news that a server gives the service manager that started it (systemd, `Type=notify`), by sd_notify(3).

It is ready when the model is loaded. It asks for more time while it loads, which its own time-outs bound, and
while it drains. Its watchdog is fed while the event loop turns, and the model makes progress or soon will again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping

from pagoda.fleet.endpoint import Health

RECOVERY_S = 3600.0
"""Seconds for which the watchdog is fed though the model makes no progress: engines and workers have time-outs of
their own, are started again, and load."""
_LOADING_INTERVAL_S = 5.0
_LOADING_EXTENSION_S = 30.0
_FEEDS = 3
"""Times that the watchdog is fed within its time-out."""


_log = logging.getLogger(__name__)


class ServiceManager:
    """The datagram socket of the service manager. Without one, nothing is told."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        is_mine = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        microseconds = environment.get("WATCHDOG_USEC", "")
        self.watchdog_s = int(microseconds) / 1e6 if is_mine and microseconds.isdecimal() else None
        """Seconds without a sign after which the service manager ends this process; None: never."""

    @property
    def is_there(self) -> bool:
        return bool(self._address)

    def tell(self, *assignments: str) -> None:
        """Sends lines such as `READY=1`. A service manager that is gone or busy costs nothing."""
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
            own.setblocking(False)
            own.sendto("\n".join(assignments).encode(), self._address)

    def tell_ready(self, url: str) -> None:
        self.tell("READY=1", f"STATUS=serving at {url}")

    def tell_stopping(self, drain_timeout_s: float) -> None:
        self.tell(
            "STOPPING=1", "STATUS=draining", _extension(drain_timeout_s + _LOADING_EXTENSION_S)
        )

    async def tell_of_loading(self) -> None:
        """Asks for more time until it is cancelled."""
        while self.is_there:
            self.tell("STATUS=the model is loading", _extension(_LOADING_EXTENSION_S))
            await asyncio.sleep(_LOADING_INTERVAL_S)

    async def feed_watchdog(
        self,
        health: Callable[[], Awaitable[Health]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Feeds the watchdog until it is cancelled, but not when nothing was computed for `RECOVERY_S`."""
        if self.watchdog_s is None:
            return
        ready_at = clock()
        while True:
            state = await _told(health)
            if state.ready:
                ready_at = clock()
            if clock() - ready_at < RECOVERY_S:
                status = "serving" if state.ready else state.reason
                self.tell("WATCHDOG=1", f"STATUS={status}")
            await asyncio.sleep(self.watchdog_s / _FEEDS)


async def _told(health: Callable[[], Awaitable[Health]]) -> Health:
    """The state that `health` tells; where that fails, one from which the server may recover."""
    try:
        return await health()
    except Exception:
        _log.exception("the health of the server cannot be told")
        return Health(False, "the health of the server cannot be told")


def _extension(seconds: float) -> str:
    return f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}"
