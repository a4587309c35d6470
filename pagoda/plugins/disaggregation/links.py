# SPDX-License-Identifier: Apache-2.0
"""Connections between engines: a listener where KV is exported, outgoing ones where KV is fetched."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import NamedTuple, Protocol

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from pagoda.errors import ConfigError
from pagoda.faults.injector import Faults
from pagoda.ipc.addresses import allow_ipv6, numeric
from pagoda.ipc.codec import Codec
from pagoda.ipc.curve import encrypt_client, encrypt_server
from pagoda.ipc.door import guard, pieces
from pagoda.messages.worker_config import CurveKeys
from pagoda.plugins.disaggregation.messages import DecodeMessage, PrefillMessage

_MAX_ANSWER_BYTES = 16 * 2**20
LINGER_MS = 1000
"""Milliseconds that the last messages of an engine that ends may take to go out."""
_CONNECT_TIMEOUT_MS = 5000
_LOSSES: dict[int, str] = {
    zmq.EVENT_DISCONNECTED: "it hung up",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it has another --cluster-key-file",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it does not speak as engines do",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it does not speak as engines do",
    zmq.EVENT_CONNECT_RETRIED: "nobody is there",
}

_log = logging.getLogger(__name__)

Context = zmq.Context[zmq.Socket[bytes]]


class PeerLost(NamedTuple):
    """There is no connection to an address (any more); `reason` is a clause."""

    reason: str


class KVListener(Protocol):
    """Receives what other engines ask, and answers them. No method waits."""

    @property
    def address(self) -> str:
        """Address at which other engines reach this one."""

    def receive(self) -> list[tuple[bytes, DecodeMessage]]:
        """Messages since the last call, each with the id of its sender."""

    def send(self, asker: bytes, message: PrefillMessage) -> None:
        """Answers a sender; drops the message if the sender is gone."""

    def pollables(self) -> list[object]: ...

    def close(self) -> None: ...


class Peers(Protocol):
    """Connections to engines that export KV, by address. No method waits."""

    def send(self, address: str, message: DecodeMessage) -> None:
        """Sends a message; connects first if there is no connection. If that fails, `PeerLost` follows."""

    def receive(self) -> list[tuple[str, PrefillMessage | PeerLost]]:
        """Messages since the last call. After `PeerLost`, the next `send` connects again."""

    def hang_up(self, address: str) -> None:
        """Ends the connection: nothing more comes from there, not even `PeerLost`. Sent messages may still go
        out."""

    def pollables(self) -> list[object]: ...

    def close(self) -> None: ...


class SocketListener:
    def __init__(
        self,
        context: Context,
        host: str,
        port: int,
        keys: CurveKeys,
        faults: Faults | None = None,
    ) -> None:
        """Binds `port` of this host's address `host`; 0 takes a free one. `context` must have an authenticator.

        A host name is resolved here, once: a peer would resolve it in the one thread that serves all its sockets.

        Raises ConfigError if the port cannot be bound.
        """
        host = _numeric(host)
        self._transmit = (faults or Faults(None)).messages("handoff.send", self._send)
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        encrypt_server(self._socket, keys)
        allow_ipv6(self._socket, host)
        try:
            guard(self._socket)
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            raise ConfigError(
                f"cannot listen for engines that fetch KV on {host}:{port} ({error.strerror})."
            ) from None
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        self.address = f"tcp://{host}:{bound}"
        self._encode = Codec[PrefillMessage](PrefillMessage).encode
        self._decode = Codec[DecodeMessage](DecodeMessage).decode

    def receive(self) -> list[tuple[bytes, DecodeMessage]]:
        messages: list[tuple[bytes, DecodeMessage]] = []
        with suppress(zmq.Again):
            while True:
                asker, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
                try:
                    messages.append((asker, self._decode(b"".join(parts))))
                except msgspec.DecodeError as error:
                    _log.warning("an engine that fetches KV sent what is not a message: %s", error)
        return messages

    def send(self, asker: bytes, message: PrefillMessage) -> None:
        self._transmit(asker, message)

    def _send(self, asker: bytes, message: PrefillMessage) -> None:
        # A peer that reads nothing must not make this engine wait: it counts as gone.
        with suppress(zmq.Again):
            self._socket.send_multipart([asker, self._encode(message)], zmq.NOBLOCK)

    def pollables(self) -> list[object]:
        return [self._socket]

    def close(self) -> None:
        self._socket.close()


def _numeric(host: str) -> str:
    """Returns the numeric address of `host`. Raises ConfigError if `host` has no address."""
    try:
        return numeric(host)
    except OSError as error:
        raise ConfigError(f"--advertise: {host} has no address ({error.strerror}).") from None


class _EngineConnection:
    """One connection. It is closed when lost, before ZeroMQ connects again to whoever is there then."""

    def __init__(self, context: Context, address: str, keys: CurveKeys) -> None:
        """Raises zmq.ZMQError if `address` is malformed."""
        self.address = address
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, LINGER_MS)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, _MAX_ANSWER_BYTES)
        self.socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
        encrypt_client(self.socket, keys)
        self.monitor = self.socket.get_monitor_socket(sum(_LOSSES))
        allow_ipv6(self.socket, address)
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
    def __init__(self, context: Context, keys: CurveKeys, faults: Faults | None = None) -> None:
        self._transmit = (faults or Faults(None)).messages("handoff.send", self._send)
        self._context = context
        self._keys = keys
        self._connections: dict[str, _EngineConnection] = {}
        self._by_socket: dict[object, _EngineConnection] = {}
        self._lost: list[tuple[str, PeerLost]] = []
        self._poller = zmq.Poller()
        """Asks all sockets at once: one after the other takes longer than many a step."""
        self._encode = Codec[DecodeMessage](DecodeMessage).encode
        self._decode = Codec[PrefillMessage](PrefillMessage).decode

    def send(self, address: str, message: DecodeMessage) -> None:
        self._transmit(address, message)

    def _send(self, address: str, message: DecodeMessage) -> None:
        try:
            connection = self._connections.get(address)
            if connection is None:
                connection = _EngineConnection(self._context, address, self._keys)
                self._connections[address] = connection
                for source in (connection.socket, connection.monitor):
                    self._by_socket[source] = connection
                    self._poller.register(source, zmq.POLLIN)
            frames = pieces(self._encode(message))
            connection.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._lose(address, f"it cannot be reached ({error.strerror})")

    def receive(self) -> list[tuple[str, PrefillMessage | PeerLost]]:
        messages: list[tuple[str, PrefillMessage | PeerLost]] = []
        ready = self._poller.poll(0) if self._connections else []
        for connection in dict.fromkeys(self._by_socket[source] for source, _ in ready):
            loss = connection.loss()  # before the socket is read: a last message is not overlooked
            messages += self._read(connection)
            if loss is not None and connection.address in self._connections:
                self._lose(connection.address, loss.reason)
        lost, self._lost = self._lost, []
        return [*messages, *lost]

    def _read(self, connection: _EngineConnection) -> list[tuple[str, PrefillMessage | PeerLost]]:
        messages: list[tuple[str, PrefillMessage | PeerLost]] = []
        with suppress(zmq.Again):
            while True:
                payload = b"".join(connection.socket.recv_multipart(zmq.NOBLOCK))
                try:
                    messages.append((connection.address, self._decode(payload)))
                except msgspec.DecodeError as error:
                    self._lose(connection.address, f"it sent what is not a message ({error})")
                    break
        return messages

    def _lose(self, address: str, reason: str) -> None:
        self.hang_up(address)
        self._lost.append((address, PeerLost(reason)))

    def hang_up(self, address: str) -> None:
        connection = self._connections.pop(address, None)
        if connection is not None:
            for source in (connection.socket, connection.monitor):
                del self._by_socket[source]
                self._poller.unregister(source)
            connection.close()

    def pollables(self) -> list[object]:
        return list(self._by_socket)

    def close(self) -> None:
        for address in list(self._connections):
            self.hang_up(address)
