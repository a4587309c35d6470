"""The sockets between routers and hosts, as a parameter of both: ZeroMQ, or a network in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import zmq

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

    def server(self, on_message: OnMessage, on_disconnect: OnDisconnect) -> MessageSocket:
        socket = host_socket(self.context, zmq.ROUTER)
        # A message to a router that has gone raises an error instead of being lost in silence.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        encrypt_server(socket, self.keys)
        return EventSocket(socket, on_message, on_disconnect)

    def client(self, on_message: OnMessage, on_disconnect: OnDisconnect) -> MessageSocket:
        socket = host_socket(self.context, zmq.DEALER)
        encrypt_client(socket, self.keys)
        # The system notices at once when a process has gone; a cut line shows by missing heartbeats.
        return EventSocket(socket, on_message, on_disconnect)
