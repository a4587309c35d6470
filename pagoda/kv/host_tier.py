"""Blocks in host memory: which of them lies in which slot of the workers' arenas.

Slots are managed as device blocks are, by a `BlockPool`: those in use by a transfer are referenced, the others
are evicted in the order in which requests last passed through them. Workers take the arena with them when they are
lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pagoda.kv.block_pool import Block, BlockPool
from pagoda.kv.connector import CachedBlock, PrefixRequest
from pagoda.kv.events import KVEventRecorder, Medium
from pagoda.kv.transfers import TransferLedger
from pagoda.messages.load import TierLoad
from pagoda.messages.transfers import DeviceBlocks, HostSlots, Transfer, TransferEnd
from pagoda.messages.worker import WorkerReady

_PREFETCH_SHARE = 4
"""At most this part of the slots is waiting for a slower tier to fill it."""
_PREFETCH_BYTES = 2**30
"""And at most so much of one rank's memory, about a second of reading: whoever gets room meanwhile and wants the
last of it waits for all of it."""


class _Copy(NamedTuple):
    """Slots that a transfer reads or writes."""

    slots: list[Block]
    cached_blocks: Sequence[CachedBlock]
    """What is stored in them; empty for a load."""


class _Landing(NamedTuple):
    """A slot into which a slower tier brings a block."""

    slot: Block
    parent: bytes | None
    token_ids: Sequence[int]


class HostTier:
    """The engine's half of the arenas; every rank has the same slots."""

    tier = "host"
    has_own_timeout = False
    is_cache = True

    def __init__(
        self,
        num_slots: int,
        block_size: int,
        ledger: TransferLedger,
        events: KVEventRecorder | None = None,
    ) -> None:
        self._block_size = block_size
        self._ledger = ledger
        self._events = events
        self._slots = BlockPool(num_slots, events, Medium.HOST)
        self._most_landing = max(1, num_slots // _PREFETCH_SHARE)
        self._copies: dict[int, _Copy] = {}
        """By transfer."""
        self._landing: dict[bytes, _Landing] = {}
        """By key."""
        self._storing: set[bytes] = set()
        self._has_news = False
        self._num_loaded = 0
        self._num_failed = 0

    @property
    def pool(self) -> BlockPool:
        """Its slots, by the keys of the blocks that they hold."""
        return self._slots

    # ---- what requests find

    def on_queued(self, prefix: PrefixRequest, start: int) -> None:
        """What is here is known at any time."""

    def lookup(self, prefix: PrefixRequest, start: int) -> int | None:
        """None where the next block is on its way from a slower tier: it will soon be nearer than it is there."""
        for index in range(start, len(prefix.keys)):
            key = prefix.keys[index]
            if self._slots.find(key) is None:
                return None if key in self._landing else index - start
        return max(0, len(prefix.keys) - start)

    def prefetch(self, prefix: PrefixRequest, start: int) -> None:
        """There is nothing nearer to bring blocks to."""

    def load(
        self, prefix: PrefixRequest, start: int, blocks: Sequence[Block], after_step: int
    ) -> int:
        found = [self._slots.find(key) for key in prefix.keys[start : start + len(blocks)]]
        slots = [slot for slot in found if slot is not None]
        if len(slots) != len(blocks):
            raise ValueError(f"{len(blocks)} blocks are wanted, {len(slots)} are here.")
        source = HostSlots([slot.block_id for slot in slots])
        target = DeviceBlocks([block.block_id for block in blocks])
        self._slots.share(slots)
        transfer = self._ledger.open(self, source, target, blocks, after_step=after_step)
        self._copies[transfer] = _Copy(slots, ())
        return transfer

    def loaded(self, keys: Sequence[bytes], failed: Sequence[int]) -> None:
        self._num_loaded += len(keys) - len(failed)
        self._num_failed += len(failed)
        for index in failed:
            self._slots.discard(keys[index])

    def on_dequeued(self, request_id: str) -> None:
        """Nothing is remembered of requests."""

    # ---- what is kept

    def save(self, cached_blocks: Sequence[CachedBlock]) -> int:
        room = self._ledger.store_room
        known: list[Block] = []
        wanted: dict[bytes, CachedBlock] = {}
        num_done = 0
        for cached in cached_blocks:
            slot = self._slots.find(cached.key)
            if slot is not None:
                known.append(slot)
            elif not (
                cached.key in wanted or cached.key in self._storing or cached.key in self._landing
            ):
                if len(wanted) == room:
                    break
                wanted[cached.key] = cached
            num_done += 1
        self._slots.share(
            known
        )  # what a request passes through is evicted last, ends of prefixes first
        self._store(list(wanted.values())[: self._slots.num_available])
        self._slots.release(known)
        return num_done

    def _store(self, cached_blocks: Sequence[CachedBlock]) -> None:
        if not cached_blocks:
            return
        slots = self._slots.allocate(len(cached_blocks))
        blocks = [cached.block for cached in cached_blocks]
        source = DeviceBlocks([block.block_id for block in blocks])
        target = HostSlots([slot.block_id for slot in slots])
        self._storing.update(cached.key for cached in cached_blocks)
        self._copies[self._ledger.open(self, source, target, blocks)] = _Copy(slots, cached_blocks)

    def transfer_ended(self, transfer: Transfer, end: TransferEnd) -> None:
        copy = self._copies.pop(transfer.transfer_id)
        failed = set(end.failed)
        for index, (slot, cached) in enumerate(zip(copy.slots, copy.cached_blocks, strict=False)):
            self._storing.discard(cached.key)
            if index in failed:
                self._num_failed += 1
            else:
                self._publish(slot, cached.key, cached.parent, cached.token_ids)
        self._slots.release(copy.slots)

    def transfer_lost(self, transfer: Transfer) -> None:
        """Its slots are free again; `workers_lost` forgets what they hold."""
        copy = self._copies.pop(transfer.transfer_id)
        self._slots.release(copy.slots)

    def _publish(
        self, slot: Block, key: bytes, parent: bytes | None, token_ids: Sequence[int]
    ) -> None:
        if self._slots.publish(slot, key) and self._events is not None:
            self._events.store(key, parent, token_ids, Medium.HOST)

    # ---- what a slower tier brings

    def reserve(self, prefix: PrefixRequest, index: int) -> int | None:
        key = prefix.keys[index]
        is_known = self._slots.find(key) is not None or key in self._landing
        if is_known or key in self._storing or len(self._landing) >= self._most_landing:
            return None
        if not self._slots.num_available:
            return None
        (slot,) = self._slots.allocate(1)
        parent = prefix.keys[index - 1] if index else None
        start = index * self._block_size
        token_ids = prefix.token_ids[start : start + self._block_size]
        self._landing[key] = _Landing(slot, parent, token_ids)
        return slot.block_id

    def settle(self, key: bytes, *, is_good: bool) -> None:
        landing = self._landing.pop(key)
        if is_good:
            self._publish(landing.slot, key, landing.parent, landing.token_ids)
        else:
            self._num_failed += 1
        self._slots.release([landing.slot])
        self._has_news = True

    # ---- the workers, and the engine's loop

    def workers_ready(self, ready: WorkerReady) -> None:
        """
        Raises:
            RuntimeError: the arenas are smaller than those of the workers before.
        """
        if ready.kv_host_slots < self._slots.num_blocks:
            raise RuntimeError(
                f"The arenas in host memory have {ready.kv_host_slots} slots, "
                f"those before had {self._slots.num_blocks}."
            )
        each = max((directory.object_bytes for directory in ready.kv_directories), default=1)
        most = min(self._slots.num_blocks // _PREFETCH_SHARE, _PREFETCH_BYTES // each)
        self._most_landing = max(1, most)

    def workers_lost(self) -> None:
        self._slots.release([landing.slot for landing in self._landing.values()])
        self._landing.clear()
        self._storing.clear()
        self._slots.clear_cache()

    def poll(self) -> bool:
        has_news, self._has_news = self._has_news, False
        return has_news

    def pollables(self) -> list[object]:
        return []

    def load_report(self) -> TierLoad:
        return TierLoad(
            name=self.tier,
            num_blocks=self._slots.num_cached,
            num_total_blocks=self._slots.num_blocks,
            num_stored=self._slots.num_stored,
            num_removed=self._slots.num_removed,
            num_loaded=self._num_loaded,
            num_failed=self._num_failed,
        )

    def close(self) -> None:
        """The arenas are the workers'."""
