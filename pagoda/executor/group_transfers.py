# SPDX-License-Identifier: Apache-2.0
"""KV transfers in flight on the ranks of a replica. Each rank of the blocks' pool copies its part and reports its
end."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from itertools import chain

from pagoda.executor.pools import Pools
from pagoda.messages.transfers import (
    KVRank,
    RemoteBlocks,
    TierBlocks,
    Transfer,
    TransferEnd,
    longest_transfer_s,
)
from pagoda.messages.worker import WorkerReady
from pagoda.parallel.config import ParallelConfig


class GroupTransfers:
    """Joins the ends of a transfer on the ranks of a pool: it has ended when it has ended on each of them.

    Ends of a transfer that is not under way, and further ends from the same rank, change nothing.
    """

    def __init__(self, pools: Pools, timeout_s: float, kv: Iterable[KVRank] = ()) -> None:
        """`kv` is that of the ranks, if they take part in handoff."""
        self._kv = tuple(kv)
        self.pools = pools
        self._timeout_s = timeout_s
        self._under_way: dict[tuple[int, int], _PendingTransfer] = {}
        ranks = chain.from_iterable(pools.ranks)
        self._work = {(rank, kind): _Work() for rank in ranks for kind in _TransferKind}

    @classmethod
    def of(
        cls, parallel: ParallelConfig, readies: Sequence[WorkerReady], timeout_s: float
    ) -> GroupTransfers:
        """Transfers of a replica whose ranks have said that they are ready."""
        kv_ranks = chain.from_iterable(ready.kv_ranks for ready in readies)
        return cls(Pools(parallel, readies), timeout_s, kv_ranks)

    @property
    def deadline(self) -> float | None:
        """Time until which a rank with open transfers must have ended one; None without open transfers.

        Transfers from another engine have longer: the worker itself gives up on an engine that does not answer.
        Those with a plugin's tier have for ever: the next worker would wait for the same disk. Requests do not
        wait, and nothing further is asked of one that hangs (`TieredKVConnector`).
        """
        patience_s = dict.fromkeys(_TransferKind, self._timeout_s) | {_TransferKind.TIER: math.inf}
        limits_s = (entry.limit_s for entry in self._under_way.values())
        patience_s[_TransferKind.REMOTE] += max(limits_s, default=0.0)
        instants = (
            work.moved_at + patience_s[kind]
            for (_, kind), work in self._work.items()
            if work.num_open
        )
        return min((instant for instant in instants if instant < math.inf), default=None)

    def begin(self, transfers: Sequence[Transfer], now: float) -> None:
        for transfer in transfers:
            ranks = self.pools.ranks[self.pools.of(transfer)]
            entry = _PendingTransfer(transfer, self._limit_s(transfer), ranks)
            self._under_way[transfer.transfer_id, transfer.generation] = entry
            for rank in ranks:
                work = self._work[rank, entry.kind]
                if work.num_open == 0:
                    work.moved_at = now
                work.num_open += 1

    def postpone(self, seconds: float) -> None:
        """Gives all transfers so much longer."""
        for work in self._work.values():
            work.moved_at += seconds

    def _limit_s(self, transfer: Transfer) -> float:
        """Seconds that a worker itself may wait for another engine before it ends a transfer."""
        source = transfer.source
        if not isinstance(source, RemoteBlocks):
            return 0.0
        block_bytes = max((rank.block_bytes(source.group) for rank in self._kv), default=0)
        return longest_transfer_s(len(source.block_ids) * block_bytes)

    def end(self, rank: int, end: TransferEnd, now: float) -> TransferEnd | None:
        """Notes the end on one rank; returns the joined end once the transfer has ended on all of its ranks."""
        key = (end.transfer_id, end.generation)
        entry = self._under_way.get(key)
        if entry is None or rank in entry.ends or rank not in entry.ranks:
            return None
        work = self._work[rank, entry.kind]
        work.num_open -= 1
        work.moved_at = now
        entry.ends[rank] = end
        if len(entry.ends) < len(entry.ranks):
            return None
        del self._under_way[key]
        return _join([entry.ends[rank] for rank in entry.ranks])


class _TransferKind(enum.Enum):
    """Resource that a transfer depends on; one resource may hang while the others make progress."""

    MEMORY = enum.auto()
    TIER = enum.auto()
    REMOTE = enum.auto()


def _kind(transfer: Transfer) -> _TransferKind:
    places = transfer.source, transfer.target
    if any(isinstance(place, RemoteBlocks) for place in places):
        return _TransferKind.REMOTE
    return (
        _TransferKind.TIER
        if any(isinstance(place, TierBlocks) for place in places)
        else _TransferKind.MEMORY
    )


class _PendingTransfer:
    def __init__(self, transfer: Transfer, limit_s: float, ranks: Sequence[int]) -> None:
        self.kind = _kind(transfer)
        self.limit_s = limit_s
        """Seconds that a worker itself may wait for another engine before it ends the transfer."""
        self.ranks = ranks
        self.ends: dict[int, TransferEnd] = {}


class _Work:
    def __init__(self) -> None:
        self.num_open = 0
        self.moved_at = 0.0
        """Time at which the last transfer ended, or the first one began."""


def _join(ends: Sequence[TransferEnd]) -> TransferEnd:
    """Joins the ends on all ranks into one."""
    failures = [end for end in ends if end.failed]
    if not failures:
        return ends[0]
    first = min(failures, key=lambda end: min(end.failed))
    failed = sorted(set().union(*(end.failed for end in failures)))
    bad = set().union(*(set(end.failed).difference(end.unreadable) for end in failures))
    unreadable = [index for index in failed if index not in bad]
    return TransferEnd(first.transfer_id, first.generation, failed, first.error, unreadable)
