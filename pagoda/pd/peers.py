"""The ways of an engine that fetches KV to those that hold it: one socket per address, opened when needed."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple, Protocol

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from pagoda.ipc.codec import Codec
from pagoda.ipc.curve import encrypt_client
from pagoda.messages.worker_config import CurveKeys
from pagoda.pd.messages import DecodeMessage, PrefillMessage

_MAX_MESSAGE_BYTES = 16 * 2**20
_LINGER_MS = 1000
_CONNECT_TIMEOUT_MS = 5000
_LOSSES: dict[int, str] = {
    zmq.EVENT_DISCONNECTED: "it hung up",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it has another --cluster-key-file",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it does not speak as engines do",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it does not speak as engines do",
    zmq.EVENT_CONNECT_RETRIED: "nobody is there",
}


class PeerLost(NamedTuple):
    """There is no connection to this address, or none any more; a clause says why."""

    reason: str


class Peers(Protocol):
    """What is said to engines that hold KV, by their addresses, and what they say."""

    def send(self, address: str, message: DecodeMessage) -> None:
        """Connects where there is no connection, and never waits for it. If there is none, `PeerLost` follows."""
        ...

    def receive(self) -> list[tuple[str, PrefillMessage | PeerLost]]:
        """What has come since the last call. After `PeerLost`, the next `send` connects anew."""
        ...

    def hang_up(self, address: str) -> None:
        """Nothing more comes from there, `PeerLost` neither; what was sent before may still go out."""
        ...

    def pollables(self) -> list[object]: ...

    def close(self) -> None: ...


class _Connection:
    """One connection; ZeroMQ would connect it again, to whoever is there then, but it is let go first."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, keys: CurveKeys
    ) -> None:
        """
        Raises:
            zmq.ZMQError: `address` is none.
        """
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        self.socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
        encrypt_client(self.socket, keys)
        self.monitor = self.socket.get_monitor_socket(sum(_LOSSES))
        try:
            self.socket.connect(address)
        except zmq.ZMQError:
            self.close()
            raise

    def loss(self) -> PeerLost | None:
        with suppress(zmq.Again):
            event = recv_monitor_message(self.monitor, zmq.NOBLOCK)
            return PeerLost(_LOSSES[int(event["event"])])
        return None

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close()


class SocketPeers:
    """ZeroMQ dealers."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys) -> None:
        self._context = context
        self._keys = keys
        self._connections: dict[str, _Connection] = {}
        self._lost: list[tuple[str, PeerLost]] = []
        self._poller = zmq.Poller()
        """Over all of their sockets: to ask one after the other costs more than many a step."""
        self._encode = Codec[DecodeMessage](DecodeMessage).encode
        self._decode = Codec[PrefillMessage](PrefillMessage).decode

    def send(self, address: str, message: DecodeMessage) -> None:
        connection = self._connections.get(address)
        try:
            if connection is None:
                connection = _Connection(self._context, address, self._keys)
                self._connections[address] = connection
                self._poller.register(connection.socket, zmq.POLLIN)
                self._poller.register(connection.monitor, zmq.POLLIN)
            connection.socket.send(self._encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._lose(address, f"it cannot be reached ({error.strerror})")

    def receive(self) -> list[tuple[str, PrefillMessage | PeerLost]]:
        messages: list[tuple[str, PrefillMessage | PeerLost]] = []
        has_news = bool(self._connections) and bool(self._poller.poll(0))
        for address, connection in list(self._connections.items()) if has_news else ():
            loss = connection.loss()  # before the socket is read: a last message is not overlooked
            messages += self._read(address, connection)
            if loss is not None and address in self._connections:
                self._lose(address, loss.reason)
        lost, self._lost = self._lost, []
        return [*messages, *lost]

    def _read(
        self, address: str, connection: _Connection
    ) -> list[tuple[str, PrefillMessage | PeerLost]]:
        messages: list[tuple[str, PrefillMessage | PeerLost]] = []
        with suppress(zmq.Again):
            while True:
                payload = b"".join(connection.socket.recv_multipart(zmq.NOBLOCK))
                try:
                    messages.append((address, self._decode(payload)))
                except msgspec.DecodeError as error:
                    self._lose(address, f"it sent what is not a message ({error})")
                    break
        return messages

    def _lose(self, address: str, reason: str) -> None:
        self.hang_up(address)
        self._lost.append((address, PeerLost(reason)))

    def hang_up(self, address: str) -> None:
        connection = self._connections.pop(address, None)
        if connection is not None:
            self._poller.unregister(connection.socket)
            self._poller.unregister(connection.monitor)
            connection.close()

    def pollables(self) -> list[object]:
        return [
            socket
            for connection in self._connections.values()
            for socket in (connection.socket, connection.monitor)
        ]

    def close(self) -> None:
        for address in list(self._connections):
            self.hang_up(address)
