# SPDX-License-Identifier: Apache-2.0
"""Mutual proof that both ends of a stream know the secret, without sending it.

    exporter ── nonce ──>                         reader
             <─ nonce, wish, proof of reader ──
             ── proof of exporter ──>

A proof is an HMAC-SHA256 (RFC 2104) over both nonces, the id of the exported memory (another process may have
taken over its port) and the channel (a man in the middle cannot pass proofs on). A stranger gets a nonce and
nothing else.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import ssl
import time
from collections.abc import Callable
from typing import TypeVar

from pagoda.errors import TransportError

_ATTEMPTS = 5
_PAUSE_S = 0.05
"""Seconds before the second attempt; doubled before each further one."""
_EXPORT_ID_BYTES = 16
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_WISH_BYTES = 1

EnteredT = TypeVar("EnteredT")


class HungUpError(TransportError):
    """The exporter hung up without a reason."""


class Prover:
    """Proves and verifies knowledge of the secret, for one exported memory."""

    def __init__(self, secret: bytes, export_id: bytes | None = None) -> None:
        """An exporter gives no `export_id`: it gets a new one."""
        self.export_id = export_id or secrets.token_bytes(_EXPORT_ID_BYTES)
        self._key = hashlib.blake2b(secret, digest_size=32, person=b"pagoda-kv").digest()

    def admit(self, stream: socket.socket, channel: bytes, deadline: float) -> int:
        """The exporter's part; returns the reader's wish, a number below 256. `channel` names the channel at
        both ends.

        Raises TransportError if the reader does not know the secret or wants another memory, OSError if the
        connection is closed or `deadline` passes.
        """
        nonce = secrets.token_bytes(_NONCE_BYTES)
        send_all(stream, nonce, deadline)
        answer = receive(stream, _NONCE_BYTES + _WISH_BYTES + _PROOF_BYTES, deadline)
        said, given = answer[:-_PROOF_BYTES], answer[-_PROOF_BYTES:]
        transcript = nonce + said
        if not hmac.compare_digest(given, self._proof(b"reader", channel, transcript)):
            raise TransportError("somebody came without the secret")
        send_all(stream, self._proof(b"export", channel, transcript), deadline)
        return said[_NONCE_BYTES]

    def enter(self, stream: socket.socket, channel: bytes, wish: int, deadline: float) -> None:
        """The reader's part.

        Raises TransportError if the exporter is another one or refuses this reader, OSError if the connection is
        closed or `deadline` passes.
        """
        nonce = receive(stream, _NONCE_BYTES, deadline)
        said = secrets.token_bytes(_NONCE_BYTES) + bytes([wish])
        transcript = nonce + said
        send_all(stream, said + self._proof(b"reader", channel, transcript), deadline)
        try:
            given = receive(stream, _PROOF_BYTES, deadline)
        except ConnectionError:
            raise HungUpError(
                "it is another's by now, or the cluster's key is not the same there"
            ) from None
        if not hmac.compare_digest(given, self._proof(b"export", channel, transcript)):
            raise TransportError("whoever is there does not know the cluster's key")

    def _proof(self, who: bytes, channel: bytes, transcript: bytes) -> bytes:
        parts = (who.ljust(8), self.export_id, hashlib.sha256(channel).digest(), transcript)
        return hmac.digest(self._key, b"".join(parts), "sha256")


def keep_trying(enter: Callable[[], EnteredT], deadline: float) -> EnteredT:
    """Returns the result of `enter`, with retries: an exporter under attack may hang up on a rightful reader.

    Raises what `enter` raises the last time.
    """
    for attempt in range(_ATTEMPTS - 1):
        try:
            return enter()
        except ConnectionRefusedError:
            raise
        except (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError, HungUpError):
            pause_s = _PAUSE_S * 2**attempt
            if time.monotonic() + pause_s >= deadline:
                raise
            time.sleep(pause_s)
    return enter()


def receive(stream: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """Raises OSError if the stream ends before `num_bytes` bytes or they take longer than until `deadline`."""
    parts: list[bytes] = []
    while num_bytes:
        wait_until(stream, deadline)
        part = stream.recv(num_bytes)
        if not part:
            raise ConnectionResetError("the connection was closed")
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


def send_all(stream: socket.socket, data: bytes, deadline: float) -> None:
    wait_until(stream, deadline)
    stream.sendall(data)


def wait_until(stream: socket.socket, deadline: float, most_s: float | None = None) -> None:
    """Lets the next operation on `stream` take until `deadline`, but no longer than `most_s`.

    Raises TimeoutError if `deadline` is over.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("it took too long")
    stream.settimeout(left if most_s is None else min(left, most_s))
