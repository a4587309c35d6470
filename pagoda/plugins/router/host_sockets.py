# SPDX-License-Identifier: Apache-2.0
"""The sockets between routers and hosts, as a parameter of both: ZeroMQ, or a network in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import zmq

from pagoda.faults.injector import Faults
from pagoda.ipc.curve import encrypt_client, encrypt_server
from pagoda.ipc.event_socket import EventSocket, host_socket
from pagoda.messages.worker_config import CurveKeys

OnMessage = Callable[[list[bytes]], None]
OnDisconnect = Callable[[], None]


class MessageSocket(Protocol):
    """One end of connections. Messages go to a function, sending never waits; see `EventSocket`."""

    @property
    def closed(self) -> bool: ...

    @property
    def port(self) -> int: ...

    def bind(self, address: str) -> None:
        """Raises zmq.ZMQError if the address cannot be bound."""
        ...

    def connect(self, address: str) -> None:
        """Raises zmq.ZMQError if the address is none."""
        ...

    def send(self, *frames: bytes) -> None:
        """Raises zmq.ZMQError if a server names a client that has gone."""
        ...

    def close(self) -> None: ...


class HostSockets(Protocol):
    """Opens sockets. The first frame at a server names the client, both ways."""

    def server(self, on_message: OnMessage, on_disconnect: OnDisconnect) -> MessageSocket:
        """Raises zmq.ZMQError if there is no socket left."""
        ...

    def client(self, on_message: OnMessage, on_disconnect: OnDisconnect) -> MessageSocket:
        """Raises zmq.ZMQError if there is no socket left."""
        ...


@dataclass(frozen=True)
class CurveSockets:
    """`HostSockets` over ZeroMQ, encrypted and open to one key."""

    context: zmq.Context[zmq.Socket[bytes]]
    """Context with an authenticator."""
    keys: CurveKeys
    faults: Faults = field(default_factory=lambda: Faults(None))

    def server(self, on_message: OnMessage, on_disconnect: OnDisconnect) -> MessageSocket:
        socket = host_socket(self.context, zmq.ROUTER)
        # A message to a router that has gone raises an error instead of being lost in silence.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        encrypt_server(socket, self.keys)
        return self._opened("host", socket, on_message, on_disconnect)

    def client(self, on_message: OnMessage, on_disconnect: OnDisconnect) -> MessageSocket:
        socket = host_socket(self.context, zmq.DEALER)
        encrypt_client(socket, self.keys)
        # The system notices at once when a process has gone; a cut line shows by missing heartbeats.
        return self._opened("router", socket, on_message, on_disconnect)

    def _opened(
        self,
        end: str,
        socket: zmq.Socket[bytes],
        on_message: OnMessage,
        on_disconnect: OnDisconnect,
    ) -> MessageSocket:
        receive = self.faults.messages(f"{end}.receive", on_message)
        opened = EventSocket(socket, receive, on_disconnect)
        send = self.faults.messages(f"{end}.send", opened.send)
        return opened if send == opened.send else _FaultySocket(opened, send)


class _FaultySocket:
    """A socket that sends through a point of faults."""

    def __init__(self, inner: EventSocket, send: Callable[..., None]) -> None:
        self._inner = inner
        self.send = send
        self.bind, self.connect, self.close = inner.bind, inner.connect, inner.close

    @property
    def closed(self) -> bool:
        return self._inner.closed

    @property
    def port(self) -> int:
        return self._inner.port
