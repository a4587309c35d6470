# SPDX-License-Identifier: Apache-2.0
"""KV on the device as bytes: blocks are gathered there, and copied in one piece, on streams beside steps.

What is read lies in pinned memory first, and whoever waits for its event copies it on to where it was wanted. What
is written is copied to pinned memory by the caller.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pagoda.backend.base import KVCache, LatentCache
from pagoda.backend.kv_store import DONE, DeviceEvent, check_blocks, check_extents, describe_tensors
from pagoda.kv.memory import DirectMemory, Extent
from pagoda.plugins.cuda.kernels.blocks import gather_blocks, scatter_blocks
from pagoda.plugins.cuda.runtime import Runtime, Stream
from pagoda.plugins.cuda.staging import Pinned, PinnedPool

_BATCH_BYTES = 2**24
"""Bytes of a call, about: large enough for the bus, small enough for what is urgent to wait for one."""


class _Read:
    """The event of a copy to pinned memory, and from there to where it was wanted."""

    def __init__(self, on_device: DeviceEvent, pinned: Pinned, into: Sequence[memoryview]) -> None:
        self.on_device = on_device
        self._pinned: Pinned | None = pinned
        self._into = into
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        if self._pinned is not None and self.on_device.done:
            self._hand_over()
        return self._pinned is None

    def wait(self) -> None:
        self.on_device.wait()
        self._hand_over()

    def _hand_over(self) -> None:
        with self._lock:
            if self._pinned is None:
                return
            at = self._pinned.memory.data_ptr()
            for buffer in self._into:
                ctypes.memmove(_address(buffer), at, buffer.nbytes)
                at += buffer.nbytes
            self._pinned = None


class DeviceKVStore:
    """A `KVStore` over memory of the device, which no other process maps, though networks may reach it."""

    def __init__(
        self, runtime: Runtime, pool: PinnedPool, caches: Sequence[KVCache | LatentCache]
    ) -> None:
        """Raises ValueError: a tensor has the heads of a block apart."""
        self._runtime, self._pool = runtime, pool
        self._caches = caches
        held = [tensor for cache in caches for tensor in cache.tensors.values()]
        self.tensors = describe_tensors(caches)
        self.num_blocks = len(held[0])
        self.block_bytes = sum(tensor.block_bytes for tensor in self.tensors)
        self.batch_blocks = max(1, _BATCH_BYTES // self.block_bytes)
        self._held = held
        self._bytes = [tensor.view(-1).view(torch.uint8) for tensor in held]
        sizes = [tensor.block_bytes for tensor in self.tensors]
        self._offsets = [sum(sizes[:place]) for place in range(len(sizes))]

    def computed(self) -> DeviceEvent:
        return self._runtime.steps.record()

    def read(
        self, block_ids: Sequence[int], into: Sequence[memoryview], after: DeviceEvent = DONE
    ) -> DeviceEvent:
        check_blocks(self, block_ids, into)
        if not block_ids:
            return DONE
        pinned = self._pool.take(len(block_ids) * self.block_bytes)
        ids, rows = self._ids(block_ids), pinned.memory.view(len(block_ids), self.block_bytes)

        def copy() -> None:
            here, chosen = self._staged(rows), self._numbers(ids.memory)
            for tensor, offset in zip(self._held, self._offsets, strict=True):
                gather_blocks(tensor, chosen, here, offset=offset)
            rows.copy_(here, non_blocking=True)

        done = self._submit(self._runtime.reads, copy, after, pinned, ids)
        return _Read(done, pinned, into)

    def write(
        self, block_ids: Sequence[int], sources: Sequence[memoryview], after: DeviceEvent = DONE
    ) -> DeviceEvent:
        check_blocks(self, block_ids, sources)
        if not block_ids:
            return DONE
        pinned = self._filled(sources, after)
        ids, rows = self._ids(block_ids), pinned.memory.view(len(block_ids), self.block_bytes)

        def copy() -> None:
            here, chosen = self._staged(rows), self._numbers(ids.memory)
            here.copy_(rows, non_blocking=True)
            for tensor, offset in zip(self._held, self._offsets, strict=True):
                scatter_blocks(tensor, chosen, here, offset=offset)

        return self._submit(self._runtime.writes, copy, after, pinned, ids)

    def read_extents(
        self, extents: Sequence[Extent], into: memoryview, after: DeviceEvent = DONE
    ) -> DeviceEvent:
        check_extents(self, extents, into)
        pinned = self._pool.take(into.nbytes)
        pinned_memory = pinned.memory

        def copy() -> None:
            for inside, outside in self._pieces(extents, pinned_memory):
                outside.copy_(inside, non_blocking=True)

        done = self._submit(self._runtime.reads, copy, after, pinned)
        return _Read(done, pinned, [into])

    def write_extents(
        self, extents: Sequence[Extent], source: memoryview, after: DeviceEvent = DONE
    ) -> DeviceEvent:
        check_extents(self, extents, source)
        pinned = self._filled([source], after)
        pinned_memory = pinned.memory

        def copy() -> None:
            for inside, outside in self._pieces(extents, pinned_memory):
                inside.copy_(outside, non_blocking=True)

        return self._submit(self._runtime.writes, copy, after, pinned)

    def regions(self) -> tuple[()]:
        """Nothing: this process does not address the memory."""
        return ()

    def direct_memory(self) -> DirectMemory:
        return self._runtime.direct_memory(self._held)

    def file(self) -> None:
        return None

    def open_pages(self) -> None:
        return None

    # ---- copies

    def _submit(
        self, stream: Stream, copy: Callable[[], None], after: DeviceEvent, *pinned: Pinned
    ) -> DeviceEvent:
        """Submits a copy behind an event; the pinned memory is its own until it is done."""
        if after is not DONE:
            stream.wait(after.on_device if isinstance(after, _Read) else after)
        stream.run(copy)
        done = stream.record()
        for each in pinned:
            each.used_until(done)
        return done

    def _filled(self, sources: Sequence[memoryview], after: DeviceEvent) -> Pinned:
        """Pinned memory with what is to be written, which the copy before may have to give first."""
        if isinstance(after, _Read):
            after.wait()
        pinned = self._pool.take(sum(source.nbytes for source in sources))
        at = pinned.memory.data_ptr()
        for source in sources:
            ctypes.memmove(at, _address(source), source.nbytes)
            at += source.nbytes
        return pinned

    def _ids(self, block_ids: Sequence[int]) -> Pinned:
        ids = self._pool.take(8 * len(block_ids))
        ids.memory.view(torch.int64).copy_(torch.tensor(block_ids))
        return ids

    def _numbers(self, ids: Tensor) -> Tensor:
        """Block ids on the device."""
        return (
            torch.empty_like(ids, device=self._runtime.device)
            .copy_(ids, non_blocking=True)
            .view(torch.int64)
        )

    def _staged(self, rows: Tensor) -> Tensor:
        """Memory of the device for rows of blocks, of the stream that asks for it."""
        return torch.empty(rows.shape, dtype=torch.uint8, device=self._runtime.device)

    def _pieces(self, extents: Sequence[Extent], outside: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Bytes of tensors, and of host memory in which they follow one another."""
        pieces, at = [], 0
        for extent in extents:
            inside = self._bytes[extent.region][extent.offset : extent.offset + extent.num_bytes]
            pieces.append((inside, outside[at : at + extent.num_bytes]))
            at += extent.num_bytes
        return pieces


def _address(buffer: memoryview) -> int:
    """Address of the bytes, which may be read only."""
    return torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
