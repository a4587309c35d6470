# SPDX-License-Identifier: Apache-2.0
"""Ranks of a stage as threads of one process."""

from __future__ import annotations

import contextlib
from typing import Any

from pagoda.backend.cpu.collectives import SharedMemory, SharedMemoryCollectives
from pagoda.backend.cpu.native import choose_instruction_set
from pagoda.devices import BackendUnavailableError
from pagoda.parallel.collectives import Alone, Collectives, RankGroups, stage_groups
from pagoda.parallel.config import ParallelConfig, RankPlace
from pagoda.plugins.backend_check import threads


class ThreadGroup:
    """Memory that the ranks of one group share: as processes do, where the kernels are there for it.

    Forward passes are recorded with their sums then, as in a worker.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._threads = threads.ThreadGroup(size)
        self._memory: SharedMemory | None = None
        with contextlib.suppress(BackendUnavailableError):
            choose_instruction_set()
            self._memory = SharedMemory(size)

    def member(self, rank: int) -> Collectives:
        """Joins a rank; once for each."""
        if self._size == 1:
            return Alone()
        if self._memory is None:
            return threads.ThreadRank(self._threads, rank)
        return SharedMemoryCollectives(self._memory.path, rank, self._size)

    def close(self) -> None:
        """Closes the memory, once all ranks are members."""
        if self._memory is not None:
            self._memory.close()


class ThreadGroups:
    """The groups of all ranks of one stage."""

    def __init__(self, parallel: ParallelConfig) -> None:
        self._parallel = parallel
        self._groups: dict[tuple[int, ...], ThreadGroup] = {}
        for place in parallel.places(0):
            for ranks in parallel.groups_of(place).values():
                if place.pp == 0:
                    self._groups.setdefault(_key(parallel, ranks), ThreadGroup(len(ranks)))

    def of(self, place: RankPlace) -> RankGroups:
        """Joins a rank; once for each."""
        parallel = self._parallel
        joined: dict[str, Any] = {
            name: self._groups[_key(parallel, ranks)].member(ranks.index(place))
            for name, ranks in parallel.groups_of(place).items()
        }
        return stage_groups(parallel, joined)

    def close(self) -> None:
        for group in self._groups.values():
            group.close()


def _key(parallel: ParallelConfig, ranks: list[RankPlace]) -> tuple[int, ...]:
    return tuple(map(parallel.rank_in_stage, ranks))
