# SPDX-License-Identifier: Apache-2.0
"""Memory of devices and of the host over NIXL: each is registered as what it is, and read as that.

The library is one that moves nothing else. What needs no device is asked of NIXL itself, too, where it is
installed.
"""

from __future__ import annotations

import importlib
import os
import threading
from typing import Any

import msgspec
import pytest
from nixl_library import Library
from transport_rig import SECRET, SIZES, Memory, read, soon

from pagoda.errors import TransportError
from pagoda.kv.memory import DeviceMemory, DirectMemory, MemoryKind
from pagoda.plugins.disaggregation.transport import nixl
from pagoda.plugins.disaggregation.transport.base import Access, MemorySpan
from pagoda.plugins.disaggregation.transport.nixl import NixlDescriptor, NixlTransport

ACCESS = Access("127.0.0.1", SECRET)
IS_REAL = os.environ.get("PAGODA_TEST_NIXL") == "real"


class Rig:
    """Memory that a worker calls its own, of some kind on some device."""

    def __init__(self, seed: int, kind: MemoryKind | None, device: int = 0) -> None:
        """The host's if no kind is named."""
        self.memory = Memory(seed)
        self.entered: list[threading.Thread] = []
        """Threads that have entered the device."""
        self.own: Any = self.memory.own
        if kind is not None:
            direct = DirectMemory(
                self.memory.own.regions,
                kind,
                device,
                lambda: self.entered.append(threading.current_thread()),
            )
            self.own = DeviceMemory(SIZES, self._copy, lambda: direct)

    def _copy(self, *_: Any) -> None:
        raise AssertionError("nothing goes through host memory")

    def open(self) -> NixlTransport:
        return NixlTransport(self.own, ACCESS)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = importlib.import_module("nixl._api") if IS_REAL else Library()
    monkeypatch.setattr(nixl, "load_library", lambda *_: library)
    return library


PLACES: list[tuple[MemoryKind | None, int]] = [(None, 0), ("DRAM", 3)]
if not IS_REAL:
    PLACES += [("VRAM", 0), ("VRAM", 5)]


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("there", PLACES)
@pytest.mark.parametrize("here", PLACES)
def test_memory_of_any_kind_is_read_into_any_other(
    there: tuple[MemoryKind | None, int], here: tuple[MemoryKind | None, int]
) -> None:
    theirs, ours = Rig(1, *there), Rig(2, *here)
    exported = theirs.open().export()
    link = ours.open().connect(exported.descriptor, soon())
    assert list(link.own_regions) == list(ours.memory.own.regions)
    read(
        link,
        MemorySpan(0, 100, 4096, ours.memory.address(0, 50)),
        MemorySpan(2, 9, 2**20, ours.memory.address(2, 7)),
    )
    assert ours.memory.bytes_of(0, 50, 4096) == theirs.memory.bytes_of(0, 100, 4096)
    assert ours.memory.bytes_of(2, 7, 2**20) == theirs.memory.bytes_of(2, 9, 2**20)
    link.close()
    exported.close()
    if here[0] is not None:
        assert threading.current_thread() in ours.entered
    if there[0] is not None:
        names = {thread.name for thread in theirs.entered}
        assert "kv-nixl-export" in names, "who answers readers uses the device, too"


def test_a_library_that_was_not_built_for_the_device_is_refused_at_once(library: Library) -> None:
    """NIXL's UCX takes host memory for what it is, so that it refuses this as it does a GPU's without CUDA."""
    if not IS_REAL:
        library.kinds = ("DRAM",)
    with pytest.raises(
        TransportError, match=r"does not take memory of the device, .* NIXL_ERR_BACKEND"
    ):
        Rig(1, "VRAM").open()
    host = Rig(2, None)
    host.open().export().close()


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"kind": "VRAM"}, "NOT_FOUND"),
        ({"device": 4}, "NOT_FOUND"),
        ({"regions": [(4096, 2**20)]}, "NOT_FOUND"),
        ({"kind": "FILE"}, "makes no sense"),
        ({"kind": 7}, "makes no sense"),
        ({"device": -1}, "makes no sense"),
        ({"device": "0"}, "makes no sense"),
        ({"metadata": b"nonsense"}, "does not reach it"),
    ],
)
def test_a_descriptor_that_lies_makes_no_link(changed: dict[str, Any], reason: str) -> None:
    theirs, ours = Rig(1, "DRAM", 3), Rig(2, None)
    exported = theirs.open().export()
    fields = msgspec.msgpack.decode(exported.descriptor)
    with pytest.raises(TransportError, match=reason):
        ours.open().connect(msgspec.msgpack.encode(fields | changed), soon())
    exported.close()


@pytest.mark.usefixtures("library")
def test_a_descriptor_that_names_no_kind_is_of_host_memory() -> None:
    theirs, ours = Rig(1, None), Rig(2, None)
    exported = theirs.open().export()
    fields = msgspec.msgpack.decode(exported.descriptor)
    del fields["kind"], fields["device"]
    link = ours.open().connect(msgspec.msgpack.encode(fields), soon())
    read(link, MemorySpan(0, 0, 8, ours.memory.address(0)))
    assert ours.memory.bytes_of(0, 0, 8) == theirs.memory.bytes_of(0, 0, 8)
    link.close()
    exported.close()


@pytest.mark.usefixtures("library")
def test_memory_that_networks_do_not_reach_is_refused() -> None:
    def refuse() -> DirectMemory:
        raise TransportError("the KV cache lies elsewhere")

    for direct, reason in ((None, "networks do not reach"), (refuse, "lies elsewhere")):
        memory = DeviceMemory(SIZES, Rig(1, None)._copy, direct)
        with pytest.raises(TransportError, match=reason):
            NixlTransport(memory, ACCESS)


@pytest.mark.usefixtures("library")
def test_what_is_registered_is_told() -> None:
    rig = Rig(1, PLACES[-1][0], 5)
    exported = rig.open().export()
    told = msgspec.msgpack.decode(exported.descriptor, type=NixlDescriptor)
    assert (told.kind, told.device) == (PLACES[-1][0], 5)
    assert told.regions == list(rig.memory.own.regions)
    exported.close()
