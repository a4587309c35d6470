"""Memory to read from, and what every transport is tested with."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import time
from collections.abc import Sequence

from pagoda.pd.transport.base import (
    Access,
    MemoryFile,
    MemoryLink,
    OwnMemory,
    Region,
    Span,
    Transport,
)
from pagoda.pd.transport.choose import TRANSPORTS

SECRET = b"a secret of the cluster"
SIZES = (2**20, 2**14, 3 * 2**20 + 4096)
"""Memory of the regions."""


class Memory:
    """Regions of random bytes in a file without a name."""

    def __init__(self, seed: int, sizes: Sequence[int] = SIZES) -> None:
        total = sum(sizes)
        self.descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, total)
        self.memory = mmap.mmap(self.descriptor, total)
        pattern = random.Random(seed).randbytes(min(total, 2**20 + 7))
        for start in range(0, total, len(pattern)):
            self.memory[start : start + len(pattern)] = pattern[: total - start]
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        offsets = tuple(sum(sizes[:index]) for index in range(len(sizes)))
        regions = [Region(base + at, size) for at, size in zip(offsets, sizes, strict=True)]
        self.own = OwnMemory(tuple(regions), MemoryFile(self.descriptor, total, offsets))
        self._offsets = offsets

    def bytes_of(self, region: int, offset: int, count: int) -> bytes:
        start = self._offsets[region] + offset
        return self.memory[start : start + count]

    def address(self, region: int, offset: int = 0) -> int:
        return self.own.regions[region].address + offset

    def close(self) -> None:
        os.close(self.descriptor)


def make(name: str, memory: Memory, secret: bytes = SECRET, *, encrypts: bool = False) -> Transport:
    return TRANSPORTS[name](memory.own, Access("127.0.0.1", secret, encrypts))


def soon() -> float:
    return time.monotonic() + 20


def read(link: MemoryLink, spans: Sequence[Span]) -> None:
    link.read(spans, soon())
