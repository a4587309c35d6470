"""Tensor-parallel ranks as threads of one process."""

from __future__ import annotations

import contextlib
import threading

import torch
from torch import Tensor

from pagoda.backend.cpu.collectives import SharedMemory, SharedMemoryCollectives
from pagoda.backend.cpu.native import choose_instruction_set
from pagoda.devices import BackendUnavailableError
from pagoda.parallel.collectives import Alone, Collectives


class ThreadGroup:
    """Memory that the ranks of one group share: as processes do, where the kernels are there for it.

    Forward passes are recorded with their sums then, as in a worker.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._exchange = _Exchange(size)
        self._memory: SharedMemory | None = None
        with contextlib.suppress(BackendUnavailableError):
            choose_instruction_set()
            self._memory = SharedMemory(size)

    def member(self, rank: int) -> Collectives:
        """Joins a rank; once for each."""
        if self._size == 1:
            return Alone()
        if self._memory is None:
            return ThreadCollectives(self._exchange, rank, self._size)
        return SharedMemoryCollectives(self._memory.path, rank, self._size)

    def close(self) -> None:
        """Closes the memory, once all ranks are members."""
        if self._memory is not None:
            self._memory.close()


class _Exchange:
    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=60)
        self._given: list[object] = [None] * size

    def all_give(self, rank: int, own: object) -> list[object]:
        self._given[rank] = own
        self._barrier.wait()
        everything = list(self._given)
        self._barrier.wait()
        return everything


class ThreadCollectives:
    """One rank of a `ThreadGroup` without kernels."""

    def __init__(self, exchange: _Exchange, rank: int, size: int) -> None:
        self._exchange = exchange
        self.rank = rank
        self.size = size

    def all_reduce(self, x: Tensor) -> Tensor:
        parts = self.all_gather(x)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return total.to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        parts = self._exchange.all_give(self.rank, x)
        return torch.stack([part for part in parts if isinstance(part, Tensor)])

    def broadcast(self, payload: bytes | None) -> bytes:
        first = self._exchange.all_give(self.rank, payload)[0]
        assert isinstance(first, bytes)
        return first
