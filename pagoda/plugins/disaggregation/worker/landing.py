# SPDX-License-Identifier: Apache-2.0
"""Ways of KV of other engines to its blocks: straight to where they lie, or by a buffer to a device."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from pagoda.backend.kv_store import DeviceEvent, KVStore
from pagoda.plugins.disaggregation.transport.base import MemoryLink
from pagoda.plugins.disaggregation.worker.plan import Run, Slice, make_spans, make_staged_spans
from pagoda.worker.kv.memory import address_of


class Wanted(NamedTuple):
    """Parts of blocks to be read."""

    slices: Sequence[Slice]
    runs: Sequence[Run]
    unused: DeviceEvent
    """The event behind which no step uses the blocks here."""


class Landing(Protocol):
    """One thread's way to blocks."""

    def read(self, link: MemoryLink, wanted: Wanted, deadline: float) -> None:
        """Reads what is wanted.

        When it returns or raises, nothing is written to blocks any more. Raises TransportError as the link does.
        """


OpenLanding = Callable[[], Landing]


class DirectLanding:
    """Links write where tensors lie."""

    def __init__(self, addresses: Sequence[int]) -> None:
        """`addresses` are those of the tensors."""
        self._addresses = addresses

    def read(self, link: MemoryLink, wanted: Wanted, deadline: float) -> None:
        wanted.unused.wait()
        link.read(make_spans(wanted.slices, wanted.runs, self._addresses), deadline)


class DeviceLanding:
    """Links that reach the device write where tensors lie. Others write to a buffer, which is as large as the
    largest batch so far, and the store copies from there."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._buffer = memoryview(b"")

    def read(self, link: MemoryLink, wanted: Wanted, deadline: float) -> None:
        if link.own_regions:
            addresses = [region.address for region in link.own_regions]
            DirectLanding(addresses).read(link, wanted, deadline)
            return
        slices, runs, unused = wanted
        num_bytes = sum(piece.num_bytes for piece in slices) * sum(run.length for run in runs)
        if len(self._buffer) < num_bytes:
            self._buffer = memoryview(mmap.mmap(-1, num_bytes))
        staged = self._buffer[:num_bytes]
        spans, extents = make_staged_spans(slices, runs, address_of(staged))
        link.read(spans, deadline)
        self._store.write_extents(extents, staged, unused).wait()
