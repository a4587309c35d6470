"""Host memory for blocks that have no room on the device, taken once and divided into slots."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading

_ALIGNMENT = 64
"""Alignment of slots in bytes: a line of the processor's cache."""
_MADV_POPULATE_WRITE = 23
"""Takes all memory at once (Linux 5.14, `madvise(2)`); `mmap` has no name for it."""


class HostArena:
    """`num_slots` places of `block_bytes` each.

    A thread takes the memory beforehand: a copy into new pages takes ten times as long as one into others, and
    those that compute would wait for it. Slots can be used at once.
    """

    def __init__(self, num_bytes: int, block_bytes: int) -> None:
        """
        Raises:
            ValueError: there is no room for one block.
        """
        self._block_bytes = block_bytes
        self._stride = slot_bytes(block_bytes)
        self.num_slots = num_bytes // self._stride
        if self.num_slots < 1:
            raise ValueError(f"{num_bytes} bytes do not hold a block of {block_bytes}.")
        memory = mmap.mmap(-1, self.num_slots * self._stride)
        with contextlib.suppress(OSError):  # a kernel without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory = memoryview(memory)
        self.taking = threading.Thread(target=self._take, name="kv-arena", daemon=True)
        self.taking.start()

    def _take(self) -> None:
        """Does not hold the interpreter. Where the kernel cannot, memory is taken as slots are used."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(address), ctypes.c_size_t(len(self._memory)), _MADV_POPULATE_WRITE
        )

    def slot(self, index: int) -> memoryview:
        if not 0 <= index < self.num_slots:
            raise ValueError(f"There are {self.num_slots} slots, but no slot {index}.")
        start = index * self._stride
        return self._memory[start : start + self._block_bytes]


def slot_bytes(block_bytes: int) -> int:
    """Bytes that a block takes in an arena."""
    return -(-block_bytes // _ALIGNMENT) * _ALIGNMENT
