# SPDX-License-Identifier: Apache-2.0
"""Collectives of processes on one host, through memory that they share; see csrc/collectives.h."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pagoda.backend.cpu.native import choose_instruction_set, load_native
from pagoda.backend.cpu.weights import DTYPES
from pagoda.parallel.collectives import Broadcasting, check_on_host

if TYPE_CHECKING:
    from pagoda.backend import _native


class SharedMemory:
    """Memory for the ranks of one group.

    It has no name in any file system: it is gone when the processes that have it open or mapped are.
    """

    def __init__(self, size: int) -> None:
        """Allocates memory for a group of `size` ranks.

        Raises BackendUnavailableError if the kernels are not installed, OSError if there is no shared memory left,
        ValueError if a group cannot have so many ranks.
        """
        native = load_native()
        if size > native.Collectives.max_ranks:
            most = native.Collectives.max_ranks
            raise ValueError(f"A group on one host has at most {most} ranks, not {size}.")
        num_bytes = native.Collectives.bytes(size)
        self._descriptor = os.memfd_create("pagoda-collectives", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._descriptor, num_bytes)
        except OSError:
            self.close()
            raise

    @property
    def path(self) -> str:
        """Path that processes of the same user can open until `close`."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        """Closes the memory here, once all ranks have opened it. May be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class SharedMemoryCollectives(Broadcasting):
    """One rank. Sums have the same bits whatever the instruction set and the number of threads."""

    def __init__(self, path: str, rank: int, size: int) -> None:
        """Opens `SharedMemory.path`; does not wait for the other ranks.

        Raises BackendUnavailableError if the kernels are not installed or not for this CPU, OSError if there is no
        such memory, ValueError if the memory belongs to a group of another size or `rank` is not one of its ranks.
        """
        native = load_native()
        self.rank = rank
        self.size = size
        self._kernels: _native.Kernels = native.Kernels(choose_instruction_set())
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.native: _native.Collectives = native.Collectives(descriptor, rank, size)
            """Native group, which recorded forward passes use and keep."""
        finally:
            os.close(descriptor)

    def all_reduce(self, x: Tensor) -> Tensor:
        check_on_host(x)
        x = x.contiguous()
        self.native.all_reduce(self._kernels, DTYPES[x.dtype], x.data_ptr(), x.numel())
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        check_on_host(x)
        x = x.contiguous()
        out = x.new_empty((self.size, *x.shape))
        self.native.all_gather(x.data_ptr(), x.nbytes, out.data_ptr())
        return out

    def all_to_all(self, x: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        check_on_host(x)
        x = x.contiguous()
        row_bytes = x.itemsize * x.shape[1:].numel()
        out = x.new_empty((sum(row[self.rank] for row in counts), *x.shape[1:]))
        parts = [count * row_bytes for row in counts for count in row]
        self.native.all_to_all(x.data_ptr(), parts, out.data_ptr())
        return out

    def exchange(self, data: bytearray) -> bytearray:
        address = torch.frombuffer(data, dtype=torch.uint8).data_ptr()
        self.native.broadcast(address, len(data))
        return data
