# SPDX-License-Identifier: Apache-2.0
"""The KV of one rank as bytes, wherever it lies: the one interface by which tiers, handoff and manifests reach it.

Copies are submitted. Each gives an event that tells when it has ended, and takes one that it has to come after:
a device copies beside its steps, on a stream of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from pagoda.backend.base import KVCache, LatentCache
from pagoda.kv.memory import DirectMemory, Extent, MemoryFile, Region


class DeviceEvent(Protocol):
    """Something that a device will have done."""

    @property
    def done(self) -> bool: ...

    def wait(self) -> None:
        """Returns when it is done, and lets other threads run until then.

        Raises RuntimeError: it will never be, for the reason that it gives.
        """


class _Done:
    """The event of what was done before it was given."""

    done = True

    def wait(self) -> None:
        """Returns at once."""


DONE: DeviceEvent = _Done()


class KVTensor(NamedTuple):
    """One tensor of a place, with its strides in bytes; the tokens of one head of a block lie together."""

    place: int
    """Index of the cache that the tensor belongs to: of a layer, or of one layer of each KV group."""
    kind: str
    """`keys`, `values`, `key_scales`, `value_scales`, `latents` or `latent_scales`."""
    num_heads: int
    block_stride: int
    head_stride: int
    layout: str
    """Element type and dimensions of a block; equal for equal bytes."""
    head_layout: str
    """The same of a head in a block."""

    @property
    def block_bytes(self) -> int:
        return self.num_heads * self.head_stride


class Pages(Protocol):
    """A thread that takes pages of a cache from the system before steps write to them."""

    def advance(self, end: int) -> None:
        """Orders the pages of all blocks in front of `end`."""

    def wait(self) -> None:
        """Returns when what was ordered is there, or never will be."""


OpenPages = Callable[[Sequence[tuple[int, int]], int], Pages]
"""Opens the pages of tensors, each an address and the bytes from block to block, and a number of blocks."""


class KVStore(Protocol):
    """The KV tensors of one rank. Methods may be called from any thread, also while a step runs.

    Events that are passed as `after` are `DONE` or were given by the same store.
    """

    tensors: tuple[KVTensor, ...]
    num_blocks: int
    block_bytes: int
    """Bytes of a block in all tensors."""
    batch_blocks: int
    """Blocks that a call of `read` or `write` should have at most; what is urgent waits for a call."""

    def computed(self) -> DeviceEvent:
        """The event of all that steps which have been given to the backend do to KV."""

    def read(
        self, block_ids: Sequence[int], into: Sequence[memoryview], after: DeviceEvent = DONE
    ) -> DeviceEvent:
        """Copies each block into `block_bytes` bytes of host memory, tensor after tensor.

        The memory holds the block when the event is done. Raises ValueError: there is no such block, or its place
        has another size.
        """

    def write(
        self, block_ids: Sequence[int], sources: Sequence[memoryview], after: DeviceEvent = DONE
    ) -> DeviceEvent:
        """Copies what `read` has given into blocks.

        Steps that begin when the event is done find it there; sources may change then. Raises ValueError as `read`
        does.
        """

    def read_extents(
        self, extents: Sequence[Extent], into: memoryview, after: DeviceEvent = DONE
    ) -> DeviceEvent:
        """Copies bytes of tensors, which follow one another in `into`, as `read` does."""

    def write_extents(
        self, extents: Sequence[Extent], source: memoryview, after: DeviceEvent = DONE
    ) -> DeviceEvent:
        """Copies what `read_extents` has given, as `write` does."""

    def regions(self) -> tuple[Region, ...]:
        """Memory of each tensor; empty where this process cannot address it.

        Raises ValueError: blocks of a tensor do not follow one another, so that others cannot read them.
        """

    def file(self) -> MemoryFile | None:
        """The file that `regions` lie in, which others may map; None where there is none."""

    def open_pages(self) -> Pages | None:
        """None where memory need not be taken from the system page by page."""


@runtime_checkable
class ReachedByNetworks(Protocol):
    """Part of a store on a device whose memory networks read and write by themselves, past this process."""

    def direct_memory(self) -> DirectMemory:
        """Regions of the tensors, each of all of its blocks one after the other.

        Raises TransportError: the memory is such that networks cannot reach it, for the reason that it gives.
        """


@runtime_checkable
class KVOnDevice(Protocol):
    """Part of a backend whose KV lies in memory of its device, and not in what `NewTensor` gives."""

    def open_kv_store(self, caches: Sequence[KVCache | LatentCache]) -> KVStore:
        """The store of caches that this backend has allocated, which live as long as it does."""


@runtime_checkable
class OpensPages(Protocol):
    """Part of a backend of the host that has a way of its own of taking pages."""

    def open_pages(self, tensors: Sequence[tuple[int, int]], num_blocks: int) -> Pages:
        """See `OpenPages`. Raises BackendUnavailableError: what it needs is not installed."""


def describe_tensors(caches: Iterable[KVCache | LatentCache]) -> tuple[KVTensor, ...]:
    """The tensors of caches, in the order in which their bytes follow one another in a block.

    Raises ValueError: the heads of a block lie apart.
    """
    return tuple(
        _described(place, kind, tensor)
        for place, cache in enumerate(caches)
        for kind, tensor in cache.tensors.items()
    )


def _described(place: int, kind: str, tensor: Tensor) -> KVTensor:
    head, itemsize = tensor[0, 0], tensor.itemsize
    head_stride = tensor.stride(1) * itemsize
    if not head.is_contiguous() or head_stride != head.nbytes:
        raise ValueError("The heads of a block of KV must be contiguous, one after the other.")
    name = str(tensor.dtype).removeprefix("torch.")
    return KVTensor(
        place,
        kind,
        tensor.shape[1],
        tensor.stride(0) * itemsize,
        head_stride,
        f"{name}{list(tensor.shape[1:])}",
        f"{name}{list(tensor.shape[2:])}",
    )


def check_blocks(store: KVStore, block_ids: Sequence[int], outside: Sequence[memoryview]) -> None:
    """Raises ValueError: blocks are not in the store, or do not go with what is outside."""
    for block_id, buffer in zip(block_ids, outside, strict=True):
        if not 0 <= block_id < store.num_blocks or buffer.nbytes != store.block_bytes:
            raise ValueError(
                f"Block {block_id} of {store.num_blocks} does not go with {buffer.nbytes} bytes, "
                f"a block has {store.block_bytes}."
            )


def check_extents(store: KVStore, extents: Sequence[Extent], outside: memoryview) -> None:
    """Raises ValueError: bytes are not in the store's tensors, or do not go with what is outside."""
    for extent in extents:
        if not 0 <= extent.region < len(store.tensors):
            raise ValueError(
                f"There are {len(store.tensors)} tensors, but no tensor {extent.region}."
            )
        size = store.num_blocks * store.tensors[extent.region].block_stride
        if extent.num_bytes < 1 or not 0 <= extent.offset <= size - extent.num_bytes:
            raise ValueError(
                f"{extent.num_bytes} bytes from {extent.offset} on are not in a tensor of {size}."
            )
    total = sum(extent.num_bytes for extent in extents)
    if total != outside.nbytes:
        raise ValueError(f"{total} bytes of tensors do not go with {outside.nbytes}.")


def block_extents(tensors: Sequence[KVTensor], block_ids: Iterable[int]) -> list[Extent]:
    """Bytes that `KVStore.read` copies of blocks, in order."""
    return [
        Extent(region, block_id * tensor.block_stride, tensor.block_bytes)
        for block_id in block_ids
        for region, tensor in enumerate(tensors)
    ]


def layout_of(tensors: Iterable[KVTensor]) -> str:
    """Dimensions of a block in each tensor; equal for equal bytes."""
    return " ".join(tensor.layout for tensor in tensors)
