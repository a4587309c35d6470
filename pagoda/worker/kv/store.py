"""The KV of one rank as bytes: the only place that knows where it lies.

Tiers, handoff and manifests read and write blocks through a `KVStore`, and name its tensors by what they hold.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from pagoda.backend.base import KVCache, LatentCache
from pagoda.pd.transport.base import MemoryFile, Region
from pagoda.worker.kv.memory import KVAllocation


class KVTensor(NamedTuple):
    """One tensor of a place, with its strides in bytes; the tokens of one head of a block lie together."""

    place: int
    """Index of the cache that the tensor belongs to: of a layer, or of one layer of each KV group."""
    kind: str
    """`keys`, `values`, `key_scales`, `value_scales`, `latents` or `latent_scales`."""
    address: int
    num_heads: int
    block_stride: int
    head_stride: int
    head_layout: str
    """Element type and dimensions of a head in a block; equal for equal bytes."""

    @property
    def block_bytes(self) -> int:
        return self.num_heads * self.head_stride


class KVStore:
    """The KV tensors of one rank, in this process's own memory.

    Copies by `memmove`, which lets other threads run: the one that computes does not wait.
    """

    def __init__(
        self, caches: Sequence[KVCache | LatentCache], allocation: KVAllocation | None = None
    ) -> None:
        """`allocation` is where the caches lie, if other processes may map it.

        Raises ValueError if a tensor is not in this process's memory, or has the heads of a block apart.
        """
        self._caches = caches  # whose memory is used as long as this lives
        self._allocation = allocation
        self.tensors = tuple(
            _described(place, kind, tensor)
            for place, cache in enumerate(caches)
            for kind, tensor in cache.tensors.items()
        )
        self.num_blocks = len(next(iter(caches[0].tensors.values())))
        self.block_bytes = sum(tensor.block_bytes for tensor in self.tensors)

    @property
    def layout(self) -> str:
        """Dimensions of a block in each tensor of each place; equal for equal bytes."""
        return " ".join(
            f"{_name(tensor)}{list(tensor.shape[1:])}"
            for cache in self._caches
            for tensor in cache.tensors.values()
        )

    @property
    def head_layouts(self) -> list[str]:
        """Element type and dimensions of a head in a block, in each tensor of a place."""
        return [tensor.head_layout for tensor in self.tensors if tensor.place == 0]

    def read(self, block_id: int, into: memoryview) -> None:
        """Copies a block into `block_bytes` bytes, tensor after tensor."""
        outside = self._address(block_id, into)
        for tensor in self.tensors:
            inside = tensor.address + block_id * tensor.block_stride
            ctypes.memmove(outside, inside, tensor.block_bytes)
            outside += tensor.block_bytes

    def write(self, block_id: int, source: memoryview) -> None:
        """Copies what `read` has given into a block."""
        outside = self._address(block_id, source)
        for tensor in self.tensors:
            inside = tensor.address + block_id * tensor.block_stride
            ctypes.memmove(inside, outside, tensor.block_bytes)
            outside += tensor.block_bytes

    def _address(self, block_id: int, outside: memoryview) -> int:
        if not 0 <= block_id < self.num_blocks or outside.nbytes != self.block_bytes:
            raise ValueError(
                f"Block {block_id} of {self.num_blocks} does not go with {outside.nbytes} bytes, "
                f"a block has {self.block_bytes}."
            )
        return ctypes.addressof(ctypes.c_char.from_buffer(outside))

    def regions(self) -> tuple[Region, ...]:
        """Memory of each tensor, for transports.

        Raises ValueError if blocks of a tensor do not follow one another.
        """
        if any(tensor.block_stride != tensor.block_bytes for tensor in self.tensors):
            raise ValueError("Blocks of a tensor that others read must follow one another.")
        return tuple(
            Region(tensor.address, self.num_blocks * tensor.block_bytes) for tensor in self.tensors
        )

    def file(self) -> MemoryFile | None:
        """The file that `regions` lie in, which others may map; None where there is none."""
        return None if self._allocation is None else self._allocation.file(self.regions())


def _described(place: int, kind: str, tensor: Tensor) -> KVTensor:
    head, itemsize = tensor[0, 0], tensor.itemsize
    head_stride = tensor.stride(1) * itemsize
    if tensor.device.type != "cpu" or not head.is_contiguous() or head_stride != head.nbytes:
        raise ValueError(
            "KV tensors must be in host memory, and the heads of a block contiguous, one after the other."
        )
    return KVTensor(
        place,
        kind,
        tensor.data_ptr(),
        tensor.shape[1],
        tensor.stride(0) * itemsize,
        head_stride,
        f"{_name(tensor)}{list(tensor.shape[2:])}",
    )


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
