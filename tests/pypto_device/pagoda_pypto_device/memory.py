# SPDX-License-Identifier: Apache-2.0
"""Memory of the chips, which no address of the host reaches, and memory of the host that their processes see."""

from __future__ import annotations

import bisect
import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_FIRST, _APART = 0x7000_0000_0000_0000, 1 << 50
"""Addresses on the first chip begin at a place where the host has none; those of chips lie far apart."""
ALIGNMENT = 512


class ContractError(Exception):
    """Something was passed to the device that its contract does not allow."""


@dataclass(frozen=True)
class DeviceTensor:
    data_ptr: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StackedDeviceTensor:
    shards: tuple[DeviceTensor, ...]


class ChipMemory:
    """One chip's memory; what is taken holds NaN until it is written."""

    def __init__(self, number: int, total: int) -> None:
        self._next = self._first = _FIRST + number * _APART
        self.number, self.total = number, total
        self._tensors: dict[int, Tensor] = {}
        self._addresses: list[int] = []
        self.versions: dict[int, int] = {}
        """How often what lies at an address was written by copies."""

    @property
    def taken(self) -> int:
        return sum(len(held) for held in self._tensors.values())

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> DeviceTensor:
        size = math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 1:
            raise ContractError(f"a tensor of {list(shape)} is taken on a chip")
        if self.taken + size > self.total:
            raise RuntimeError(f"chip {self.number} has no {size} bytes left of {self.total}")
        address = self._next
        self._next += -(-size // ALIGNMENT) * ALIGNMENT + ALIGNMENT
        self._tensors[address] = torch.full((size,), 0xFF, dtype=torch.uint8)
        bisect.insort(self._addresses, address)
        self.versions[address] = 0
        return DeviceTensor(address, tuple(shape), dtype)

    def free(self, tensor: DeviceTensor) -> None:
        if tensor.data_ptr not in self._tensors:
            raise ContractError("memory is given back that was not taken")
        del self._tensors[tensor.data_ptr]
        self._addresses.remove(tensor.data_ptr)

    def bytes_at(self, address: int, size: int, what: str) -> Tensor:
        """Bytes of one allocation."""
        base = self.base(address, what)
        offset = address - base
        if offset + size > len(self._tensors[base]):
            raise ContractError(
                f"{what} reaches {size} bytes behind its memory's start at {offset}"
            )
        return self._tensors[base][offset : offset + size]

    def base(self, address: int, what: str) -> int:
        """Where the allocation begins that an address lies in."""
        place = bisect.bisect_right(self._addresses, address) - 1
        base = self._addresses[place] if place >= 0 else -1
        if base < 0 or address >= base + len(self._tensors[base]):
            raise ContractError(
                f"{what} is at {address:#x}, where chip {self.number} has no memory"
            )
        return base

    def tensor(self, handle: DeviceTensor, what: str) -> Tensor:
        """What a handle names."""
        raw = self.bytes_at(handle.data_ptr, handle.nbytes, what)
        return raw.view(handle.dtype).view(handle.shape)

    def wrote(self, address: int) -> None:
        self.versions[self.base(address, "a copy")] += 1


class SharedMemory:
    """Memory of the host that was shared when the worker was forked."""

    def __init__(self) -> None:
        self._known = {file for _, _, file in _mappings()}
        self._seen: list[tuple[int, int, str]] = []

    def look(self) -> None:
        """Looks which memory is there now; done before each call and each copy."""
        self._seen = [mapping for mapping in _mappings() if mapping[2] in self._known]

    def check(self, address: int, size: int, what: str) -> None:
        """Raises ContractError: the worker does not see this memory."""
        if any(start <= address and address + size <= end for start, end, _ in self._seen):
            return
        raise ContractError(f"{what} is in memory that was not shared when the worker was forked")

    def bytes_at(self, address: int, size: int, what: str) -> Tensor:
        self.look()
        self.check(address, size, what)
        memory = (ctypes.c_char * size).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8)


def _mappings() -> Iterator[tuple[int, int, str]]:
    """Shared mappings of this process: first address, the one behind the last, and a file that never returns."""
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        for line in maps:
            area, flags, _, device, file, *_ = line.split()
            if flags.endswith("s"):
                start, end = area.split("-")
                yield int(start, 16), int(end, 16), f"{device} {file}"
