"""Tensor-parallel ranks as threads of one process."""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class ThreadGroup:
    """What the ranks of one group share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.given: list[object] = [None] * size

    def member(self, rank: int) -> ThreadCollectives:
        return ThreadCollectives(self, rank)


class ThreadCollectives:
    """One rank of a `ThreadGroup`."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self._group = group
        self.rank = rank
        self.size = group.size

    def all_reduce(self, x: Tensor) -> Tensor:
        parts = self.all_gather(x)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return total.to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack([part for part in self._exchange(x) if isinstance(part, Tensor)])

    def broadcast(self, payload: bytes | None) -> bytes:
        first = self._exchange(payload)[0]
        assert isinstance(first, bytes)
        return first

    def close(self) -> None:
        pass

    def _exchange(self, own: object) -> list[object]:
        group = self._group
        group.given[self.rank] = own
        group.barrier.wait()
        everything = list(group.given)
        group.barrier.wait()
        return everything
