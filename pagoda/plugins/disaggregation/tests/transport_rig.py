# SPDX-License-Identifier: Apache-2.0
"""Memory to read from, and what every transport is tested with."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import random
import time
from collections.abc import Sequence

from pagoda.kv.memory import MemoryFile, OwnMemory, Region
from pagoda.plugins.disaggregation.transport.base import (
    Access,
    ExportedMemory,
    KVTransport,
    MemoryLink,
    MemorySpan,
)
from pagoda.plugins.disaggregation.transport.choose import TRANSPORTS

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


def make(
    name: str, memory: Memory, secret: bytes = SECRET, *, encrypts: bool = False
) -> KVTransport:
    return TRANSPORTS[name](memory.own, Access("127.0.0.1", secret, encrypts))


def soon() -> float:
    return time.monotonic() + 20


def read(link: MemoryLink, *spans: MemorySpan) -> None:
    link.read(spans, soon())


class House:
    """Memory that is exported, `theirs`, and memory that is read into, `ours`."""

    def __init__(self, name: str, *, encrypts: bool = False) -> None:
        self.name = name
        self.theirs, self.ours = Memory(1), Memory(2)
        self.transport = make(name, self.ours)
        self.exported: ExportedMemory = make(name, self.theirs, encrypts=encrypts).export()
        self.whole = MemorySpan(2, 0, SIZES[2], self.ours.address(2))
        """The largest region."""
        self._links: list[MemoryLink] = []

    @functools.cached_property
    def link(self) -> MemoryLink:
        return self.connect()

    def connect(self, exported: ExportedMemory | None = None) -> MemoryLink:
        link = self.transport.connect((exported or self.exported).descriptor, soon())
        self._links.append(link)
        return link

    def check(
        self, link: MemoryLink | None = None, memory: Memory | None = None, offset: int = 7
    ) -> None:
        """Reads some bytes; by default by a new link, which is closed."""
        by = link or self.connect()
        read(by, MemorySpan(0, offset, 100, self.ours.address(0)))
        wanted = (memory or self.theirs).bytes_of(0, offset, 100)
        assert self.ours.bytes_of(0, 0, 100) == wanted
        if link is None:
            by.close()

    def close(self) -> None:
        for link in self._links:
            link.close()
        self.exported.close()
        self.theirs.close()
        self.ours.close()
