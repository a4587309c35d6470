# SPDX-License-Identifier: Apache-2.0
"""A connector that has the blocks that a test gives it, and records its calls."""

from __future__ import annotations

from collections.abc import Sequence

from pagoda.kv.block_pool import Block
from pagoda.kv.connector import CachedBlock, PrefixRequest
from pagoda.kv.transfers import TransferLedger
from pagoda.messages.load import TierLoad
from pagoda.messages.transfers import DeviceBlocks, TierBlocks, TransferEnd
from pagoda.messages.worker import WorkerReady


class ScriptedTier:
    def __init__(self, name: str, ledger: TransferLedger) -> None:
        self.tier = name
        self.has_own_timeout = False
        self.is_cache = True
        self.storey = None
        self.has: set[bytes] = set()
        self.is_unsure = False
        """The tier does not know yet if it has other blocks."""
        self.changed: set[str] = set()
        """Requests that `poll` names next."""
        self.stores = True
        self.calls: list[tuple[object, ...]] = []
        self.offered: list[bytes] = []
        self._ledger = ledger

    def on_queued(self, prefix: PrefixRequest, start: int) -> None:
        self.calls.append(("announce", prefix.request_id, start))

    def lookup(self, prefix: PrefixRequest, start: int) -> int | None:
        for index in range(start, len(prefix.keys)):
            if prefix.keys[index] not in self.has:
                return None if self.is_unsure else index - start
        return max(0, len(prefix.keys) - start)

    def prefetch(self, prefix: PrefixRequest, start: int) -> None:
        self.calls.append(("prefetch", prefix.request_id, start))

    def load(
        self, prefix: PrefixRequest, start: int, blocks: Sequence[Block], after_step: int
    ) -> int:
        keys = list(prefix.keys[start : start + len(blocks)])
        target = DeviceBlocks([block.block_id for block in blocks])
        return self._ledger.open(
            self._ended, TierBlocks("disk", keys), target, blocks, after_step=after_step
        )

    def save(self, cached_blocks: Sequence[CachedBlock]) -> int:
        count = (
            min(len(cached_blocks), self._ledger.room_for(cached_blocks))
            if self.stores
            else len(cached_blocks)
        )
        done = cached_blocks[:count]
        self.offered += [cached.key for cached in done]
        if self.stores and done:
            blocks = [cached.block for cached in done]
            source = DeviceBlocks([block.block_id for block in blocks])
            target, likely = TierBlocks("disk", [it.key for it in done]), not done[0].is_needed
            self._ledger.open(self._ended, source, target, blocks, likely=likely)
        return count

    def _ended(self, end: TransferEnd | None) -> None:
        self.calls.append(("lost",) if end is None else ("ended", end.transfer_id, end.failed))

    def on_dequeued(self, request_id: str) -> None:
        self.calls.append(("forget", request_id))

    def workers_ready(self, ready: WorkerReady) -> None:
        self.calls.append(("ready", ready.kv_host_slots))

    def workers_lost(self) -> None:
        self.calls.append(("workers lost",))

    def poll(self) -> set[str]:
        changed, self.changed = self.changed, set()
        return changed

    def pollables(self) -> list[object]:
        return [self.tier]

    def load_report(self) -> TierLoad:
        return TierLoad(name=self.tier, num_blocks=len(self.has), num_total_blocks=99)

    def close(self) -> None:
        self.calls.append(("close",))
