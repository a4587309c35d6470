# SPDX-License-Identifier: Apache-2.0
"""ZeroMQ sockets on an asyncio event loop: messages go to a function, and sending never waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import zmq

from pagoda.ipc.addresses import allow_ipv6
from pagoda.ipc.door import Door

_MAX_MESSAGES_PER_TURN = 256
"""Messages after which other work of the event loop has its turn."""
HEARTBEAT_S = 1.25
SILENCE_S = 5.0
"""A peer whose end of the connection says nothing for so long is gone. The system alone would wait for minutes."""


class EventSocket:
    """Owns a ZeroMQ socket and calls `on_message` in the running event loop with the frames of each message.

    ZeroMQ signals its file descriptor when the state of the socket changes, not once per message (`ZMQ_FD` is
    edge-triggered, and a send may consume the signal). So the socket is read until it is empty, and its state is
    checked after each send.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        on_message: Callable[[list[bytes]], None],
        on_disconnect: Callable[[], None] | None = None,
    ) -> None:
        """`on_disconnect` is called whenever a peer of `socket` has gone; with it, the socket's door is kept.

        Raises zmq.ZMQError if there is no socket left for the monitor; `socket` is closed then.
        """
        self._socket = socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._reading: asyncio.Handle | None = None
        self._monitor: EventSocket | None = None
        try:
            if on_disconnect is not None:
                door, events = Door(), socket.get_monitor_socket(Door.EVENTS)
                self._monitor = EventSocket(events, partial(_watch, door, on_disconnect))
        except zmq.ZMQError:
            socket.close()
            raise
        self._fd = socket.FD
        self._loop.add_reader(self._fd, self._read)
        self._read_later()

    @property
    def closed(self) -> bool:
        return self._socket.closed

    @property
    def port(self) -> int:
        return int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def bind(self, address: str) -> None:
        allow_ipv6(self._socket, address)
        self._socket.bind(address)

    def connect(self, address: str) -> None:
        allow_ipv6(self._socket, address)
        self._socket.connect(address)

    def send(self, *frames: bytes) -> None:
        """Raises zmq.ZMQError if a router socket with `ROUTER_MANDATORY` has no such peer or no room for the
        message.
        """
        self._socket.send_multipart(frames, zmq.NOBLOCK)
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._read_later()

    def close(self) -> None:
        """Drops unsent messages according to `ZMQ_LINGER`. May be called twice."""
        if self.closed:
            return
        if self._reading is not None:
            self._reading.cancel()
        self._loop.remove_reader(self._fd)
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close()
        self._socket.close()

    def _read_later(self) -> None:
        if self._reading is None:
            self._reading = self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._reading = None
        try:
            for _ in range(_MAX_MESSAGES_PER_TURN):
                if self.closed:
                    return
                try:
                    frames = self._socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    return
                self._on_message(frames)
        except BaseException:
            self._read_later()
            raise
        self._read_later()


def _watch(door: Door, on_disconnect: Callable[[], None], event: list[bytes]) -> None:
    if door.take(event):
        on_disconnect()


def host_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """A socket between hosts: its queues have no limit, its frames do, and silent peers are disconnected.
    Peers need not do the same."""
    socket: zmq.Socket[bytes] = zmq.Socket(context, kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    Door.limit(socket)
    socket.setsockopt(zmq.HEARTBEAT_IVL, round(HEARTBEAT_S * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(SILENCE_S * 1000))
    return socket
