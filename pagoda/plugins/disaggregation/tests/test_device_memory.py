# SPDX-License-Identifier: Apache-2.0
"""KV that this process cannot address: it is sent from copies, and transports that would map it refuse it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from transport_rig import SECRET, SIZES, Memory, make, read, soon

from pagoda.errors import TransportError
from pagoda.kv.memory import DeviceMemory, Extent
from pagoda.plugins.disaggregation.transport import tcp
from pagoda.plugins.disaggregation.transport.base import Access, MemoryLink, MemorySpan
from pagoda.plugins.disaggregation.transport.choose import TRANSPORTS


class Device:
    """A device with the bytes of some memory, which notes what is copied from it."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.batches: list[list[Extent]] = []
        self.is_broken = False

    def copy(self, extents: Sequence[Extent], into: memoryview) -> None:
        self.batches.append([*extents])
        if self.is_broken:
            raise RuntimeError("the device is gone")
        into[:] = b"".join(self._memory.bytes_of(*extent) for extent in extents)

    @contextmanager
    def linked(self, ours: Memory, *, encrypts: bool = False) -> Iterator[MemoryLink]:
        memory = DeviceMemory(SIZES, self.copy)
        exported = TRANSPORTS["tcp"](memory, Access("127.0.0.1", SECRET, encrypts)).export()
        link = make("tcp", ours).connect(exported.descriptor, soon())
        try:
            yield link
        finally:
            link.close()
            exported.close()


@pytest.mark.parametrize("encrypts", [False, True])
def test_bytes_come_in_copies_of_limited_size(
    encrypts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "_STAGING_BYTES", 1000)
    theirs, ours = Memory(1), Memory(2)
    device = Device(theirs)
    with device.linked(ours, encrypts=encrypts) as link:
        spans = [
            MemorySpan(2, 7, 2500, ours.address(2, 100)),
            MemorySpan(0, 1, 3, ours.address(1)),
            MemorySpan(1, 5, 600, ours.address(0, 50)),
        ]
        read(link, *spans)
        assert ours.bytes_of(2, 100, 2500) == theirs.bytes_of(2, 7, 2500)
        assert ours.bytes_of(1, 0, 3) == theirs.bytes_of(0, 1, 3)
        assert ours.bytes_of(0, 50, 600) == theirs.bytes_of(1, 5, 600)
        sizes = [sum(extent.num_bytes for extent in batch) for batch in device.batches]
        assert sizes == [1000, 1000, 1000, 103]


def test_a_copy_that_fails_ends_the_read() -> None:
    ours = Memory(2)
    device = Device(Memory(1))
    with device.linked(ours) as link:
        device.is_broken = True
        with pytest.raises(TransportError, match="closed"):
            read(link, MemorySpan(0, 0, 100, ours.address(0)))


def test_bytes_beyond_a_region_are_not_copied() -> None:
    ours = Memory(2)
    device = Device(Memory(1))
    with device.linked(ours) as link:
        for span in (
            MemorySpan(3, 0, 1, ours.address(0)),
            MemorySpan(1, SIZES[1] - 9, 10, ours.address(0)),
        ):
            with pytest.raises(TransportError, match=r"closed|reset"):
                read(link, span)
        assert device.batches == []
