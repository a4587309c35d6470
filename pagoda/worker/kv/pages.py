# SPDX-License-Identifier: Apache-2.0
"""Pages of host memory, taken from the system at once instead of one by one as they are written to."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Sequence

_MADV_POPULATE_WRITE = 23
"""Takes pages as a write would, and keeps what they hold (Linux 5.14, `madvise(2)`); `mmap` has no name for it."""
_STRETCH_BYTES = 2**23
"""Bytes of a tensor that are taken in one call of the system."""

_libc = ctypes.CDLL(None)


def take_pages(address: int, num_bytes: int) -> bool:
    """Takes the pages of memory, and does not hold the interpreter meanwhile; False where the system cannot."""
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    size = address + num_bytes - start
    done: int = _libc.madvise(
        ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_int(_MADV_POPULATE_WRITE)
    )
    return done == 0


class AdvisedPages:
    """Pages of tensors' blocks, taken in order by a thread that lives as long as there is something to take."""

    def __init__(self, tensors: Sequence[tuple[int, int]], num_blocks: int) -> None:
        """`tensors` are addresses, and bytes from block to block."""
        self._tensors = tensors
        self._num_blocks = num_blocks
        self._stretch = max(1, _STRETCH_BYTES // max(stride for _, stride in tensors))
        self._changed = threading.Condition()
        """Guards all that follows."""
        self._wanted = self._done = 0
        self._is_running = False
        self._is_able = True

    def advance(self, end: int) -> None:
        with self._changed:
            self._wanted = max(self._wanted, min(end, self._num_blocks))
            if self._is_running or not self._is_able or self._done == self._wanted:
                return
            self._is_running = True
        threading.Thread(target=self._run, name="kv-pages", daemon=True).start()

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_running)

    def _run(self) -> None:
        while True:
            with self._changed:
                first, end = self._done, min(self._wanted, self._done + self._stretch)
                if first == end or not self._is_able:
                    self._is_running = False
                    self._changed.notify_all()
                    return
            taken = [
                take_pages(address + first * stride, (end - first) * stride)
                for address, stride in self._tensors
            ]
            with self._changed:
                self._done, self._is_able = end, all(taken)
