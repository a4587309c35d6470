"""How routers find hosts, and how hosts make themselves known: one protocol for each side.

A discovery says where hosts are, and no more. What a host is, whether it is alive and whether it leaves is said
over the connection to it, which is the same however it was found.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Protocol

import zmq.asyncio

from pagoda.messages.hosts import HostRecord

TTL_S = 5.0
"""A host that was not heard of for so long is gone."""
BEATS_PER_TTL = 4

Tell = Callable[[Collection[HostRecord]], None]


class Discovery(Protocol):
    """The router's side."""

    async def follow(self, tell: Tell) -> None:
        """Tells all hosts that there are, now and whenever others are, until it is cancelled."""
        ...

    def warn(self, host: HostRecord, problem: str) -> None:
        """Lets the host know, if there is a way to, why it is not used; an empty `problem` is none any more."""
        ...

    def dismiss(self, host: HostRecord, reason: str) -> None:
        """The host is not to come back until it is started anew. Lets it know, if there is a way to."""
        ...

    async def close(self) -> None: ...


class Registration(Protocol):
    """The host's side: it is made known from when this is made."""

    async def close(self) -> None:
        """From now on it is not, and that is known at once where it can be."""
        ...


Discover = Callable[[zmq.asyncio.Context], Discovery]
"""Makes a discovery. Its sockets, if it has any, are of the given context, which has an authenticator.

Raises:
    ConfigError: it cannot work as it was asked to.
"""
Register = Callable[[zmq.asyncio.Context, HostRecord], list[Registration]]
"""Makes a host known wherever it is to be known."""


class Notices:
    """Writes to a log what is news: not what was said last."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._last = ""

    def inform(self, text: str) -> None:
        self._write(logging.INFO, text)

    def warn(self, text: str) -> None:
        self._write(logging.WARNING, text)

    def _write(self, level: int, text: str) -> None:
        if text != self._last:
            self._last = text
            self._log.log(level, "%s", text)
