"""Memory for KV that processes of the same host can map."""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

from pagoda.messages.worker_config import WorkerConfig
from pagoda.pd.transport.base import MemoryFile, Region
from pagoda.pd.transport.choose import NEEDS_SHARED_MEMORY

_LARGE_PAGE = 2**21


def shares_kv(config: WorkerConfig) -> bool:
    """True if workers of other engines may map this one's KV."""
    handoff = config.kv_handoff
    return (
        handoff is not None
        and handoff.role.holds_kv
        and hasattr(os, "memfd_create")
        and not NEEDS_SHARED_MEMORY.isdisjoint(handoff.transports)
    )


class SharedKVMemory:
    """One file without a name, for some tensors. It is gone when nobody has it open or mapped.

    What is never written takes no memory. Tensors begin at large pages, which the kernel uses where it is told to
    (`/sys/kernel/mm/transparent_hugepage/shmem_enabled`).
    """

    def __init__(self, num_bytes: int, num_tensors: int) -> None:
        """Room for tensors of so many bytes together.

        Raises:
            OSError: the system has no such memory.
        """
        self._num_bytes = num_bytes + num_tensors * _LARGE_PAGE
        self._descriptor = os.memfd_create("pagoda-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._descriptor, self._num_bytes)
        self._memory = torch.frombuffer(
            mmap.mmap(self._descriptor, self._num_bytes), dtype=torch.uint8
        )
        self._taken = 0

    def new_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """
        Raises:
            ValueError: there is no room for it.
        """
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        tensor = self._memory[self._taken : self._taken + num_bytes]
        if len(tensor) < num_bytes:
            raise ValueError(f"There are no {num_bytes} bytes left of {self._num_bytes}.")
        self._taken += -(-num_bytes // _LARGE_PAGE) * _LARGE_PAGE
        return tensor.view(dtype).view(shape)

    def file(self, regions: tuple[Region, ...]) -> MemoryFile:
        """Describes the file and the offsets of `regions` in it."""
        offsets = tuple(region.address - self._memory.data_ptr() for region in regions)
        return MemoryFile(self._descriptor, self._num_bytes, offsets)
