# SPDX-License-Identifier: Apache-2.0
"""Doors: what strangers may cost at a socket that listens to other hosts, until they prove that they know the key.

Frames are short, for what is read of one is kept until it is whole; long messages go in pieces. A connection has
`HANDSHAKE_S` to pass the handshake, and only so many may wait for that: beyond it the oldest one from the most
frequent origin is closed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import zmq
from zmq.utils.monitor import parse_monitor_message

FRAME_BYTES = 2**16
"""A longer frame, encrypted, closes the connection that brings it."""
_PIECE_BYTES = 2**15
MAX_STRANGERS = 256
HANDSHAKE_S = 10.0

_Bytes = TypeVar("_Bytes", bytes, memoryview)


def pieces(payload: _Bytes) -> list[_Bytes]:
    """The frames in which a message goes to a door; the receiver joins them."""
    if len(payload) <= _PIECE_BYTES:
        return [payload]
    return [payload[at : at + _PIECE_BYTES] for at in range(0, len(payload), _PIECE_BYTES)]


class _Stranger(NamedTuple):
    came_at: float
    origin: str
    """The address of its host; empty where all are on this one."""


class Door:
    """The connections at one socket that may not have passed the handshake: those that came lately, less those
    that have passed lately. Which ones have passed the socket does not say."""

    EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
    """The events that a monitor of the socket must give."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._strangers: dict[int, _Stranger] = {}
        """Connections by file descriptor, oldest first."""
        self._passed: deque[float] = deque()
        """Times at which connections have passed the handshake."""

    @staticmethod
    def limit(socket: zmq.Socket[Any]) -> None:
        """Lets `socket`, which is not bound yet, take short frames alone, and wait for handshakes not for long."""
        socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, round(HANDSHAKE_S * 1000))

    def take(self, frames: list[bytes]) -> bool:
        """Takes an event of the socket's monitor; returns True if a peer has gone."""
        event = parse_monitor_message(frames)
        kind, number, now = event["event"], int(event["value"]), self._clock()
        if kind == zmq.EVENT_ACCEPTED:
            self._strangers.pop(number, None)  # the descriptor of one that has gone
            self._strangers[number] = _Stranger(now, _origin(number))
        elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._passed.append(now)
        elif kind == zmq.EVENT_DISCONNECTED:
            self._strangers.pop(number, None)
            return True
        self._forget_old(now - HANDSHAKE_S)
        while len(self._strangers) - len(self._passed) > MAX_STRANGERS:
            self._send_away_one()
        return False

    def _forget_old(self, time: float) -> None:
        """Forgets what was before: the socket itself has closed what had not passed the handshake by now."""
        while self._passed and self._passed[0] < time:
            self._passed.popleft()
        while self._strangers:
            first = next(iter(self._strangers))
            if self._strangers[first].came_at >= time:
                return
            del self._strangers[first]

    def _send_away_one(self) -> None:
        crowds = Counter(stranger.origin for stranger in self._strangers.values())
        fd = max(self._strangers, key=lambda fd: crowds[self._strangers[fd].origin])
        stranger = self._strangers.pop(fd)
        if _origin(fd) == stranger.origin:
            _hang_up(fd)


def guard(socket: zmq.Socket[Any]) -> None:
    """Keeps the door of `socket` from now on, in a thread that ends when the socket is closed. For sockets
    whose monitor nobody else reads. Raises zmq.ZMQError if there is no socket left for that."""
    address = f"inproc://door-{uuid.uuid4().hex}"  # the one before may end later than its socket
    socket.monitor(address, Door.EVENTS | zmq.EVENT_MONITOR_STOPPED)
    # Through a shadow, since `context.destroy` would close the socket under the thread that waits at it.
    monitor: zmq.Socket[bytes] = zmq.Context.shadow(socket.context.underlying).socket(zmq.PAIR)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.connect(address)
    threading.Thread(target=_keep, args=(monitor,), name="door", daemon=True).start()


def _keep(monitor: zmq.Socket[bytes]) -> None:
    door = Door()
    with monitor, contextlib.suppress(zmq.ContextTerminated):
        while True:
            frames = monitor.recv_multipart()
            if parse_monitor_message(frames)["event"] == zmq.EVENT_MONITOR_STOPPED:
                return
            door.take(frames)


def _origin(fd: int) -> str:
    """The address of the host at the other end; empty where that cannot be said."""
    with contextlib.suppress(OSError), _stream(fd) as stream:
        address = stream.getpeername()
        return str(address[0]) if isinstance(address, tuple) else ""
    return ""


def _hang_up(fd: int) -> None:
    """Ends a connection whose descriptor another thread owns, and will close."""
    with contextlib.suppress(OSError), _stream(fd) as stream:
        stream.shutdown(socket.SHUT_RDWR)


def _stream(fd: int) -> socket.socket:
    """Raises OSError: what is behind the descriptor by now is no connection."""
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
