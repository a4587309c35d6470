# SPDX-License-Identifier: Apache-2.0
"""The KV of one rank in this process's own memory, and the choice of where KV lies."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pagoda.backend.base import Backend, KVCache, LatentCache, NewTensor, new_tensor
from pagoda.backend.kv_store import (
    DONE,
    DeviceEvent,
    KVOnDevice,
    KVStore,
    OpenPages,
    OpensPages,
    Pages,
    check_blocks,
    check_extents,
    describe_tensors,
)
from pagoda.devices import BackendUnavailableError
from pagoda.kv.memory import Extent, MemoryFile, Region
from pagoda.worker.kv.memory import KVAllocation, address_of
from pagoda.worker.kv.pages import AdvisedPages

AnyCache = KVCache | LatentCache


class HostKVStore:
    """A `KVStore` in host memory. Steps have computed KV when they return, and copies are done at once.

    Copies by `memmove`, which lets other threads run: the one that computes does not wait.
    """

    batch_blocks = 1

    def __init__(
        self,
        caches: Sequence[AnyCache],
        allocation: KVAllocation | None = None,
        open_pages: OpenPages = AdvisedPages,
    ) -> None:
        """`allocation` is where the caches lie, if other processes may map it.

        Raises ValueError if a tensor is not in this process's memory, or has the heads of a block apart.
        """
        tensors = [tensor for cache in caches for tensor in cache.tensors.values()]
        if any(tensor.device.type != "cpu" for tensor in tensors):
            raise ValueError("KV that is not in host memory needs a store of its backend.")
        self._caches = caches  # whose memory is used as long as this lives
        self._allocation = allocation
        self._open_pages = open_pages
        self.tensors = describe_tensors(caches)
        self.addresses = [tensor.data_ptr() for tensor in tensors]
        self.num_blocks = len(tensors[0])
        self.block_bytes = sum(tensor.block_bytes for tensor in self.tensors)
        self._pieces = [
            (address, tensor.block_stride, tensor.block_bytes)
            for address, tensor in zip(self.addresses, self.tensors, strict=True)
        ]

    def computed(self) -> DeviceEvent:
        return DONE

    def read(
        self, block_ids: Sequence[int], into: Sequence[memoryview], after: DeviceEvent = DONE
    ) -> DeviceEvent:
        after.wait()
        for inside, outside, num_bytes in self._of_blocks(block_ids, into):
            ctypes.memmove(outside, inside, num_bytes)
        return DONE

    def write(
        self, block_ids: Sequence[int], sources: Sequence[memoryview], after: DeviceEvent = DONE
    ) -> DeviceEvent:
        after.wait()
        for inside, outside, num_bytes in self._of_blocks(block_ids, sources):
            ctypes.memmove(inside, outside, num_bytes)
        return DONE

    def read_extents(
        self, extents: Sequence[Extent], into: memoryview, after: DeviceEvent = DONE
    ) -> DeviceEvent:
        after.wait()
        for inside, outside, num_bytes in self._of_extents(extents, into):
            ctypes.memmove(outside, inside, num_bytes)
        return DONE

    def write_extents(
        self, extents: Sequence[Extent], source: memoryview, after: DeviceEvent = DONE
    ) -> DeviceEvent:
        after.wait()
        for inside, outside, num_bytes in self._of_extents(extents, source):
            ctypes.memmove(inside, outside, num_bytes)
        return DONE

    def _of_blocks(
        self, block_ids: Sequence[int], buffers: Sequence[memoryview]
    ) -> Iterator[tuple[int, int, int]]:
        """Addresses in tensors and in buffers, and bytes, of all pieces of blocks."""
        check_blocks(self, block_ids, buffers)
        for block_id, buffer in zip(block_ids, buffers, strict=True):
            outside = address_of(buffer)
            for inside, stride, num_bytes in self._pieces:
                yield inside + block_id * stride, outside, num_bytes
                outside += num_bytes

    def _of_extents(
        self, extents: Sequence[Extent], buffer: memoryview
    ) -> Iterator[tuple[int, int, int]]:
        """The same of extents, which follow one another in the buffer."""
        check_extents(self, extents, buffer)
        outside = address_of(buffer)
        for extent in extents:
            yield self.addresses[extent.region] + extent.offset, outside, extent.num_bytes
            outside += extent.num_bytes

    def regions(self) -> tuple[Region, ...]:
        if any(tensor.block_stride != tensor.block_bytes for tensor in self.tensors):
            raise ValueError("Blocks of a tensor that others read must follow one another.")
        return tuple(
            Region(address, self.num_blocks * tensor.block_bytes)
            for address, tensor in zip(self.addresses, self.tensors, strict=True)
        )

    def file(self) -> MemoryFile | None:
        return None if self._allocation is None else self._allocation.file(self.regions())

    def open_pages(self) -> Pages | None:
        strides = (tensor.block_stride for tensor in self.tensors)
        tensors = list(zip(self.addresses, strides, strict=True))
        with contextlib.suppress(BackendUnavailableError):
            return self._open_pages(tensors, self.num_blocks)
        return None


def open_kv(
    backend: Backend[Any, Any],
    allocate: Callable[[NewTensor], Sequence[AnyCache]],
    open_allocation: Callable[[], KVAllocation],
) -> tuple[Sequence[AnyCache], KVStore]:
    """Caches that `allocate` takes from the backend, where that keeps them, and their store.

    Raises OSError if the system has no such memory, ValueError if the backend lays caches out as no store can.
    """
    if isinstance(backend, KVOnDevice):
        caches = allocate(new_tensor)
        return caches, backend.open_kv_store(caches)
    allocation = open_allocation()
    caches = allocate(allocation.new_tensor)
    return caches, host_store(backend, caches, allocation)


def host_store(
    backend: Backend[Any, Any],
    caches: Sequence[AnyCache],
    allocation: KVAllocation | None = None,
) -> HostKVStore:
    """The store of caches that lie in host memory."""
    pages = backend.open_pages if isinstance(backend, OpensPages) else AdvisedPages
    return HostKVStore(caches, allocation, pages)


def store_of(backend: Backend[Any, Any], caches: Sequence[AnyCache]) -> KVStore:
    """The store of caches that the backend has allocated by itself."""
    if isinstance(backend, KVOnDevice):
        return backend.open_kv_store(caches)
    return host_store(backend, caches)
