"""The KV tensors of one rank as bytes: what one block is in all its layers, one after the other."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from pagoda.backend.base import KVCache


class _Part(NamedTuple):
    """One tensor; a block of it is contiguous."""

    address: int
    block_bytes: int
    offset: int
    """First byte of the part within the bytes of a block."""


class KVMemory:
    """The KV tensors of one rank, in this process's own memory.

    Copies by `memmove`, which lets other threads run: the one that computes does not wait.
    """

    def __init__(self, caches: Sequence[KVCache]) -> None:
        """
        Raises:
            ValueError: a tensor is not in this process's memory, or not contiguous.
        """
        self._caches = caches  # whose memory is used as long as this lives
        self._parts: list[_Part] = []
        offset = 0
        for cache in caches:
            for tensor in host_tensors(cache).values():
                block_bytes = tensor.nbytes // len(tensor)
                self._parts.append(_Part(tensor.data_ptr(), block_bytes, offset))
                offset += block_bytes
        self._block_bytes = offset
        self._num_blocks = len(caches[0].keys)

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    @property
    def layout(self) -> str:
        """The dimensions of a block in each tensor of each layer; equal for equal bytes."""
        return " ".join(
            f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape[1:])}"
            for cache in self._caches
            for tensor in cache.tensors.values()
        )

    def read(self, block_id: int, into: memoryview) -> None:
        outside = self._address(block_id, into)
        for address, block_bytes, offset in self._parts:
            ctypes.memmove(outside + offset, address + block_id * block_bytes, block_bytes)

    def write(self, block_id: int, source: memoryview) -> None:
        outside = self._address(block_id, source)
        for address, block_bytes, offset in self._parts:
            ctypes.memmove(address + block_id * block_bytes, outside + offset, block_bytes)

    def _address(self, block_id: int, outside: memoryview) -> int:
        if not 0 <= block_id < self._num_blocks or outside.nbytes != self._block_bytes:
            raise ValueError(
                f"Block {block_id} of {self._num_blocks} does not go with {outside.nbytes} bytes, "
                f"a block has {self._block_bytes}."
            )
        return _address_of(outside)


def host_tensors(cache: KVCache) -> dict[str, Tensor]:
    """Tensors of a cache by kind.

    Raises:
        ValueError: a tensor is not in this process's memory, or not contiguous.
    """
    if any(t.device.type != "cpu" or not t.is_contiguous() for t in cache.tensors.values()):
        raise ValueError("KV tensors must be contiguous and in host memory.")
    return cache.tensors


def copy_bytes(source: memoryview, target: memoryview) -> None:
    """Copies all of `source`, which is as long as `target`, and lets other threads run meanwhile."""
    if source.nbytes != target.nbytes:
        raise ValueError(f"{source.nbytes} bytes do not go into {target.nbytes}.")
    ctypes.memmove(_address_of(target), _address_of(source), source.nbytes)


def _address_of(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
