# SPDX-License-Identifier: Apache-2.0
"""Checks of KV as bytes: blocks and parts of them go out and in, in batches, and in the order of events."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random

from pagoda.backend.kv_store import DONE, DeviceEvent, KVStore, ReachedByNetworks, block_extents
from pagoda.errors import TransportError
from pagoda.kv.memory import Extent, Region
from pagoda.messages.kv_formats import KV_FORMATS
from pagoda.plugins.backend_check.attention import Kind, cache_of, fitted, spoil
from pagoda.plugins.backend_check.subject import Check, FailedError, Subject, ensure
from pagoda.worker.kv.store import store_of

_BLOCKS = (5, 0, 3)
_OTHERS = (1, 4, 2)


def _stores(subject: Subject) -> str:
    """Two layers of every KV format."""
    backend, known = subject.backend, subject.backend.capabilities.kv_cache_dtypes
    for name in known:
        kind = replace(fitted(subject, Kind()), kv_dtype=name)
        caches = [cache_of(backend, kind) for _ in range(2)]
        for cache in caches:
            spoil(backend, cache)
        try:
            store = store_of(backend, caches)
        except ValueError as error:
            raise FailedError(f"KV of {name} cannot be moved as bytes: {error}") from None
        _check_shape(store, kind, name)
        _check_batches(store, name)
        _check_extents(store, name)
        _check_order(store, name)
        if isinstance(store, ReachedByNetworks):
            with suppress(TransportError):  # networks cannot reach the device as it is set up
                _check_regions(store, store.direct_memory().regions, name)
    return f"{', '.join(known)}: batches, parts of blocks, copies behind others"


def _check_shape(store: KVStore, kind: Kind, what: str) -> None:
    ensure(
        store.num_blocks == kind.num_blocks,
        f"a store of {what} has {store.num_blocks} blocks of {kind.num_blocks}",
    )
    head = KV_FORMATS[kind.kv_dtype].vector_bytes(kind.head_dim)
    wanted = 4 * kind.kv_heads * kind.block_size * head
    told = sum(tensor.block_bytes for tensor in store.tensors)
    ensure(
        store.block_bytes == told == wanted,
        f"blocks of {what} in two layers have {store.block_bytes} bytes, tensors {told}, not {wanted}",
    )
    ensure(store.batch_blocks > 0, f"a store of {what} takes batches of {store.batch_blocks}")


def _check_batches(store: KVStore, what: str) -> None:
    """Blocks that are written together are there, each by itself; others stay."""
    before = _read(store, _OTHERS)
    given = _random(store, len(_BLOCKS), 1)
    sources = [memoryview(bytearray(one)) for one in given]
    _await(store.write(_BLOCKS, sources, store.computed()), f"a write of {what}")
    for source in sources:
        source[:] = bytes(len(source))  # it may change once it has been written
    one_by_one = [_read(store, [block])[0] for block in _BLOCKS]
    ensure(one_by_one == given, f"blocks of {what} that are written together are others behind it")
    ensure(_read(store, _BLOCKS) == given, f"blocks of {what} that are read together are others")
    ensure(_read(store, _OTHERS) == before, f"a write of some blocks of {what} changes others")


def _check_extents(store: KVStore, what: str) -> None:
    """The heads of a block are where strides say; parts are read and written as blocks are."""
    extents = [
        Extent(
            region,
            _BLOCKS[0] * tensor.block_stride + head * tensor.head_stride,
            tensor.head_stride,
        )
        for region, tensor in enumerate(store.tensors)
        for head in range(tensor.num_heads)
    ]
    (whole,) = _read(store, _BLOCKS[:1])
    ensure(_read_extents(store, extents) == whole, f"heads of {what} lie elsewhere in a block")
    chosen = extents[:: -max(1, len(extents) // 3)]
    ensure(
        _read_extents(store, chosen) == b"".join(_part(store, whole, each) for each in chosen),
        f"parts of a block of {what} are others than those of the whole",
    )
    (given,) = _random(store, 1, 2)
    places = block_extents(store.tensors, _OTHERS[:1])
    source = memoryview(bytearray(given))
    _await(store.write_extents(places, source, store.computed()), f"a write of parts of {what}")
    ensure(_read(store, _OTHERS[:1]) == [given], f"parts of {what} are written elsewhere")


def _part(store: KVStore, whole: bytes, extent: Extent) -> bytes:
    """Bytes of a block, by their place in its tensor."""
    before = sum(tensor.block_bytes for tensor in store.tensors[: extent.region])
    at = before + extent.offset % store.tensors[extent.region].block_stride
    return whole[at : at + extent.num_bytes]


def _check_order(store: KVStore, what: str) -> None:
    """A copy begins when the one before it has ended, for which nobody has waited."""
    first, second = _random(store, 2, 3)
    sources = [memoryview(bytearray(one)) for one in (first, second)]
    (block, *_), event = _BLOCKS, store.computed()
    copies = [memoryview(bytearray(store.block_bytes)) for _ in sources]
    for source, copy in zip(sources, copies, strict=True):
        event = store.write([block], [source], event)
        event = store.read([block], [copy], event)
    _await(event, f"the last of some copies of {what}")
    ensure(
        [bytes(copy) for copy in copies] == [first, second],
        f"copies of {what} do not come behind the events that they were given",
    )


def _await(event: DeviceEvent, what: str) -> None:
    event.wait()
    ensure(event.done, f"the event of {what} is not done behind its wait")


def _check_regions(store: KVStore, regions: Sequence[Region], what: str) -> None:
    """Networks find blocks where strides say, and reach nothing else of the device."""
    found = [region.num_bytes for region in regions]
    wanted = [store.num_blocks * tensor.block_stride for tensor in store.tensors]
    ensure(
        found == wanted,
        f"networks are given regions of {found} bytes for tensors of {what} that take {wanted}",
    )
    ends = [0, *(region.address + region.num_bytes for region in sorted(regions))]
    ensure(
        all(at >= end for (at, _), end in zip(sorted(regions), ends, strict=False)),
        f"networks are given regions of {what} that overlap",
    )


def _random(store: KVStore, count: int, seed: int) -> list[bytes]:
    return [Random(seed * 100 + number).randbytes(store.block_bytes) for number in range(count)]


def _read(store: KVStore, blocks: Sequence[int]) -> list[bytes]:
    copies = [memoryview(bytearray(store.block_bytes)) for _ in blocks]
    _await(store.read(blocks, copies, DONE), "a read")
    return [bytes(copy) for copy in copies]


def _read_extents(store: KVStore, extents: Sequence[Extent]) -> bytes:
    copy = memoryview(bytearray(sum(extent.num_bytes for extent in extents)))
    _await(store.read_extents(extents, copy, DONE), "a read of parts")
    return bytes(copy)


FURTHER = (Check("KV store", _stores),)
