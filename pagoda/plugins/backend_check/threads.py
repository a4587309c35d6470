# SPDX-License-Identifier: Apache-2.0
"""Ranks of a group as threads of one process, which exchange what they have in host memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pagoda.parallel.collectives import LOOPBACK, sum_in_order


class ThreadGroup:
    """Ranks of one process, as threads that meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=60)
        self._given: list[Any] = [None] * size

    def all_give(self, rank: int, own: Any) -> list[Any]:
        self._given[rank] = own
        self._barrier.wait()
        everything = list(self._given)
        self._barrier.wait()
        return everything

    def abort(self) -> None:
        """Lets ranks that wait for one that failed fail too."""
        self._barrier.abort()


class ThreadRank:
    """One rank of a `ThreadGroup`."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self._group = group
        self.rank = rank
        self.size = group.size
        self.host = LOOPBACK

    def all_reduce(self, x: Tensor) -> Tensor:
        return sum_in_order(self.all_gather(x))

    def all_gather(self, x: Tensor) -> Tensor:
        if not x.is_cpu:
            raise ValueError(f"A group over the host was given a tensor on {x.device}.")
        return torch.stack(self._group.all_give(self.rank, x.clone()))

    def all_to_all(self, x: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        given = self._group.all_give(self.rank, x.clone())
        parts = [
            it.split_with_sizes(list(row))[self.rank] for it, row in zip(given, counts, strict=True)
        ]
        return torch.cat(parts)

    def broadcast(self, payload: bytes | None) -> bytes:
        first: bytes = self._group.all_give(self.rank, payload)[0]
        return first
