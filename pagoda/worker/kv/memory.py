# SPDX-License-Identifier: Apache-2.0
"""Memory that holds KV: that of a rank's tensors, which others may map, and slots for blocks."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading

import torch
from torch import Tensor

from pagoda.kv.memory import MemoryFile, Region
from pagoda.messages.worker_config import WorkerConfig
from pagoda.worker.kv.pages import take_pages

_ALIGNMENT = 64
"""Alignment of slots in bytes: a line of the processor's cache."""
_LARGE_PAGE = 2**21


def copy_bytes(source: memoryview, target: memoryview) -> None:
    """Copies all of `source`, which is as long as `target`, and lets other threads run meanwhile."""
    if source.nbytes != target.nbytes:
        raise ValueError(f"{source.nbytes} bytes do not go into {target.nbytes}.")
    ctypes.memmove(address_of(target), address_of(source), source.nbytes)


def address_of(buffer: memoryview) -> int:
    """The address of writable host memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


class HostArena:
    """`num_slots` places of `block_bytes` each.

    A thread takes the memory beforehand: a copy into new pages takes ten times as long as one into others, and
    those that compute would wait for it. Slots can be used at once.
    """

    def __init__(self, num_bytes: int, block_bytes: int) -> None:
        """Raises ValueError if there is no room for one block."""
        self._block_bytes = block_bytes
        self.stride = slot_bytes(block_bytes)
        """Bytes from slot to slot."""
        self.num_slots = num_bytes // self.stride
        if self.num_slots < 1:
            raise ValueError(f"{num_bytes} bytes do not hold a block of {block_bytes}.")
        self.memory = page_aligned(self.num_slots * self.stride)
        self.taking = threading.Thread(target=self._take, name="kv-arena", daemon=True)
        self.taking.start()

    def _take(self) -> None:
        """Does not hold the interpreter. Where the kernel cannot, memory is taken as slots are used."""
        take_pages(address_of(self.memory), len(self.memory))

    def slot(self, index: int) -> memoryview:
        if not 0 <= index < self.num_slots:
            raise ValueError(f"There are {self.num_slots} slots, but no slot {index}.")
        start = index * self.stride
        return self.memory[start : start + self._block_bytes]


def page_aligned(num_bytes: int) -> memoryview:
    """Memory that begins at a page, in large pages where the kernel has them; it is taken as it is written."""
    memory = mmap.mmap(-1, num_bytes)
    with contextlib.suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def slot_bytes(block_bytes: int) -> int:
    """Bytes that a block takes in an arena."""
    return -(-block_bytes // _ALIGNMENT) * _ALIGNMENT


def shares_kv(config: WorkerConfig) -> bool:
    """True if workers of other engines may map this one's KV."""
    handoff = config.kv_handoff
    return (
        handoff is not None
        and handoff.role.holds_kv
        and hasattr(os, "memfd_create")
        and "shm" in handoff.transports
    )


class KVAllocation:
    """One piece of memory for all KV tensors of a rank, each of which begins at a large page.

    What is never written takes no memory. Shared memory is a file without a name, gone when nobody has it open or
    mapped; the kernel uses large pages there where it is told to
    (`/sys/kernel/mm/transparent_hugepage/shmem_enabled`).
    """

    def __init__(self, num_bytes: int, num_tensors: int, *, shared: bool = False) -> None:
        """Room for tensors of so many bytes together. Raises OSError if the system has no such memory."""
        self._num_bytes = num_bytes + (num_tensors + 1) * _LARGE_PAGE
        self._descriptor = -1
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        if shared:
            self._descriptor = os.memfd_create("pagoda-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self._descriptor, self._num_bytes)
            flags = mmap.MAP_SHARED
        memory = mmap.mmap(self._descriptor, self._num_bytes, flags=flags)
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        self._taken = -self._memory.data_ptr() % _LARGE_PAGE

    def new_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Raises ValueError if there is no room for the tensor."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        tensor = self._memory[self._taken : self._taken + num_bytes]
        if len(tensor) < num_bytes:
            raise ValueError(f"There are no {num_bytes} bytes left of {self._num_bytes}.")
        self._taken += -(-num_bytes // _LARGE_PAGE) * _LARGE_PAGE
        return tensor.view(dtype).view(shape)

    def file(self, regions: tuple[Region, ...]) -> MemoryFile | None:
        """Describes the file and the offsets of `regions` in it; None of memory that is not shared."""
        if self._descriptor < 0:
            return None
        offsets = tuple(region.address - self._memory.data_ptr() for region in regions)
        return MemoryFile(self._descriptor, self._num_bytes, offsets)
