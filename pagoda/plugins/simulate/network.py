# SPDX-License-Identifier: Apache-2.0
"""The ways between simulated engines of one process: listeners and peers without sockets, in virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import count
from typing import Generic, TypeVar

from pagoda.ipc.clock import Clock
from pagoda.messages.worker_config import Role
from pagoda.plugins.disaggregation.hooks import HandoffLinks
from pagoda.plugins.disaggregation.links import PeerLost
from pagoda.plugins.disaggregation.messages import DecodeMessage, PrefillMessage
from pagoda.plugins.sim.executor import SimNeighbours

T = TypeVar("T")

Wake = Callable[[float], None]
"""Tells an engine's loop when something will be there for it."""
Fate = Callable[[DecodeMessage | PrefillMessage], Sequence[float]]
"""Delays in seconds of the copies of one message; empty: the message is lost."""


class _Inbox(Generic[T]):
    """Messages on their way to one engine."""

    def __init__(self, clock: Clock, wake: Wake) -> None:
        self._clock = clock
        self._wake = wake
        self._order = count()
        self._items: list[tuple[float, int, T]] = []

    def put(self, item: T, delay_s: float) -> None:
        instant = self._clock.now() + delay_s
        heapq.heappush(self._items, (instant, next(self._order), item))
        self._wake(instant)

    def take(self) -> list[T]:
        now = self._clock.now()
        due = []
        while self._items and self._items[0][0] <= now:
            due.append(heapq.heappop(self._items)[2])
        return due

    def next_event_at(self) -> float | None:
        return self._items[0][0] if self._items else None


class SimNetwork:
    """Network of simulated engines. Messages arrive as `fate` says; by default at once."""

    def __init__(self, clock: Clock, fate: Fate = lambda _: (0.0,)) -> None:
        self.neighbours: SimNeighbours = {}
        self._clock = clock
        self._fate = fate
        self._numbers = count(1)
        self._listeners: dict[str, SimListener] = {}
        self._connections: dict[bytes, tuple[SimPeers, str]] = {}
        """Owners of connections and the addresses at their other ends, by the ids that listeners know."""

    def listener(self, address: str, wake: Wake = lambda _: None) -> SimListener:
        listener = self._listeners[address] = SimListener(address, self, self._clock, wake)
        return listener

    def peers(self, wake: Wake = lambda _: None) -> SimPeers:
        return SimPeers(self, self._clock, wake)

    def links(
        self, engine_id: str, role: Role, address: str, wake: Wake = lambda _: None
    ) -> HandoffLinks:
        """Links of an engine of this role; its listener, if it has one, is at `address`."""
        return HandoffLinks(
            engine_id,
            self.listener(address, wake) if role.holds_kv else None,
            self.peers(wake) if role.fetches_kv else None,
        )

    def connect(self, peers: SimPeers, address: str) -> bytes:
        """The id of a new connection; it is lost at once where nobody listens."""
        asker = str(next(self._numbers)).encode()
        if address in self._listeners:
            self._connections[asker] = peers, address
        else:
            peers.inbox.put((address, asker, PeerLost("nobody is there")), 0.0)
        return asker

    def disconnect(self, asker: bytes) -> None:
        self._connections.pop(asker, None)

    def cut(self, address: str) -> None:
        """Ends all connections to a listener; those that had them are told."""
        for asker, (peers, there) in list(self._connections.items()):
            if there == address:
                del self._connections[asker]
                peers.inbox.put((address, asker, PeerLost("it hung up")), 0.0)

    def close(self, listener: SimListener) -> None:
        if self._listeners.get(listener.address) is listener:
            del self._listeners[listener.address]
            self.cut(listener.address)

    def ask(self, address: str, asker: bytes, message: DecodeMessage) -> None:
        if (listener := self._listeners.get(address)) is not None:
            for delay_s in self._fate(message):
                listener.inbox.put((asker, message), delay_s)

    def answer(self, asker: bytes, message: PrefillMessage) -> None:
        if (connection := self._connections.get(asker)) is not None:
            peers, address = connection
            for delay_s in self._fate(message):
                peers.inbox.put((address, asker, message), delay_s)


class SimListener:
    """A `KVListener`."""

    def __init__(self, address: str, network: SimNetwork, clock: Clock, wake: Wake) -> None:
        self.address = address
        self.inbox: _Inbox[tuple[bytes, DecodeMessage]] = _Inbox(clock, wake)
        self.receive = self.inbox.take
        self.next_event_at = self.inbox.next_event_at
        self._network = network

    def send(self, asker: bytes, message: PrefillMessage) -> None:
        self._network.answer(asker, message)

    def pollables(self) -> list[object]:
        return []

    def close(self) -> None:
        self._network.close(self)


class SimPeers:
    """`Peers`."""

    def __init__(self, network: SimNetwork, clock: Clock, wake: Wake) -> None:
        self.inbox: _Inbox[tuple[str, bytes, PrefillMessage | PeerLost]] = _Inbox(clock, wake)
        self.next_event_at = self.inbox.next_event_at
        self._network = network
        self._askers: dict[str, bytes] = {}
        """Ids of connections by the addresses at their other ends."""

    def send(self, address: str, message: DecodeMessage) -> None:
        if address not in self._askers:
            self._askers[address] = self._network.connect(self, address)
        self._network.ask(address, self._askers[address], message)

    def receive(self) -> list[tuple[str, PrefillMessage | PeerLost]]:
        messages: list[tuple[str, PrefillMessage | PeerLost]] = []
        for address, asker, message in self.inbox.take():
            if self._askers.get(address) != asker:
                continue  # a connection that is no more
            if isinstance(message, PeerLost):
                self.hang_up(address)
            messages.append((address, message))
        return messages

    def hang_up(self, address: str) -> None:
        asker = self._askers.pop(address, None)
        if asker is not None:
            self._network.disconnect(asker)

    def pollables(self) -> list[object]:
        return []

    def close(self) -> None:
        for address in list(self._askers):
            self.hang_up(address)
