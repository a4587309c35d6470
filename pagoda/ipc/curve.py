# SPDX-License-Identifier: Apache-2.0
"""Sockets between hosts: encrypted, and open to the holder of one key only.

CurveZMQ (RFC 26) encrypts and authenticates the side that binds. The context's authenticator (ZAP, RFC 27) is
asked for each connection: peers with another key are turned away before anything they send is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import threading
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from pagoda.errors import ConfigError
from pagoda.ipc.door import Door
from pagoda.messages.worker_config import CurveKeys

MIN_SECRET_BYTES = 16
_ZAP_ADDRESS = "inproc://zeromq.zap.01"


def new_keys() -> CurveKeys:
    return keys_of(secrets.token_bytes(32))


def keys_of(secret: bytes) -> CurveKeys:
    """Returns the keys that all holders of `secret` have in common."""
    server_secret_key, secret_key = (
        z85.encode(hashlib.blake2b(secret, digest_size=32, person=role).digest())
        for role in (b"pagoda-binds", b"pagoda-connects")
    )
    return CurveKeys(
        server_key=zmq.curve_public(server_secret_key).decode(),
        public_key=zmq.curve_public(secret_key).decode(),
        secret_key=secret_key.decode(),
        server_secret_key=server_secret_key.decode(),
    )


def read_cluster_key(path: Path) -> CurveKeys:
    """The keys of all hosts and routers that have this file; raises what `read_cluster_secret` does."""
    return keys_of(read_cluster_secret(path))


def read_cluster_secret(path: Path) -> bytes:
    """Raises ConfigError if the file cannot be read or is too short to be a secret."""
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"--cluster-key-file {path} cannot be read ({error.strerror}).") from None
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"--cluster-key-file {path} must hold a secret of {MIN_SECRET_BYTES} bytes or more, "
            f"such as `openssl rand -hex 32` makes; it has {len(secret)}."
        )
    return secret


def encrypt_server(socket: zmq.Socket[Any], keys: CurveKeys) -> None:
    """Encrypts `socket`. Call before it is bound, in a context with an authenticator, which alone checks keys.

    What is sent to it goes in `pieces`; its `Door` bounds strangers.
    """
    _keep_alive(socket)
    Door.limit(socket)
    socket.curve_server = True
    socket.curve_secretkey = keys.server_secret_key.encode()


def encrypt_client(socket: zmq.Socket[Any], keys: CurveKeys) -> None:
    """Encrypts `socket`. Call before it is connected."""
    _keep_alive(socket)
    socket.curve_serverkey = keys.server_key.encode()
    socket.curve_publickey = keys.public_key.encode()
    socket.curve_secretkey = keys.secret_key.encode()


def _keep_alive(socket: zmq.Socket[Any]) -> None:
    """Lets a socket between hosts notice within two minutes that its peer has vanished, also when idle."""
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 60)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 6)


def start_authenticator(context: zmq.Context[Any], keys: CurveKeys) -> None:
    """Lets only the holder of `keys.secret_key` connect to sockets of `context`, until that is terminated.

    Must be called before any of them is bound.
    """
    # Through a shadow, since `context.destroy` would close the socket under the thread that waits at it.
    door: zmq.Socket[bytes] = zmq.Context.shadow(context.underlying).socket(zmq.REP)
    door.setsockopt(zmq.LINGER, 0)
    door.bind(_ZAP_ADDRESS)
    key = z85.decode(keys.public_key)
    threading.Thread(target=_answer, args=(door, key), name="authenticator", daemon=True).start()


def _answer(door: zmq.Socket[bytes], key: bytes) -> None:
    with door, contextlib.suppress(zmq.ContextTerminated):
        while True:
            version, request_id, *_, mechanism, given = door.recv_multipart()
            known = mechanism == b"CURVE" and given == key
            status = [b"200", b"OK"] if known else [b"400", b"unknown key"]
            door.send_multipart([version, request_id, *status, b"", b""])
