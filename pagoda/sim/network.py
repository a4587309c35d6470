"""The ways between simulated engines of one process: listeners and peers without sockets, in virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import count
from typing import Generic, TypeVar

from pagoda.executor.sim import SimNeighbours
from pagoda.ipc.clock import Clock
from pagoda.messages.worker_config import Role
from pagoda.pd.links import HandoffLinks, PeerLost
from pagoda.pd.messages import DecodeMessage, PrefillMessage

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
        self.neighbours = SimNeighbours()
        self._clock = clock
        self._fate = fate
        self._numbers = count(1)
        self._listeners: dict[str, SimListener] = {}
        self._connections: dict[bytes, SimPeers] = {}
        """Peers by the identity that the listener knows them by."""

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

    def connect(self, peers: SimPeers, address: str) -> bytes | None:
        """None if nobody is there."""
        if address not in self._listeners:
            return None
        asker = str(next(self._numbers)).encode()
        self._connections[asker] = peers
        return asker

    def disconnect(self, asker: bytes) -> None:
        self._connections.pop(asker, None)

    def cut(self, address: str) -> None:
        """Ends all connections to a listener; those that had them are told."""
        for asker, peers in list(self._connections.items()):
            if peers.lose(asker, address, PeerLost("it hung up")):
                del self._connections[asker]

    def close(self, listener: SimListener) -> None:
        if self._listeners.get(listener.address) is listener:
            del self._listeners[listener.address]
            self.cut(listener.address)

    def ask(self, address: str, asker: bytes, message: DecodeMessage) -> None:
        if (listener := self._listeners.get(address)) is not None:
            for delay_s in self._fate(message):
                listener.inbox.put((asker, message), delay_s)

    def answer(self, asker: bytes, message: PrefillMessage) -> None:
        if (peers := self._connections.get(asker)) is not None:
            for delay_s in self._fate(message):
                peers.inbox.put((asker, message), delay_s)


class SimListener:
    """A `Listener`."""

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
        self.inbox: _Inbox[tuple[bytes, PrefillMessage | PeerLost]] = _Inbox(clock, wake)
        self.next_event_at = self.inbox.next_event_at
        self._network = network
        self._askers: dict[str, bytes] = {}
        """Identity of this engine at each listener, by the address of the listener."""
        self._addresses: dict[bytes, str] = {}

    def send(self, address: str, message: DecodeMessage) -> None:
        asker = self._askers.get(address)
        if asker is None:
            asker = self._network.connect(self, address) or b"nobody at " + address.encode()
            self._askers[address] = asker
            self._addresses[asker] = address
            if asker.startswith(b"nobody"):
                self.inbox.put((asker, PeerLost("nobody is there")), 0.0)
        self._network.ask(address, asker, message)

    def lose(self, asker: bytes, address: str, loss: PeerLost) -> bool:
        if self._addresses.get(asker) != address:
            return False
        self.inbox.put((asker, loss), 0.0)
        return True

    def receive(self) -> list[tuple[str, PrefillMessage | PeerLost]]:
        messages: list[tuple[str, PrefillMessage | PeerLost]] = []
        for asker, message in self.inbox.take():
            address = self._addresses.get(asker)
            if address is None:
                continue  # a connection that is no more
            if isinstance(message, PeerLost):
                self.hang_up(address)
            messages.append((address, message))
        return messages

    def hang_up(self, address: str) -> None:
        asker = self._askers.pop(address, None)
        if asker is not None:
            del self._addresses[asker]
            self._network.disconnect(asker)

    def pollables(self) -> list[object]:
        return []

    def close(self) -> None:
        for address in list(self._askers):
            self.hang_up(address)
