"""Where an engine that holds KV is asked for it: a socket on TCP, open to the holders of the cluster's secret."""

from __future__ import annotations

import logging
import socket
from contextlib import suppress
from typing import Protocol

import msgspec
import zmq

from pagoda.errors import ConfigError
from pagoda.ipc.codec import Codec
from pagoda.ipc.curve import encrypt_server
from pagoda.messages.worker_config import CurveKeys
from pagoda.pd.messages import DecodeMessage, PrefillMessage

_MAX_MESSAGE_BYTES = 2**20
_LINGER_MS = 1000
"""How long the last words of an engine that ends may take to go out."""

_log = logging.getLogger(__name__)


class Listener(Protocol):
    """What other engines say, and the way to answer them."""

    @property
    def address(self) -> str:
        """How others reach it."""
        ...

    def receive(self) -> list[tuple[bytes, DecodeMessage]]:
        """What has come since the last call, with who said it. Never waits."""
        ...

    def send(self, asker: bytes, message: PrefillMessage) -> None:
        """Who is gone meanwhile gets nothing."""
        ...

    def pollables(self) -> list[object]: ...

    def close(self) -> None: ...


class SocketListener:
    """A ZeroMQ router."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], host: str, port: int, keys: CurveKeys
    ) -> None:
        """Binds `port` of this host's address `host`; 0 takes a free one. `context` must have an authenticator.

        A name is looked up once, here: whoever connects would do it in the one thread that serves all peers.

        Raises:
            ConfigError: that is not possible.
        """
        host = _literal(host)
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        encrypt_server(self._socket, keys)
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            raise ConfigError(
                f"cannot listen for engines that fetch KV on {host}:{port} ({error.strerror})."
            ) from None
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        self._address = f"tcp://{host}:{bound}"
        self._encode = Codec[PrefillMessage](PrefillMessage).encode
        self._decode = Codec[DecodeMessage](DecodeMessage).decode

    @property
    def address(self) -> str:
        return self._address

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
        # One that reads nothing is one that is gone: it must not make this engine wait.
        with suppress(zmq.Again):
            self._socket.send_multipart([asker, self._encode(message)], zmq.NOBLOCK)

    def pollables(self) -> list[object]:
        return [self._socket]

    def close(self) -> None:
        self._socket.close()


def _literal(host: str) -> str:
    """The address of `host` in figures.

    Raises:
        ConfigError: there is none.
    """
    if host.startswith("["):
        return host
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--advertise: {host} has no address ({error.strerror}).") from None
    return str(found[0][4][0])
