# SPDX-License-Identifier: Apache-2.0
"""KV on the chips: one flat pool for all layers, and the store through which pages go out and in.

A pool is [layers * pages * page * heads, head_dim], layer after layer; a page is [token, head, element]. To
others, a block is [head, token, element], as on the host: copies turn one into the other, so that pages can be
exchanged with pools that are cut for another number of chips.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from pagoda.backend.base import KVCache, LatentCache
from pagoda.backend.kv_store import (
    DONE,
    DeviceEvent,
    block_extents,
    check_blocks,
    check_extents,
    describe_tensors,
)
from pagoda.kv.memory import Extent
from pagoda.plugins.pypto.device import Device, shared_tensor
from pagoda.plugins.pypto.library import DeviceTensor

Kind = Literal["keys", "values"]
KINDS: tuple[Kind, ...] = ("keys", "values")


def stand_in(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor that says how a cache is shaped, and has no memory of the host's."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


ZEROS_BYTES = 1 << 24
"""Bytes that a new pool is filled by at once."""


class PageBuffers:
    """Memory of the host for pages on their way, which is shared before a worker is opened."""

    def __init__(self, page_shape: Sequence[int], dtype: torch.dtype, chips: int) -> None:
        """`page_shape` is [page, heads, head_dim] of one layer, all chips together."""
        page, heads, head_dim = page_shape
        shape = (page, heads // chips, head_dim)
        self.page = shared_tensor(shape, dtype).zero_()
        """Zeros of a page on one chip."""
        count = max(1, ZEROS_BYTES // self.page.nbytes)
        self.zeros = shared_tensor((count, *shape), dtype).zero_()
        """Zeros of many pages, by which a pool begins."""
        self.copies = shared_tensor((chips, *shape), dtype)
        """A page as the copying thread moves it, chip by chip."""


class Pool:
    """Keys and values of all layers."""

    def __init__(self, device: Device, buffers: PageBuffers, *, layers: int, pages: int) -> None:
        """Takes the memory, and makes it zeros. Raises DeviceLostError: there is too little."""
        self._device, self._buffers = device, buffers
        self.layers, self.pages = layers, pages
        _, self.page, self.heads_per_chip, self.head_dim = buffers.copies.shape
        self.page_bytes = buffers.page.nbytes
        """Bytes of a page of one layer on one chip."""
        rows = layers * pages * self.page * self.heads_per_chip
        dtype = buffers.page.dtype
        self.shards: dict[Kind, list[DeviceTensor]] = {
            kind: [
                device.allocate((rows, self.head_dim), dtype, chip) for chip in range(device.chips)
            ]
            for kind in KINDS
        }
        self._written: set[int] = set()
        self._fill()

    @property
    def arguments(self) -> dict[str, object]:
        """Arguments of programs by meaning."""
        return {kind: self._device.stacked(shards) for kind, shards in self.shards.items()}

    def address(self, kind: Kind, chip: int, layer: int, page: int) -> int:
        """Address of a page of a layer on a chip."""
        first = self.shards[kind][chip].data_ptr
        return first + (layer * self.pages + page) * self.page_bytes

    def _fill(self) -> None:
        """Makes all pages zeros."""
        zeros = self._buffers.zeros
        for shards in self.shards.values():
            for chip, shard in enumerate(shards):
                left = self.layers * self.pages
                while left:
                    count = min(left, len(zeros))
                    left -= count
                    address = shard.data_ptr + left * self.page_bytes
                    self._device.upload(address, zeros[:count], chip)

    def clear(self, pages: Iterable[int]) -> None:
        """Makes pages zeros to which sequences begin to write: those to which none has yet are that already.

        What is behind a sequence's last token is multiplied by zero, and must be finite.
        """
        chosen = set(pages)
        for page in sorted(chosen & self._written):
            for kind in KINDS:
                for chip in range(self._device.chips):
                    for layer in range(self.layers):
                        address = self.address(kind, chip, layer, page)
                        self._device.upload(address, self._buffers.page, chip)
        self._written |= chosen

    def read(self, kind: Kind, layer: int, page: int) -> Tensor:
        """A page of a layer in host memory, [head, token, element], until the next is read or written."""
        for chip, part in enumerate(self._buffers.copies):
            self._device.download(part, self.address(kind, chip, layer, page), chip)
        return self._buffers.copies.permute(0, 2, 1, 3).flatten(0, 1).contiguous()

    def write(self, kind: Kind, layer: int, page: int, values: Tensor) -> None:
        """Puts a page [head, token, element] in its place."""
        by_chip = values.view(self._device.chips, self.heads_per_chip, self.page, self.head_dim)
        self._buffers.copies.copy_(by_chip.permute(0, 2, 1, 3))
        for chip, part in enumerate(self._buffers.copies):
            self._device.upload(self.address(kind, chip, layer, page), part, chip)
        self._written.add(page)

    def new_page(self) -> Tensor:
        """An unwritten page of host memory, [head, token, element]."""
        chips = self._device.chips
        shape = (chips * self.heads_per_chip, self.page, self.head_dim)
        return torch.empty(shape, dtype=self._buffers.page.dtype)

    def free(self) -> None:
        """Gives the memory back."""
        for shards in self.shards.values():
            for chip, shard in enumerate(shards):
                self._device.free(shard, chip)


class _DeviceCopy:
    """A copy, which is its own event."""

    def __init__(self, work: Callable[[], None], after: DeviceEvent) -> None:
        self._work, self._after = work, after
        self._ended = threading.Event()
        self._error: str | None = None

    @property
    def done(self) -> bool:
        return self._ended.is_set() and self._error is None

    def run(self) -> None:
        """Copies behind what it has to come after."""
        try:
            self._after.wait()
            self._work()
        except Exception as error:  # whoever waits is told
            self._error = str(error)
        self._ended.set()

    def wait(self) -> None:
        self._ended.wait()
        if self._error is not None:
            raise RuntimeError(self._error)


class PoolStore:
    """The `KVStore` of a pool. One thread copies, beside steps and in the order of calls."""

    batch_blocks = 1

    def __init__(self, pool: Pool, caches: Sequence[KVCache | LatentCache]) -> None:
        """`caches` are those of the pool's layers, in order."""
        self.tensors = describe_tensors(caches)
        self.num_blocks = pool.pages
        self.block_bytes = sum(tensor.block_bytes for tensor in self.tensors)
        self._pool = pool
        self._copies: queue.SimpleQueue[_DeviceCopy] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="copies of pages", daemon=True).start()

    def computed(self) -> DeviceEvent:
        """An event that is done: the chips copy behind all that was submitted by then."""
        return DONE

    def read(
        self, block_ids: Sequence[int], into: Sequence[memoryview], after: DeviceEvent = DONE
    ) -> DeviceEvent:
        check_blocks(self, block_ids, into)
        return self._submit(partial(self._read, self._extents(block_ids), into), after)

    def write(
        self, block_ids: Sequence[int], sources: Sequence[memoryview], after: DeviceEvent = DONE
    ) -> DeviceEvent:
        check_blocks(self, block_ids, sources)
        return self._submit(partial(self._write, self._extents(block_ids), sources), after)

    def read_extents(
        self, extents: Sequence[Extent], into: memoryview, after: DeviceEvent = DONE
    ) -> DeviceEvent:
        check_extents(self, extents, into)
        return self._submit(partial(self._read, [extents], [into]), after)

    def write_extents(
        self, extents: Sequence[Extent], source: memoryview, after: DeviceEvent = DONE
    ) -> DeviceEvent:
        check_extents(self, extents, source)
        return self._submit(partial(self._write, [extents], [source]), after)

    def _extents(self, block_ids: Sequence[int]) -> list[list[Extent]]:
        return [block_extents(self.tensors, [block]) for block in block_ids]

    def _submit(self, work: Callable[[], None], after: DeviceEvent) -> DeviceEvent:
        copy = _DeviceCopy(work, after)
        self._copies.put(copy)
        return copy

    def _run(self) -> None:
        while True:
            self._copies.get().run()

    def _read(self, extents: Sequence[Sequence[Extent]], into: Sequence[memoryview]) -> None:
        """Copies the bytes of some extents into each buffer."""
        for own, buffer in zip(extents, into, strict=True):
            at = 0
            for kind, layer, page, first, count in self._pieces(own):
                values = self._pool.read(kind, layer, page)
                buffer[at : at + count] = _bytes(values)[first : first + count]
                at += count

    def _write(self, extents: Sequence[Sequence[Extent]], sources: Sequence[memoryview]) -> None:
        """Copies each buffer to some extents; a page that is written in part keeps the rest."""
        for own, buffer in zip(extents, sources, strict=True):
            at = 0
            for kind, layer, page, first, count in self._pieces(own):
                is_whole = count == self.tensors[0].block_bytes
                values = self._pool.new_page() if is_whole else self._pool.read(kind, layer, page)
                _bytes(values)[first : first + count] = buffer[at : at + count]
                self._pool.write(kind, layer, page, values)
                at += count

    def _pieces(self, extents: Sequence[Extent]) -> Iterable[tuple[Kind, int, int, int, int]]:
        """Parts of pages that extents are: kind, layer, page, and bytes in the page from the first on."""
        for extent in extents:
            tensor = self.tensors[extent.region]
            kind = KINDS[tensor.kind == "values"]
            at, end = extent.offset, extent.offset + extent.num_bytes
            while at < end:
                page, first = divmod(at, tensor.block_stride)
                count = min(end - at, tensor.block_bytes - first)
                yield kind, tensor.place, page, first, count
                at += count

    def regions(self) -> tuple[()]:
        return ()

    def file(self) -> None:
        return None

    def open_pages(self) -> None:
        return None


def _bytes(values: Tensor) -> memoryview:
    """A contiguous tensor's memory as bytes, as long as the tensor lives."""
    memory = (ctypes.c_char * values.nbytes).from_address(values.data_ptr())
    return memoryview(memory).cast("B")
