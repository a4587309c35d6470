# SPDX-License-Identifier: Apache-2.0
"""KV over Mooncake's transfer engine (`pagoda-llm[mooncake]`): TCP, or RDMA where there is a device for it.

Mooncake does not know the cluster's secret: any process that reaches an exporter's port can read. The network
must be trusted. A read that Mooncake has given up may still write later, so all reads go through staging memory,
with one copy more.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import msgspec

from pagoda.errors import TransportError
from pagoda.kv.memory import DeviceMemory, OwnMemory, Region
from pagoda.plugins.disaggregation.transport.base import Access, MemorySpan
from pagoda.plugins.disaggregation.transport.remote_memory import (
    BatchedLink,
    Piece,
    load_library,
    read_descriptor,
)

_STAGING_BYTES = 2**24
LATE_WRITES_S = 120.0
"""Seconds for which Mooncake may write to staging memory after a failure."""


class MooncakeDescriptor(msgspec.Struct, frozen=True):
    session: str
    regions: list[Region]


class MooncakeTransport:
    """Uses TCP unless `MC_FORCE_TCP=0` is set, and RDMA then."""

    def __init__(self, memory: OwnMemory | DeviceMemory, access: Access) -> None:
        """Raises TransportError if Mooncake is not installed or does not work here."""
        if access.encrypts:
            raise TransportError("Mooncake does not encrypt")
        self._memory = memory
        self._host = access.host
        os.environ.setdefault("MC_FORCE_TCP", "1")
        os.environ.setdefault("MC_LOG_LEVEL", "WARNING")
        remedy = (
            "pip install 'pagoda-llm[mooncake]', and on Debian apt install libibverbs1 librdmacm1"
        )
        self._kind = load_library("mooncake.engine", "Mooncake", remedy).TransferEngine
        self._engine = _new_engine(self._kind, access.host)
        self._abandoned = AbandonedStaging()

    def export(self) -> MooncakeListener:
        if isinstance(self._memory, DeviceMemory):
            raise TransportError(
                "the KV cache lies on a device, and Mooncake is given host memory only"
            )
        return MooncakeListener(self._kind, self._host, self._memory.regions)

    def connect(self, descriptor: bytes, deadline: float) -> MooncakeLink:
        self._abandoned.close_old(time.monotonic())
        link = MooncakeLink(self._engine, descriptor, self._abandoned)
        link.probe(deadline)
        return link


class MooncakeListener:
    """An engine of its own, whose end is the end of all reads."""

    def __init__(self, kind: Any, host: str, regions: Sequence[Region]) -> None:
        self._regions = regions
        self._engine: Any = _new_engine(kind, host)
        for region in regions:
            if self._engine.register_memory(region.address, region.num_bytes):
                raise TransportError("Mooncake does not take the memory of the KV cache")
        session = f"{host}:{self._engine.get_rpc_port()}"
        self.descriptor = msgspec.msgpack.encode(MooncakeDescriptor(session, list(regions)))

    def close(self) -> None:
        if self._engine is not None:
            for region in self._regions:
                self._engine.unregister_memory(region.address)
            self._engine = None


class _Staging:
    def __init__(self, engine: Any) -> None:
        self._memory = mmap.mmap(-1, _STAGING_BYTES)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._engine = engine
        if engine.register_memory(self.address, _STAGING_BYTES):
            raise TransportError("Mooncake does not take memory to read into")

    def close(self) -> None:
        self._engine.unregister_memory(self.address)


class AbandonedStaging:
    """Memory that something may still be written to, for a while."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: deque[tuple[float, _Staging]] = deque()

    def add(self, staging: _Staging, now: float) -> None:
        with self._lock:
            self._since.append((now, staging))

    def close_old(self, now: float) -> None:
        with self._lock:
            while self._since and self._since[0][0] <= now - LATE_WRITES_S:
                self._since.popleft()[1].close()


class MooncakeLink(BatchedLink):
    most_bytes = _STAGING_BYTES
    most_spans = 2**9
    """Mooncake queues some thousands for one host, of all batches together."""

    def __init__(self, engine: Any, descriptor: bytes, abandoned: AbandonedStaging) -> None:
        remote = read_descriptor(descriptor, MooncakeDescriptor)
        super().__init__(remote.regions)
        self._engine = engine
        self._session = remote.session
        self._abandoned = abandoned
        self._staging = _Staging(engine)

    def probe(self, deadline: float) -> None:
        """Reads a byte, to find out whether somebody is there. Raises TransportError if nobody answers."""
        target = ctypes.create_string_buffer(1)
        try:
            self.read([MemorySpan(0, 0, 1, ctypes.addressof(target))], deadline)
        except TransportError:
            self.close()
            raise

    def _read(self, pieces: list[Piece], deadline: float) -> None:
        del deadline  # Mooncake has time limits of its own
        sizes = [piece.num_bytes for piece in pieces]
        places = list(accumulate(sizes[:-1], initial=self._staging.address))
        sources = [piece.source for piece in pieces]
        if self._engine.batch_transfer_sync_read(self._session, places, sources, sizes):
            raise TransportError(f"Mooncake could not read from {self._session}")
        for place, piece in zip(places, pieces, strict=True):
            ctypes.memmove(piece.target, place, piece.num_bytes)

    def _release(self) -> None:
        if self.has_failed:
            self._abandoned.add(self._staging, time.monotonic())
        else:
            self._staging.close()


def _new_engine(kind: Any, host: str) -> Any:
    engine = kind()
    protocol = "tcp" if os.environ.get("MC_FORCE_TCP") != "0" else "rdma"
    if engine.initialize(host, "P2PHANDSHAKE", protocol, ""):
        raise TransportError(f"Mooncake does not work at {host}")
    return engine
