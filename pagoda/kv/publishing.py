# SPDX-License-Identifier: Apache-2.0
"""Plugins that publish events of cached blocks: objects of the entry-point group `pagoda.kv_publishers`.

The one of the name `kv_events` is taken where `--kv-events` is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pagoda.registry import KV_PUBLISHERS, load

if TYPE_CHECKING:
    import zmq

    from pagoda.kv.events import KVEvent


class Publisher(Protocol):
    """Sockets that an engine opens beside its loop, and feeds with events after each step."""

    replay_socket: zmq.Socket[bytes]
    """Wakes the engine's loop when a message has come."""

    @property
    def is_replaying(self) -> bool:
        """True if `replay` has more to do without any new message."""
        ...

    def publish(self, events: Sequence[KVEvent]) -> None: ...

    def replay(self) -> None:
        """Takes messages, and does a bounded part of the work that they ask for."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class PublisherPlugin:
    """Checks addresses of `--kv-events`, and opens publishers."""

    check: Callable[[str, int], None]
    """Takes an address and a number of replicas. Raises ConfigError: it is no address for so many."""
    open: Callable[[str, int, int, zmq.Context[zmq.Socket[bytes]]], Publisher]
    """Takes the address, the replica, their number, and a context. Raises ConfigError: it cannot be bound."""


def find_publisher() -> PublisherPlugin:
    """Raises ConfigError: no package publishes events."""
    return load(KV_PUBLISHERS, "kv_events", PublisherPlugin)
