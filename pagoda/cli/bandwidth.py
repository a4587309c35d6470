"""Measures how fast this machine reads memory.

Each thread scans a buffer of its own, far larger than any cache, for a byte that is not in it, with the C
library's `memchr`: a pure read that its vector code does at the speed of memory. ctypes releases the interpreter's
lock during the call, so the threads run side by side.
"""

from __future__ import annotations

import ctypes
import mmap
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

_PASSES = 32
_MIN_BUFFER_BYTES = 2**26
_MAX_BUFFER_BYTES = 2**28
_FILL, _ABSENT = 1, 255

Scan = Callable[[int, int, int], int | None]


@dataclass(frozen=True)
class Bandwidth:
    """A memory read rate and how it was measured."""

    bytes_per_s: float
    """The median pass: what can be kept up."""
    best_bytes_per_s: float
    threads: int
    passes: int
    buffer_bytes: int
    """Bytes of each thread's buffer."""


def measure_read_bandwidth(threads: int, memory_bytes: int) -> Bandwidth:
    """Reads with `threads` threads at once, over buffers that take a small part of `memory_bytes`."""
    size = min(_MAX_BUFFER_BYTES, max(_MIN_BUFFER_BYTES, memory_bytes // (8 * threads)))
    scan = _memchr()
    with ThreadPoolExecutor(threads) as pool:
        buffers = list(pool.map(_filled_buffer, [size] * threads))
        addresses = [_address(buffer) for buffer in buffers]
        seconds = [_time_pass(pool, scan, addresses, size) for _ in range(_PASSES)]
    return Bandwidth(
        bytes_per_s=size * threads / statistics.median(seconds),
        best_bytes_per_s=size * threads / min(seconds),
        threads=threads,
        passes=_PASSES,
        buffer_bytes=size,
    )


def _memchr() -> Scan:
    memchr = ctypes.CDLL(None).memchr
    memchr.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    memchr.restype = ctypes.c_void_p
    scan: Scan = memchr
    return scan


def _filled_buffer(size: int) -> mmap.mmap:
    # Pages that were never written are all one zero page, and pages that are alike may be merged;
    # either would be read from the cache. So every page begins with its own number, seven bits a byte.
    buffer = mmap.mmap(-1, size)
    ctypes.memset(_address(buffer), _FILL, size)
    for number, start in enumerate(range(0, size, mmap.PAGESIZE)):
        buffer[start : start + 4] = bytes((number >> shift) & 127 for shift in (0, 7, 14, 21))
    return buffer


def _address(buffer: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _time_pass(pool: ThreadPoolExecutor, scan: Scan, addresses: list[int], size: int) -> float:
    start = time.perf_counter()
    list(pool.map(lambda address: scan(address, _ABSENT, size), addresses))
    return time.perf_counter() - start
