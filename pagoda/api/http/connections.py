# SPDX-License-Identifier: Apache-2.0
"""The open connections of a server, which its descriptors bound."""

from __future__ import annotations

import contextlib
import logging
import resource
import socket
import time
from collections.abc import Callable
from typing import Protocol

UNLIMITED = 2**31
"""More connections than a process can have."""

_RESERVED = 256
"""Descriptors that are left to everything else: engines, files, logs."""
_MANY_DESCRIPTORS = 65_536
_WARNING_EVERY_S = 60.0
_log = logging.getLogger("pagoda.api")


class Closable(Protocol):
    """A connection. aiohttp's are closed by this name."""

    def force_close(self) -> None: ...


class Connections:
    """Knows all connections, and which of them wait for a request.

    At the limit a new connection takes the place of the one that has waited longest, so that clients that connect
    and say nothing keep nobody out. If no other one waits, the new one is closed. Each call takes constant time.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._num_open = 0
        self._waiting: dict[Closable, None] = {}
        """Longest first."""
        self._num_closed = 0
        """Connections closed for others since the last warning."""
        self._warned_at = -_WARNING_EVERY_S

    @property
    def num_open(self) -> int:
        return self._num_open

    def add(self, connection: Closable) -> None:
        """Takes a new connection, and closes another one, or itself, if there are too many."""
        self._num_open += 1
        self._waiting[connection] = None
        if self._num_open > self._limit:
            self._make_room()

    def set_busy(self, connection: Closable) -> None:
        """A request has begun: the connection stays."""
        self._waiting.pop(connection, None)

    def set_waiting(self, connection: Closable) -> None:
        """An answer has ended."""
        self._waiting[connection] = None

    def remove(self, connection: Closable) -> None:
        """The connection is lost."""
        self._num_open -= 1
        self._waiting.pop(connection, None)

    def _make_room(self) -> None:
        oldest = next(iter(self._waiting))
        del self._waiting[oldest]
        oldest.force_close()
        self._num_closed += 1
        now = self._clock()
        if now - self._warned_at < _WARNING_EVERY_S:
            return
        _log.warning(
            "%d connections are open, as many as the limit of descriptors leaves room for; %d were closed for new "
            "ones. Raise the limit (ulimit -n, LimitNOFILE=), or look for clients that keep connections.",
            self._num_open,
            self._num_closed,
        )
        self._warned_at, self._num_closed = now, 0


def bound_silence(connection: socket.socket, seconds: float) -> None:
    """Lets the kernel (Linux) cut a connection whose client takes nothing of what waits for it for `seconds` (RFC
    5482), also when the answer has ended and nobody here waits any more."""
    if connection.family != socket.AF_UNIX and hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * seconds))


def raise_descriptor_limit() -> None:
    """Raises this process's limit of descriptors, and that of its children, to what it may be, or to
    `_MANY_DESCRIPTORS` where that is unlimited in name only (macOS, some containers); never lowers it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft in (hard, resource.RLIM_INFINITY):
        return
    for limit in (hard, _MANY_DESCRIPTORS):
        if limit == resource.RLIM_INFINITY or limit > soft:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
                return
    _log.warning("the limit of descriptors stays at %d: the system refuses another one", soft)


def max_connections() -> int:
    """Connections beside which this process has descriptors for everything else."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return UNLIMITED
    return limit - min(_RESERVED, limit // 2)
