# SPDX-License-Identifier: Apache-2.0
"""Swap: the blocks of preempted requests go to the nearest tier, because they are needed again.

The blocks of a request that is preempted stay cached on the device until others need their room, the end of its
prefix first. Before that they are copied, as many at a time as running requests can do without; a copied block is
evicted before those that are not. The beginning of the prefix is held first, since nothing behind a gap is of use,
and of what is held the end is copied first, since it is evicted first. Once the request is admitted again, what is
not copied yet need not be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import add, sub

from pagoda.ipc.clock import Clock
from pagoda.kv.block_pool import BlockPool
from pagoda.kv.connector import CachedBlock, KVConnector
from pagoda.kv.rates import DEVICE, TransferRates
from pagoda.kv.transfers import TransferLedger

_BATCH = 8
"""Blocks of a transfer: they can be evicted when all of them are copied."""

_STOCK_SHARE = 8
"""Copies begin when less than this part of the device's blocks, besides those wanted soon, go before them."""


@dataclass(eq=False)
class _Pending:
    """Blocks that have not been offered to the nearest tier, beginning of the prefix first."""

    blocks: deque[CachedBlock]
    ranks: frozenset[int]
    """Ranks of these blocks, until copies of them begin."""
    evicted_from: list[int]
    """Number of evictions from each rank since the start at which these blocks are its oldest cached ones."""
    is_due: bool = False


class Swap:
    """Blocks of requests that were preempted and have not been admitted since."""

    def __init__(
        self,
        connectors: Sequence[KVConnector],
        pool: BlockPool,
        ledger: TransferLedger,
        rates: TransferRates,
        clock: Clock,
    ) -> None:
        self._tiers = [connector for connector in connectors if connector.is_cache]
        self._pool = pool
        self._ledger = ledger
        self._rates = rates
        self._clock = clock
        self._sinking: dict[bytes, tuple[str, CachedBlock]] = {}
        """Blocks that are worth a place in the second tier, too, by key, with the last request that needs each."""
        self._keys: dict[str, list[bytes]] = {}
        """Keys of these by request."""
        self._pending: dict[str, _Pending] = {}

    @property
    def has_pending(self) -> bool:
        """True if a request has blocks that have not been offered to a tier."""
        return bool(self._pending)

    def preempted(
        self, request_id: str, blocks: Sequence[CachedBlock], recomputing_s: float
    ) -> None:
        """The request will need these blocks again, or so many seconds to compute them; 0 if that is not known.

        It holds them still."""
        names = [DEVICE, *(tier.tier for tier in self._tiers[:2])]
        num_paid = 0
        for upper, lower in pairwise(names if blocks else ()):
            if not self._pays(upper, lower, len(blocks), recomputing_s):
                break
            num_paid += 1
        if num_paid > 1:
            self._sinking.update((it.key, (request_id, it)) for it in blocks)
            self._keys[request_id] = [it.key for it in blocks]
        if num_paid:
            pool = self._pool
            evicted_from = list(map(add, pool.removed, pool.evictable))
            ranks = frozenset(it.block.rank for it in blocks)
            self._pending[request_id] = _Pending(deque(blocks), ranks, evicted_from)

    def _pays(self, upper: str, lower: str, count: int, recomputing_s: float) -> bool:
        """True if so many blocks go down and up again, behind what is queued there, in less time."""
        rates, now = self._rates, self._clock.now()
        copying_s = rates.seconds(upper, lower, count, now) + rates.seconds(
            lower, upper, count, now
        )
        if not recomputing_s or copying_s < recomputing_s:
            return True
        rates.doubt(upper, lower)
        rates.doubt(lower, upper)
        return False

    def dequeued(self, request_id: str) -> None:
        """The request holds what it could of these blocks, or has ended."""
        for key in self._keys.pop(request_id, ()):
            if key in self._sinking and self._sinking[key][0] == request_id:
                del self._sinking[key]
        self._pending.pop(request_id, None)

    def find(self, key: bytes) -> CachedBlock | None:
        """The block of a key that is worth a place in the second tier."""
        found = self._sinking.get(key)
        return None if found is None else found[1]

    def copy(self, wanted: Sequence[int]) -> None:
        """Begins copies of blocks that may be evicted soon. All available ones may be held by copies, but so many
        of each rank that running requests want soon."""
        pool = self._pool
        for request_id, pending in list(self._pending.items()):
            pending.is_due = pending.is_due or self._is_due(pending, wanted)
            if not pending.is_due:
                continue
            # Of all ranks together: a tier counts its stores so, and would leave the beginning over, saved last.
            most = self._ledger.needed_room
            room = list(map(sub, pool.available, wanted))
            held: list[CachedBlock] = []
            while pending.blocks and len(held) < most:
                rank = pending.blocks[0].block.rank
                if room[rank] <= 0:
                    break
                cached = pending.blocks.popleft()
                if pool.find(cached.key, rank) is cached.block:
                    held.append(cached)
                    room[rank] -= 1
            if not pending.blocks:
                del self._pending[request_id]
            for start in reversed(range(0, len(held), _BATCH)):
                self._tiers[0].save(held[start : start + _BATCH])

    def _is_due(self, pending: _Pending, wanted: Sequence[int]) -> bool:
        """True if few blocks of a rank of theirs go before these."""
        pool = self._pool
        for rank in pending.ranks:
            num_free = pool.available[rank] - pool.evictable[rank]
            num_before = pending.evicted_from[rank] - pool.removed[rank] + num_free
            if num_before < wanted[rank] + pool.of_rank // _STOCK_SHARE:
                return True
        return False

    def clear(self) -> None:
        """The workers are lost, and what their memory held."""
        self._sinking.clear()
        self._keys.clear()
        self._pending.clear()
