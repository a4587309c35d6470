# SPDX-License-Identifier: Apache-2.0
"""Processes of a life and the connections between them: messages in order, late, and stopped by faults."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Generic, TypeVar

import zmq

from pagoda.ipc.event_socket import SILENCE_S
from pagoda.plugins.router.host_sockets import OnDisconnect, OnMessage

T = TypeVar("T")
Latency = Callable[[], float]
_SAME_TIME_S = 1e-9


class Process:
    """A process with an event loop of its own, which may be stalled, and may end."""

    def __init__(self, name: str, latency: Latency) -> None:
        self.name = name
        self.latency = latency
        """Seconds that the next message to or from the process takes."""
        self.stalled_until = 0.0
        self.is_dead = False
        self.ends: list[Callable[[], None]] = []
        """Ends of connections that break when the process is killed."""

    def stall(self, for_s: float) -> None:
        """Messages are read later by so many seconds, all in one turn."""
        self.stalled_until = asyncio.get_running_loop().time() + for_s

    def kill(self) -> None:
        """Nothing that the process does matters from now on."""
        self.is_dead = True
        for end in list(self.ends):
            end()


class Channel(Generic[T]):
    """One way of a connection: what is put in comes out in order, later."""

    def __init__(
        self, reader: Process, receive: Callable[[T], None], latency: Latency | None = None
    ) -> None:
        """`latency` is the wire's; None takes the reader's."""
        self._latency = latency or reader.latency
        self._loop = asyncio.get_running_loop()
        self._reader = reader
        self._receive = receive
        self._items: deque[tuple[float, T]] = deque()
        self._last_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.blocked_until = 0.0
        self.is_closed = False

    def put(self, item: T) -> None:
        if self.is_closed:
            return
        now = self._loop.time()
        self._last_at = max(self._last_at, now + self._latency())
        self._items.append((self._last_at, item))
        self._arm()

    def close(self) -> None:
        """Loses messages that are under way. May be called twice."""
        self.is_closed = True
        self._items.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is None and self._items:
            at = max(self._items[0][0], self.blocked_until, self._reader.stalled_until)
            self._timer = self._loop.call_at(at, self._deliver)

    def _deliver(self) -> None:
        self._timer = None
        now = self._loop.time() + _SAME_TIME_S
        is_open = max(self.blocked_until, self._reader.stalled_until) <= now
        while is_open and self._items and self._items[0][0] <= now:
            self._receive(self._items.popleft()[1])
        self._arm()


class Network:
    """The sockets between routers and hosts: those that listen, and those that connect."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.note = note
        self.listeners: dict[str, ServerSocket] = {}
        self.waiting: list[ClientSocket] = []
        """Clients whose address nobody listens at yet."""
        self.connections: list[Connection] = []
        self.numbers = count(1)

    def cut(self, host: Process, for_s: float) -> None:
        """Nothing passes between `host` and others for a while; what was sent arrives then, unless the
        silence was so long that both ends have hung up."""
        loop = asyncio.get_running_loop()
        for connection in [it for it in self.connections if it.server.process is host]:
            for way in (connection.to_server, connection.to_client):
                way.blocked_until = loop.time() + for_s
            if for_s >= SILENCE_S:
                loop.call_later(SILENCE_S, connection.end)


class Connection:
    def __init__(self, network: Network, client: ClientSocket, server: ServerSocket) -> None:
        self.identity = b"c%d" % next(network.numbers)
        self._network = network
        self.client, self.server = client, server
        wire = server.process.latency
        self.to_server: Channel[list[bytes]] = Channel(server.process, self._at_server, wire)
        self.to_client: Channel[list[bytes]] = Channel(client.process, client.on_message, wire)
        network.connections.append(self)
        server.connections[self.identity] = self

    def _at_server(self, frames: list[bytes]) -> None:
        self.server.on_message([self.identity, *frames])

    def end(self) -> None:
        """Breaks the connection; each end that is still there is told. May be called twice."""
        if self not in self._network.connections:
            return
        self._network.connections.remove(self)
        del self.server.connections[self.identity]
        self.client.connection = None
        self.to_server.close()
        self.to_client.close()
        loop = asyncio.get_running_loop()
        for socket in (self.client, self.server):
            loop.call_later(socket.process.latency(), socket.disconnected)


class ServerSocket:
    """A `MessageSocket` that listens."""

    def __init__(
        self,
        network: Network,
        process: Process,
        on_message: OnMessage,
        on_disconnect: OnDisconnect,
    ) -> None:
        self.process = process
        self._network = network
        self._receive, self._on_disconnect = on_message, on_disconnect
        self._address = ""
        self.closed = False
        self.connections: dict[bytes, Connection] = {}
        process.ends.append(self.close)

    @property
    def port(self) -> int:
        return int(self._address.rpartition(":")[2])

    def bind(self, address: str) -> None:
        if address in self._network.listeners:
            raise zmq.ZMQError(zmq.EADDRINUSE)
        self._address = address
        self._network.listeners[address] = self
        for client in [it for it in self._network.waiting if it.address == address]:
            self._network.waiting.remove(client)
            client.join(self)

    def connect(self, _: str) -> None:
        raise zmq.ZMQError(zmq.EINVAL)

    def on_message(self, frames: list[bytes]) -> None:
        if not self.closed:
            self._receive(frames)

    def disconnected(self) -> None:
        if not self.closed:
            self._on_disconnect()

    def send(self, *frames: bytes) -> None:
        identity, *parts = frames
        connection = self.connections.get(identity)
        if connection is None:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        connection.to_client.put(parts)

    def close(self) -> None:
        self.closed = True
        if self._network.listeners.get(self._address) is self:
            del self._network.listeners[self._address]
        for connection in list(self.connections.values()):
            connection.end()


class ClientSocket:
    """A `MessageSocket` that connects, when somebody listens there."""

    def __init__(
        self,
        network: Network,
        process: Process,
        on_message: OnMessage,
        on_disconnect: OnDisconnect,
    ) -> None:
        self.process = process
        self._network = network
        self._receive, self._on_disconnect = on_message, on_disconnect
        self.address = ""
        self.closed = False
        self.connection: Connection | None = None
        self._unsent: list[list[bytes]] = []
        process.ends.append(self.close)

    @property
    def port(self) -> int:
        return 0

    def bind(self, _: str) -> None:
        raise zmq.ZMQError(zmq.EINVAL)

    def connect(self, address: str) -> None:
        self.address = address
        server = self._network.listeners.get(address)
        if server is None:
            self._network.waiting.append(self)
        else:
            self.join(server)

    def join(self, server: ServerSocket) -> None:
        self.connection = Connection(self._network, self, server)
        unsent, self._unsent = self._unsent, []
        for frames in unsent:
            self.connection.to_server.put(frames)

    def on_message(self, frames: list[bytes]) -> None:
        if not self.closed:
            self._receive(frames)

    def disconnected(self) -> None:
        if not self.closed:
            self._on_disconnect()

    def send(self, *frames: bytes) -> None:
        if self.connection is not None:
            self.connection.to_server.put(list(frames))
        elif self in self._network.waiting or not self.address:
            self._unsent.append(list(frames))

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.process.ends.remove(self.close)
        if self in self._network.waiting:
            self._network.waiting.remove(self)
        if self.connection is not None:
            self.connection.end()


class SimSockets:
    """`HostSockets` of one process."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process

    def server(self, on_message: OnMessage, on_disconnect: OnDisconnect) -> ServerSocket:
        return ServerSocket(self._network, self._process, on_message, on_disconnect)

    def client(self, on_message: OnMessage, on_disconnect: OnDisconnect) -> ClientSocket:
        return ClientSocket(self._network, self._process, on_message, on_disconnect)
