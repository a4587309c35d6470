# SPDX-License-Identifier: Apache-2.0
"""KV within one host: the exporter passes its memory to readers, which copy from it.

The memory is a file without a name (memfd) that cannot shrink, and that nobody else can write to. It goes over a
unix socket, whose name is in no file system, to processes of the same user that prove that they know the secret.
The socket stays connected while the memory is exported; a read counts only if it still is when all is copied.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import math
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from pagoda.errors import TransportError
from pagoda.kv.memory import DeviceMemory, OwnMemory, Region
from pagoda.plugins.disaggregation.transport.base import Access
from pagoda.plugins.disaggregation.transport.proof import Prover, keep_trying, wait_until
from pagoda.plugins.disaggregation.transport.remote_memory import (
    BatchedLink,
    Piece,
    check_time,
    read_descriptor,
)
from pagoda.plugins.disaggregation.transport.stream_server import HANDSHAKE_S, StreamServer

_SEAL_FUTURE_WRITE = 0x10
"""`F_SEAL_FUTURE_WRITE` (Linux 5.1): only mappings that exist may be written to. `fcntl` has no name for it."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE
_CREDENTIALS = struct.Struct("3i")
_PROT_READ = 1
_MAP_SHARED = 1
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class ShmDescriptor(msgspec.Struct, frozen=True):
    boot_id: str
    """Boot id of the host: another host may have a socket of the same name."""
    name: str
    export_id: bytes
    regions: list[Region]
    """Regions of the file; the address of each is its offset in it."""


class ShmTransport:
    def __init__(self, memory: OwnMemory | DeviceMemory, access: Access) -> None:
        self._memory = memory
        self._access = access

    def export(self) -> ShmListener:
        if isinstance(self._memory, DeviceMemory):
            raise TransportError(
                "the KV cache lies on a device, and processes can share host memory only"
            )
        return ShmListener(self._memory, self._access.secret)

    def connect(self, descriptor: bytes, deadline: float) -> ShmLink:
        return ShmLink(descriptor, self._access.secret, deadline)


class ShmListener(StreamServer):
    def __init__(self, memory: OwnMemory, secret: bytes) -> None:
        """Raises TransportError if the memory cannot be shared or the system does not allow such a socket."""
        file = memory.file
        if file is None:
            raise TransportError("the KV cache is not in memory that processes can share")
        self._file = file.descriptor
        sizes = (region.num_bytes for region in memory.regions)
        regions = list(map(Region, file.offsets, sizes))
        self.prover = Prover(secret)
        name = f"pagoda-kv-{secrets.token_hex(16)}"
        try:
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(f"\0{name}")
        except OSError as error:
            raise TransportError(f"memory cannot be shared here: {error}") from None
        self.descriptor = msgspec.msgpack.encode(
            ShmDescriptor(_boot_id(), name, self.prover.export_id, regions)
        )
        super().__init__(listener, "kv-shm-export")

    def _admit(self, stream: socket.socket, deadline: float) -> socket.socket:
        _check_user(stream)
        self.prover.admit(stream, b"", deadline)
        return stream

    def _serve(self, stream: socket.socket) -> None:
        wait_until(stream, time.monotonic() + HANDSHAKE_S)
        socket.send_fds(stream, [b"\0"], [self._file])
        stream.settimeout(None)
        stream.recv(1)  # until the reader has gone, or the export is closed


class ShmLink(BatchedLink):
    """The exported memory, mapped into this process."""

    most_bytes = 2**26
    """Large copies bypass the processor's caches (glibc), which is a third faster."""

    def __init__(self, descriptor: bytes, secret: bytes, deadline: float) -> None:
        """Raises TransportError if the exporter is on another host, has gone, or refuses this process."""
        remote = read_descriptor(descriptor, ShmDescriptor)
        if remote.boot_id != _boot_id():
            raise TransportError("it is on another host")
        deadline = min(deadline, time.monotonic() + HANDSHAKE_S)
        enter = partial(self._enter, remote, Prover(secret, remote.export_id), deadline)
        try:
            self._stream = keep_trying(enter, deadline)
        except OSError as error:
            raise TransportError(f"its process cannot be reached: {error}") from None
        super().__init__([Region(self._address + at, size) for at, size in remote.regions])

    def _enter(self, remote: ShmDescriptor, prover: Prover, deadline: float) -> socket.socket:
        with contextlib.ExitStack() as opened:
            stream = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            # Waits for its turn in the queue, which a socket with a time limit of Python's would not.
            limit = struct.pack("ll", math.ceil(HANDSHAKE_S), 0)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            stream.connect(f"\0{remote.name}")
            _check_user(stream)
            prover.enter(stream, b"", 0, deadline)
            self._take_memory(stream, remote.regions, deadline)
            opened.pop_all()
        return stream

    def _take_memory(
        self, stream: socket.socket, regions: Sequence[Region], deadline: float
    ) -> None:
        wait_until(stream, deadline)
        _, descriptors, _, _ = socket.recv_fds(stream, 1, 1)
        if not descriptors:
            raise ConnectionResetError("it hung up")
        try:
            self._map(descriptors[0], regions)
        finally:
            os.close(descriptors[0])

    def _map(self, descriptor: int, regions: Sequence[Region]) -> None:
        self._size = os.fstat(descriptor).st_size
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        if not seals & fcntl.F_SEAL_SHRINK:
            raise TransportError("its memory could be taken away while it is read")
        if not all(0 <= at <= at + num_bytes <= self._size for at, num_bytes in regions):
            raise TransportError("its memory is smaller than it says")
        address = _libc.mmap(None, self._size, _PROT_READ, _MAP_SHARED, descriptor, 0)
        if address in (None, _MAP_FAILED):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._address: int = address

    def _read(self, pieces: list[Piece], deadline: float) -> None:
        for piece in pieces:
            ctypes.memmove(piece.target, piece.source, piece.num_bytes)
        poller = select.poll()
        poller.register(self._stream, select.POLLIN)
        if poller.poll(0):  # the exporter never sends anything more
            raise TransportError("its process has closed its memory, or has ended")
        check_time(deadline)

    def _release(self) -> None:
        _libc.munmap(self._address, self._size)
        self._stream.close()


def _check_user(stream: socket.socket) -> None:
    raw = stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    if user != os.geteuid():
        raise TransportError("the process at the other end is of another user")


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
