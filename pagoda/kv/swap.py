# SPDX-License-Identifier: Apache-2.0
"""Swap: the blocks of preempted requests go to the nearest tier, because they are needed again.

The blocks of a request that is preempted stay cached on the device until others need their room, the end of its
prefix first. Meanwhile they are copied, as many at a time as running requests can do without; a copied block is
evicted before those that are not. The beginning of the prefix is held first, since nothing behind a gap is of use,
and of what is held the end is copied first, since it is evicted first. Once the request is admitted again, what is
not copied yet need not be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pagoda.ipc.clock import Clock
from pagoda.kv.block_pool import BlockPool
from pagoda.kv.connector import CachedBlock, KVConnector
from pagoda.kv.rates import DEVICE, TransferRates
from pagoda.kv.transfers import TransferLedger

_BATCH = 8
"""Blocks of a transfer: they can be evicted when all of them are copied."""


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
        self._needed: dict[str, dict[bytes, CachedBlock]] = {}
        """Blocks that are worth a copy, by request and key."""
        self._pending: dict[str, deque[CachedBlock]] = {}
        """Those of them that have not been offered to the nearest tier, beginning of the prefix first."""

    def preempted(
        self, request_id: str, blocks: Sequence[CachedBlock], recomputing_s: float
    ) -> None:
        """The request will need these blocks again, or so many seconds to compute them; 0 if that is not known."""
        if blocks and self._pays(len(blocks), recomputing_s):
            self._needed[request_id] = {it.key: it for it in blocks}
            self._pending[request_id] = deque(blocks)

    def _pays(self, count: int, recomputing_s: float) -> bool:
        """True if the nearest tier stores and loads so many blocks, behind what is queued there, in less time."""
        if not self._tiers:
            return False
        name, now, rates = self._tiers[0].tier, self._clock.now(), self._rates
        copying_s = rates.seconds(DEVICE, name, count, now) + rates.seconds(
            name, DEVICE, count, now
        )
        if not recomputing_s or copying_s < recomputing_s:
            return True
        rates.doubt(DEVICE, name)
        rates.doubt(name, DEVICE)
        return False

    def dequeued(self, request_id: str) -> None:
        """The request holds what it could of these blocks, or has ended."""
        self._needed.pop(request_id, None)
        self._pending.pop(request_id, None)

    def find(self, key: bytes) -> CachedBlock | None:
        """The block of a key that a request will need again."""
        return next((it[key] for it in self._needed.values() if key in it), None)

    def copy(self, spare: int) -> None:
        """Begins copies of at most `spare` blocks, which nobody else can have until they have ended."""
        for request_id, pending in list(self._pending.items()):
            room = min(spare, self._ledger.needed_room)
            if room <= 0:
                return
            held: list[CachedBlock] = []
            while pending and len(held) < room:
                cached = pending.popleft()
                if self._pool.find(cached.key) is cached.block:
                    held.append(cached)
            if not pending:
                del self._pending[request_id]
            spare -= len(held)
            for start in reversed(range(0, len(held), _BATCH)):
                self._tiers[0].save(held[start : start + _BATCH])

    def clear(self) -> None:
        """The workers are lost, and what their memory held."""
        self._needed.clear()
        self._pending.clear()
