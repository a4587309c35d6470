# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel ranks as threads of one process."""

from __future__ import annotations

import contextlib

from pagoda.backend.cpu.collectives import SharedMemory, SharedMemoryCollectives
from pagoda.backend.cpu.native import choose_instruction_set
from pagoda.devices import BackendUnavailableError
from pagoda.parallel.collectives import Alone, Collectives
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
