# SPDX-License-Identifier: Apache-2.0
"""KV events on ZeroMQ: a PUB socket for those who listen, a ROUTER socket for those who missed something.

Neither ever makes the engine wait. PUB drops what a slow subscriber does not take; it sees a gap in the numbers
and asks for the batches from there on, of which the last ones are kept. A replay goes out in parts, between steps.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Sequence
from itertools import islice

import msgspec
import zmq

from pagoda.errors import ConfigError
from pagoda.ipc.addresses import allow_ipv6
from pagoda.ipc.door import Door, guard
from pagoda.kv.events import AllBlocksCleared, KVEvent
from pagoda.plugins.kv_events.address import KVEventsAddress

TOPIC = b"kv-events"
"""Topic of vLLM's example."""
END = b"\xff" * 8
"""The number behind the last batch of a replay, -1; its payload is empty."""
MAX_KEPT_BATCHES = 10_000
MAX_KEPT_BYTES = 64 * 2**20
_MAX_UNSENT = 1000
_BATCHES_PER_TURN = 64
_REQUESTS_PER_TURN = 16
_MAX_REQUEST_BYTES = 4096


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """The events of one engine step, in their order."""

    ts: float
    """Seconds since 1970."""
    events: list[KVEvent]
    data_parallel_rank: int


class KVEventPublisher:
    """Numbers batches of events, sends them, and keeps the last ones for replays.

    The first batch of an engine's life says that all is cleared. Its number is the microseconds since 1970, so
    that the numbers of the next engine on this port are higher: to a subscriber a restart is a gap like any other.

    Raises ConfigError if a port is taken or this machine does not have the host's address.
    """

    def __init__(
        self,
        address: KVEventsAddress,
        replica: int,
        num_replicas: int,
        context: zmq.Context[zmq.Socket[bytes]],
    ) -> None:
        self._replica = replica
        self._encode = msgspec.msgpack.Encoder().encode
        self._kept: deque[bytes] = deque()
        self._num_kept_bytes = 0
        self._next_number = time.time_ns() // 1000
        self._replays: deque[tuple[list[bytes], int]] = deque()
        """Client, and the empty frame of a REQ socket, with the next number of each replay."""
        self._publications = _bound(
            context, zmq.PUB, address.host, address.publish_port(replica), _MAX_UNSENT
        )
        try:
            self.replay_socket = _bound(
                context,
                zmq.ROUTER,
                address.host,
                address.replay_port(replica, num_replicas),
                MAX_KEPT_BATCHES + 1,
            )
        except ConfigError:
            self._publications.close()
            raise
        self.publish([AllBlocksCleared()])

    @property
    def is_replaying(self) -> bool:
        """True if `replay` has more to do without any new request."""
        return bool(self._replays)

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Sends the events of one step, if there are any."""
        if not events:
            return
        payload = self._encode(KVEventBatch(time.time(), list(events), self._replica))
        self._publications.send_multipart([TOPIC, self._next_number.to_bytes(8, "big"), payload])
        self._next_number += 1
        self._kept.append(payload)
        self._num_kept_bytes += len(payload)
        while len(self._kept) > MAX_KEPT_BATCHES or self._num_kept_bytes > MAX_KEPT_BYTES:
            self._num_kept_bytes -= len(self._kept.popleft())

    def replay(self) -> None:
        """Takes requests, and goes on with one replay for a few batches."""
        self._receive()
        if not self._replays:
            return
        envelope, number = self._replays.popleft()
        oldest = self._next_number - len(self._kept)
        number = min(max(number, oldest), self._next_number)
        for payload in islice(self._kept, number - oldest, number - oldest + _BATCHES_PER_TURN):
            self.replay_socket.send_multipart([*envelope, number.to_bytes(8, "big"), payload])
            number += 1
        if number >= self._next_number:
            self.replay_socket.send_multipart([*envelope, END, b""])
        else:
            self._replays.append((envelope, number))

    def _receive(self) -> None:
        """A request is the first number wanted, in 8 bytes; a client that asks again begins anew."""
        for _ in range(_REQUESTS_PER_TURN):
            try:
                *envelope, wanted = self.replay_socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            number = int.from_bytes(wanted, "big") if len(wanted) == 8 else self._next_number
            others = (replay for replay in self._replays if replay[0][0] != envelope[0])
            self._replays = deque([*others, (envelope, number)])

    def close(self) -> None:
        self._publications.close()
        self.replay_socket.close()


def _bound(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, host: str, port: int, most_unsent: int
) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, most_unsent)
    socket.setsockopt(zmq.LINGER, 0)
    Door.limit(socket)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
    allow_ipv6(socket, host)
    guard(socket)
    try:
        socket.bind(f"tcp://{host}:{port}")
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigError(_reason(error.errno, host, port)) from None
    return socket


def _reason(code: int | None, host: str, port: int) -> str:
    if code == errno.EADDRINUSE:
        return f"--kv-events needs port {port} of {host}, which is taken; name another."
    if code == errno.EACCES:
        return f"--kv-events needs port {port}, which this user may not open; name one above 1023."
    return f"--kv-events names {host}, which is no address of this host; name one that is, or * for all."
