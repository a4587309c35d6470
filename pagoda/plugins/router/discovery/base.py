# SPDX-License-Identifier: Apache-2.0
"""Discovery: routers find hosts, and hosts make themselves known.

A discovery names hosts. Everything else, such as a host's limits and health, is said over the connection to the
host, which is the same however the host was found.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, KeysView
from dataclasses import dataclass
from typing import Protocol

import zmq

from pagoda.ipc.tls import TlsFiles
from pagoda.plugins.router.messages import HostRecord

TTL_S = 5.0
"""Seconds without a sign of life after which a host counts as gone."""
BEATS_PER_TTL = 4

Context = zmq.Context[zmq.Socket[bytes]]


class HostListener(Protocol):
    """Receiver of a discovery's findings. Each call is about one host, so a fleet of n hosts costs n calls."""

    def add(self, host: HostRecord) -> None:
        """`host` is named. May be called again for a host that is named already."""
        ...

    def remove(self, host: HostRecord) -> None:
        """`host` is not named any more. May be called for a host that was not."""
        ...


class Discovery:
    """The router's side."""

    async def follow(self, listener: HostListener) -> None:
        """Tells `listener` of all hosts, and of changes until it is cancelled. When called again, starts over."""
        raise NotImplementedError

    def warn(self, host: HostRecord, problem: str) -> None:
        """Lets the host know, where that is possible, why it is not used; an empty `problem` withdraws that."""

    def dismiss(self, host: HostRecord, reason: str) -> None:
        """Lets the host know, where that is possible, that it must not come back before it is started anew."""

    async def close(self) -> None:
        """Ends what `follow` has begun."""


class Registration(Protocol):
    """The host's side: makes the host known from construction to `close`."""

    async def close(self) -> None:
        """Withdraws the host, at once where that is possible."""
        ...


Discover = Callable[[Context], Discovery]
"""Makes a discovery. Its sockets, if it has any, are of the given context, which has an authenticator.

Raises:
    ConfigError: it cannot work as it was asked to.
"""
Register = Callable[[Context, HostRecord], list[Registration]]


@dataclass(frozen=True)
class DiscoveryPlugin:
    """A way to find hosts by a URL. Both functions are given the URL, the flag that has it, and the files that the
    flags of TLS name, and raise ConfigError: the URL or a file cannot be used."""

    discover: Callable[[str, str, TlsFiles], Discover]
    """The router's side."""
    register: Callable[[str, str, TlsFiles], Register]
    """The host's side."""


class HostTable:
    """The hosts that a discovery names, each under a key. Tells a listener of changes."""

    def __init__(self) -> None:
        self._hosts: dict[str, HostRecord] = {}
        self._listener: HostListener | None = None

    def listen(self, listener: HostListener) -> None:
        """Tells `listener` of all hosts and of changes from now on, in place of the listener before."""
        self._listener = listener
        for host in list(self._hosts.values()):
            listener.add(host)

    def keys(self) -> KeysView[str]:
        return self._hosts.keys()

    def get(self, key: str) -> HostRecord | None:
        return self._hosts.get(key)

    def set(self, key: str, host: HostRecord | None) -> None:
        """Puts `host` under `key`; None: no host."""
        before = self._hosts.pop(key, None)
        if host is not None:
            self._hosts[key] = host
        if self._listener is not None and before != host:
            if before is not None:
                self._listener.remove(before)
            if host is not None:
                self._listener.add(host)


class Notices:
    """Writes a line to a log unless it repeats the line before."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._last = ""

    def inform(self, text: str, level: int = logging.INFO) -> None:
        if text != self._last:
            self._last = text
            self._log.log(level, "%s", text)

    def warn(self, text: str) -> None:
        self.inform(text, logging.WARNING)
