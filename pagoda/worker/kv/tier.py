# SPDX-License-Identifier: Apache-2.0
"""A plugin's KV tier as a worker has it: the place of its blocks, and transfers from and to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pagoda.backend.kv_store import KVStore
from pagoda.messages.transfers import TierPlace, Transfer
from pagoda.worker.kv.jobs import Jobs
from pagoda.worker.kv.memory import HostArena
from pagoda.worker.kv.staging import TierParts


@dataclass(frozen=True)
class WorkerTier:
    """The worker's half of a tier, opened."""

    place: TierPlace
    """The place of this rank's blocks, as engines are told."""
    start: Callable[[Jobs, KVStore, HostArena | None], TierTransfers]
    """Starts to copy blocks of this rank; transfers end in the jobs."""
    parts: TierParts
    """Parts of this rank's blocks, for segments that are streamed."""


class TierTransfers(Protocol):
    """Transfers of one rank from and to a tier, copied by threads of their own."""

    @property
    def owes_blocks(self) -> bool:
        """True while `give_up` is to be called now and then."""

    def begin(self, transfer: Transfer, count: int) -> None:
        """Begins a transfer of `count` blocks; never waits for one.

        Raises ValueError: this worker has no such places."""

    def give_up(self) -> None:
        """Ends the transfers of a place that has not answered for long. The thread that begins transfers calls it,
        so none begins meanwhile."""

    def close(self) -> None:
        """Ends all transfers and the threads, and waits for these. The jobs are closed before."""
