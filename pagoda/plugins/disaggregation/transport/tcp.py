# SPDX-License-Identifier: Apache-2.0
"""KV over TCP: between any two hosts, without further software.

A reader connects, opens a confidential channel (TLS with anonymous Diffie-Hellman over an elliptic curve, which
is cheap enough for strangers) and proves over it that it knows the secret. The proof covers the channel
(`tls-unique`, RFC 5929), so a man in the middle cannot pass it on. Then TLS ends, and bytes go unencrypted. If
one side wants encryption, a second handshake with another cipher follows: AES-GCM is four times as fast as the
ciphers with curves, but needs the slow group ffdhe2048 (RFC 7919).

A request is a count and as many triples (region, offset, length); the answer is these bytes in order. They go
from the exporter's memory to the socket and from the reader's socket to their targets, without a copy in
between. A request that does not fit the regions ends the connection.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pagoda.errors import TransportError
from pagoda.ipc.addresses import bracketed, family
from pagoda.kv.memory import DeviceMemory, Extent, OwnMemory
from pagoda.plugins.disaggregation.transport.base import Access, MemorySpan
from pagoda.plugins.disaggregation.transport.proof import (
    Prover,
    keep_trying,
    receive,
    send_all,
    wait_until,
)
from pagoda.plugins.disaggregation.transport.remote_memory import batches, read_descriptor
from pagoda.plugins.disaggregation.transport.stream_server import HANDSHAKE_S, StreamServer

MAX_SPANS = 4096
MAX_REQUEST_BYTES = 2**30
MAX_STREAMS = 4
"""Streams of one link: one seldom fills the network between hosts."""
_STREAM_BYTES = 2**23
"""Bytes for which a further stream is worth it."""
_SILENCE_S = 10.0
"""Seconds for which no byte may move in the middle of a request."""
_STAGING_BYTES = 2**24
"""Bytes that are copied from a device's memory before they are sent."""
_BUFFERS = 1024
"""The most that one call of the kernel takes (IOV_MAX)."""

_COUNT = struct.Struct("<I")
_ENTRY = struct.Struct("<IQQ")
PLAIN, ENCRYPTED = 0, 1
_CIPHERS = {PLAIN: "AECDH-AES256-SHA", ENCRYPTED: "ADH-AES256-GCM-SHA384"}
"""Ciphers for the proof, and for KV."""
_GROUP = Path(__file__).parent / "ffdhe2048.pem"


class TcpDescriptor(msgspec.Struct, frozen=True):
    host: str
    port: int
    export_id: bytes
    encrypts: bool


_Parts = Callable[[Sequence[Extent]], Iterable[list[memoryview]]]
"""Gives bytes of regions in parts; one is sent before the next is asked for."""


class TcpTransport:
    def __init__(self, memory: OwnMemory | DeviceMemory, access: Access) -> None:
        self._memory = memory
        self._access = access

    def export(self) -> TcpListener:
        return TcpListener(self._memory, self._access)

    def connect(self, descriptor: bytes, deadline: float) -> TcpLink:
        return TcpLink(descriptor, self._access, deadline)


class TcpListener(StreamServer):
    """Serves memory of this process, or copies of a device's, each reader in a thread of its own."""

    def __init__(self, memory: OwnMemory | DeviceMemory, access: Access) -> None:
        """Raises TransportError if `access.host` is not an address of this host."""
        if isinstance(memory, DeviceMemory):
            self._sizes = memory.sizes
            self._parts: _Parts = partial(_copied, memory)
        else:
            self._sizes = tuple(region.num_bytes for region in memory.regions)
            self._parts = partial(_in_place, [_bytes_at(*region) for region in memory.regions])
        self._encrypts = access.encrypts
        self._tls = {wish: tls_context(ssl.PROTOCOL_TLS_SERVER, wish) for wish in _CIPHERS}
        self.prover = Prover(access.secret)
        host = access.host.strip("[]")
        listener = socket.socket(family(host))
        try:
            listener.bind((host, 0))
        except OSError as error:
            listener.close()
            raise TransportError(f"{access.host} is no address of this host: {error}") from None
        port: int = listener.getsockname()[1]
        self.descriptor = msgspec.msgpack.encode(
            TcpDescriptor(host, port, self.prover.export_id, access.encrypts)
        )
        super().__init__(listener, "kv-tcp-export")

    def _admit(self, stream: socket.socket, deadline: float) -> socket.socket:
        _tune(stream)
        channel, wish = self._prove(stream, PLAIN, deadline)
        if self._encrypts and wish != ENCRYPTED:
            raise TransportError("a reader wants no encryption, but this host does")
        bare = unwrap(channel, deadline)
        return self._prove(bare, ENCRYPTED, deadline)[0] if wish == ENCRYPTED else bare

    def _prove(
        self, stream: socket.socket, kind: int, deadline: float
    ) -> tuple[ssl.SSLSocket, int]:
        """Returns a channel to a reader that knows the secret, and the reader's wish."""
        wait_until(stream, deadline)
        channel = self._tls[kind].wrap_socket(stream, server_side=True)
        return channel, self.prover.admit(channel, channel_binding(channel), deadline)

    def _serve(self, stream: socket.socket) -> None:
        while True:
            # The reader may ask for something at any time; the kernel finds out if it is alive.
            stream.settimeout(None)
            first = stream.recv(1)
            if not first:
                return
            extents = self._read_request(stream, first)
            stream.settimeout(_SILENCE_S)
            for pieces in self._parts(extents):
                if isinstance(stream, ssl.SSLSocket):
                    for piece in pieces:
                        stream.sendall(piece)
                else:
                    _send(stream, pieces)

    def _read_request(self, stream: socket.socket, first: bytes) -> list[Extent]:
        deadline = time.monotonic() + _SILENCE_S
        rest = receive(stream, _COUNT.size - 1, deadline)
        (count,) = _COUNT.unpack(first + rest)
        if not 1 <= count <= MAX_SPANS:
            raise TransportError(
                f"a reader asks for {count} pieces, at most {MAX_SPANS} are allowed"
            )
        table = receive(stream, count * _ENTRY.size, deadline)
        extents = [self._checked(*entry) for entry in _ENTRY.iter_unpack(table)]
        if sum(extent.num_bytes for extent in extents) > MAX_REQUEST_BYTES:
            raise TransportError(f"a reader asks for more than {MAX_REQUEST_BYTES} bytes at once")
        return extents

    def _checked(self, region: int, offset: int, num_bytes: int) -> Extent:
        if region >= len(self._sizes):
            raise TransportError(f"a reader asks for region {region} of {len(self._sizes)}")
        if not (num_bytes >= 1 and offset + num_bytes <= self._sizes[region]):
            raise TransportError(f"a reader asks for bytes beyond the end of region {region}")
        return Extent(region, offset, num_bytes)


def _bytes_at(address: int, num_bytes: int) -> memoryview:
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


def _in_place(regions: Sequence[memoryview], extents: Sequence[Extent]) -> list[list[memoryview]]:
    """Host memory that is to be sent, all at once."""
    return [[regions[region][at : at + num_bytes] for region, at, num_bytes in extents]]


def _copied(memory: DeviceMemory, extents: Sequence[Extent]) -> Iterator[list[memoryview]]:
    """Copies of a device's memory that are to be sent, part by part in one buffer."""
    spans = (MemorySpan(*extent, target=0) for extent in extents)
    total = sum(extent.num_bytes for extent in extents)
    buffer = memoryview(bytearray(min(total, _STAGING_BYTES)))
    for batch in batches(spans, _STAGING_BYTES, sys.maxsize):
        part = buffer[: sum(span.num_bytes for span in batch)]
        memory.copy([Extent(*span[:3]) for span in batch], part)
        yield [part]


class TcpLink:
    """Streams to one exporter. A large read uses several at once, and concurrent reads use others."""

    own_regions = ()

    def __init__(self, descriptor: bytes, access: Access, deadline: float) -> None:
        """Raises TransportError if the exporter does not answer before `deadline` or refuses this reader."""
        self._remote = read_descriptor(descriptor, TcpDescriptor)
        self.prover = Prover(access.secret, self._remote.export_id)
        self._wish = ENCRYPTED if access.encrypts or self._remote.encrypts else PLAIN
        self._tls = {
            wish: tls_context(ssl.PROTOCOL_TLS_CLIENT, wish) for wish in (PLAIN, self._wish)
        }
        self._lock = threading.Lock()
        """Guards all that follows."""
        self._idle: list[socket.socket] = []
        self._busy: set[socket.socket] = set()
        self._is_closed = False
        self._put_back(self._take(deadline))

    def read(self, spans: Sequence[MemorySpan], deadline: float) -> None:
        total = sum(span.num_bytes for span in spans)
        num_streams = max(1, min(MAX_STREAMS, total // _STREAM_BYTES))
        first, *others = [*batches(spans, -(-total // num_streams), sys.maxsize)] or [[]]
        pool = ThreadPoolExecutor(MAX_STREAMS, "kv-tcp-read")
        try:
            readings = [pool.submit(self._read, share, deadline) for share in others]
            self._read(first, deadline)
        finally:
            pool.shutdown(cancel_futures=True)  # none may write to the targets after this call
        for reading in readings:
            reading.result()

    def _read(self, spans: Sequence[MemorySpan], deadline: float) -> None:
        stream = self._take(deadline)
        try:
            _receive_spans(stream, spans, deadline)
        except BaseException as error:
            self._drop(stream)
            if isinstance(error, OSError):
                raise TransportError(self._clause(error)) from error
            raise
        self._put_back(stream)

    def _take(self, deadline: float) -> socket.socket:
        with self._lock:
            if self._is_closed:
                raise TransportError("the connection was closed")
            if self._idle:
                stream = self._idle.pop()
                self._busy.add(stream)
                return stream
        stream = self._open(deadline)
        with self._lock:
            self._busy.add(stream)
            is_closed = self._is_closed
        if is_closed:
            self._drop(stream)
            raise TransportError("the connection was closed")
        return stream

    def _open(self, deadline: float) -> socket.socket:
        deadline = min(deadline, time.monotonic() + HANDSHAKE_S)
        try:
            return keep_trying(partial(self._enter, deadline), deadline)
        except (OSError, TransportError) as error:
            raise TransportError(self._clause(error)) from error

    def _enter(self, deadline: float) -> socket.socket:
        where = self._remote.host, self._remote.port
        with contextlib.ExitStack() as opened:
            limit = max(0.001, deadline - time.monotonic())
            stream = opened.enter_context(socket.create_connection(where, limit))
            _tune(stream)
            channel = opened.enter_context(self._prove(stream, PLAIN, deadline))
            stream = opened.enter_context(unwrap(channel, deadline))
            if self._wish == ENCRYPTED:
                stream = opened.enter_context(self._prove(stream, ENCRYPTED, deadline))
            opened.pop_all()
        return stream

    def _prove(self, stream: socket.socket, kind: int, deadline: float) -> ssl.SSLSocket:
        """Returns a channel to the exporter, which has proved its identity."""
        wait_until(stream, deadline)
        channel = self._tls[kind].wrap_socket(stream)
        try:
            self.prover.enter(channel, channel_binding(channel), self._wish, deadline)
        except BaseException:
            channel.close()
            raise
        return channel

    def _clause(self, error: Exception) -> str:
        return f"{bracketed(self._remote.host)}:{self._remote.port}: {error}"

    def _put_back(self, stream: socket.socket) -> None:
        with self._lock:
            self._busy.discard(stream)
            if not self._is_closed:
                self._idle.append(stream)
                return
        stream.close()

    def _drop(self, stream: socket.socket) -> None:
        with self._lock:
            self._busy.discard(stream)
        stream.close()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for stream in self._busy:  # whoever reads from it closes it
                # Wakes the thread by the socket below TLS, which that thread uses.
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(stream, socket.SHUT_RDWR)
        for stream in idle:
            stream.close()


def _receive_spans(stream: socket.socket, spans: Sequence[MemorySpan], deadline: float) -> None:
    """Raises OSError if the stream ends or `deadline` passes."""
    for request in batches(spans, MAX_REQUEST_BYTES, MAX_SPANS):
        entries = (_ENTRY.pack(span.region, span.offset, span.num_bytes) for span in request)
        send_all(stream, _COUNT.pack(len(request)) + b"".join(entries), deadline)
        targets: list[Any] = [
            (ctypes.c_char * span.num_bytes).from_address(span.target) for span in request
        ]
        first = 0
        while first < len(targets):
            wait_until(stream, deadline, _SILENCE_S)
            if isinstance(stream, ssl.SSLSocket):  # which fills one buffer at a time
                count = stream.recv_into(targets[first])
            else:
                count = stream.recvmsg_into(targets[first : first + _BUFFERS])[0]
            if not count:
                raise ConnectionResetError("the connection was closed")
            first = _advance(targets, first, count)


def _send(stream: socket.socket, pieces: list[memoryview]) -> None:
    first = 0
    buffers: list[Any] = pieces
    while first < len(buffers):
        first = _advance(buffers, first, stream.sendmsg(buffers[first : first + _BUFFERS]))


def _advance(buffers: list[Any], first: int, count: int) -> int:
    """Skips `count` bytes of `buffers[first:]`: cuts the buffer in which they end, and returns its index."""
    while count:
        size = memoryview(buffers[first]).nbytes
        if count < size:
            buffers[first] = memoryview(buffers[first]).cast("B")[count:]
            return first
        count -= size
        first += 1
    return first


def tls_context(side: int, kind: int = PLAIN) -> ssl.SSLContext:
    """Raises TransportError if this build of OpenSSL lacks a cipher that the channel needs."""
    context = ssl.SSLContext(side)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # a proof over this very channel tells who is there
    # The last version with anonymous key exchange and with a name for the channel that Python can tell.
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.set_ciphers(f"{_CIPHERS[kind]}:@SECLEVEL=0")  # level 1 has no anonymous ones
    except ssl.SSLError:
        raise TransportError(f"this OpenSSL does not have {_CIPHERS[kind]}") from None
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
    if side == ssl.PROTOCOL_TLS_SERVER and kind == ENCRYPTED:
        context.load_dh_params(str(_GROUP))
    return context


def channel_binding(channel: ssl.SSLSocket) -> bytes:
    binding = channel.get_channel_binding("tls-unique")
    if binding is None:
        raise TransportError("the channel has no name that a proof could cover")
    return binding


def unwrap(channel: ssl.SSLSocket, deadline: float) -> socket.socket:
    """Returns the stream below, once both sides have ended TLS."""
    wait_until(channel, deadline)
    channel.unwrap()
    return socket.socket(channel.family, channel.type, channel.proto, channel.detach())


def _tune(stream: socket.socket) -> None:
    """Makes the socket send at once and notice a peer that vanished."""
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
