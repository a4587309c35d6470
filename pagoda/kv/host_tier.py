# SPDX-License-Identifier: Apache-2.0
"""The tier in host memory: which blocks lie in which slots of the workers' arenas.

A `BlockPool` manages slots like device blocks: transfers reference the slots that they use, and the others are
evicted in the order in which requests last passed through them. Arenas are lost with their workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple

from pagoda.kv.block_pool import Block, BlockPool
from pagoda.kv.connector import CachedBlock, PrefixRequest, by_rank
from pagoda.kv.events import CacheRecorder, Medium
from pagoda.kv.storeys import Hold
from pagoda.kv.transfers import OnEnd, TransferLedger
from pagoda.messages.load import TierLoad
from pagoda.messages.transfers import DeviceBlocks, HostSlots, TransferEnd
from pagoda.messages.worker import WorkerReady

_PREFETCH_SHARE = 4
"""Slower tiers reserve at most 1 / this of the slots."""
_PREFETCH_BYTES = 2**30
"""Limit of the reserved bytes of one rank, about a second of reading: a request for which there is room meanwhile
waits until the last of its blocks is here."""


_SINKING_SHARE = 8
"""Slots that the tier below is writing are at most 1 / this of all."""
_MAX_SPARED = 32
"""Slots that are looked at for each one that is to be evicted."""


class Lower(NamedTuple):
    """The tier below, which takes slots that are about to be evicted."""

    wants: Callable[[bytes], bool]
    """True if the tier lacks a block and could write it."""
    store_slots: Callable[[Sequence[CachedBlock]], int]
    """Begins to write blocks that lie in slots; returns how many, the leading ones. `sunk` follows."""


@dataclass(eq=False)
class _Reservation:
    """A slot into which a slower tier copies a block."""

    slot: Block
    parent: bytes | None
    token_ids: Sequence[int]
    group: int
    waiters: set[str]
    """Requests to look up again when the copy has ended."""


class HostTier:
    """The engine's half of the arenas. Ranks that hold other blocks than each other have slots of their own,
    numbered as the device's blocks are; all others have the same."""

    tier = "host"
    has_own_timeout = False
    is_cache = True

    def __init__(
        self,
        num_slots: int,
        block_size: int,
        ledger: TransferLedger,
        recorder: CacheRecorder | None = None,
        *,
        num_ranks: int = 1,
        own_keys: bool = False,
    ) -> None:
        """`num_ranks` and `own_keys` are those of the device's pool."""
        self.pool = BlockPool(num_slots, recorder, Medium.HOST, num_ranks, own_keys=own_keys)
        """The slots, by the keys of the blocks that they hold."""
        self._block_size = block_size
        self._ledger = ledger
        self._max_reserved = max(1, self.pool.of_rank // _PREFETCH_SHARE)
        """Slots of a rank."""
        self._reserved: dict[tuple[int, bytes], _Reservation] = {}
        """Reservations by `BlockPool.place`, as what is being stored."""
        self._num_reserved = [0] * num_ranks
        self._refused: set[str] = set()
        """Requests that got no reservation since the last one ended."""
        self._storing: set[tuple[int, bytes]] = set()
        self.lower: Lower | None = None
        self.find_needed: Callable[[bytes], CachedBlock | None] = lambda _: None
        """Finds a block that a preempted request needs again, and that is worth a place below."""
        self._num_sinking = [0] * num_ranks
        """Slots of each rank that the tier below is writing."""
        self.holds: Counter[int] = Counter()
        """Holds by slot; never zero."""
        self._changed: set[str] = set()
        self._num_loaded = 0
        self._num_failed = 0

    # ---- what requests find

    def on_queued(self, prefix: PrefixRequest, start: int) -> None:
        """The tier knows its blocks at any time."""

    def on_dequeued(self, request_id: str) -> None: ...

    def lookup(self, prefix: PrefixRequest, start: int) -> int | None:
        """None if a slower tier is copying the next block here: loading it from here will be faster."""
        for index in range(start, len(prefix.keys)):
            key, rank = prefix.keys[index], prefix.ranks.of(index)
            slot = self.pool.find(key, rank)
            if slot is None or slot.rank != rank:
                reserved = self._reserved.get(self.pool.place(key, rank))
                if reserved is None:
                    return index - start
                reserved.waiters.add(prefix.request_id)
                return None
        return max(0, len(prefix.keys) - start)

    def prefetch(self, prefix: PrefixRequest, start: int) -> None:
        """No tier is nearer."""

    def load(
        self, prefix: PrefixRequest, start: int, blocks: Sequence[Block], after_step: int
    ) -> int:
        keys = prefix.keys[start : start + len(blocks)]
        found = (self.pool.find(key, it.rank) for key, it in zip(keys, blocks, strict=True))
        slots = [slot for slot in found if slot is not None]
        if len(slots) != len(blocks):
            raise ValueError(f"{len(blocks)} blocks are wanted, {len(slots)} are here.")
        source = HostSlots([slot.block_id for slot in slots])
        target = DeviceBlocks([block.block_id for block in blocks])
        self.pool.share(slots)
        on_end = partial(self._load_ended, slots, keys)
        return self._ledger.open(on_end, source, target, blocks, after_step=after_step)

    def _load_ended(
        self, slots: Sequence[Block], keys: Sequence[bytes], end: TransferEnd | None
    ) -> None:
        if end is not None:
            self._num_loaded += len(keys) - len(end.failed)
            self._num_failed += len(end.failed)
            for index in end.failed:
                self.pool.discard(keys[index])
        self.pool.release(slots)

    # ---- what is kept

    def save(self, cached_blocks: Sequence[CachedBlock]) -> int:
        room = self._ledger.room_for(cached_blocks)
        known: list[Block] = []
        wanted: dict[bytes, CachedBlock] = {}
        num_done = 0
        for cached in cached_blocks:
            key, rank = cached.key, cached.block.rank
            slot, place = self._kept(key, rank), self.pool.place(key, rank)
            if slot is not None:
                known.append(slot)
            elif not (key in wanted or place in self._storing or place in self._reserved):
                if len(wanted) == room:
                    break
                wanted[key] = cached
            num_done += 1
        # Sharing and releasing moves the slots to the end of the order of eviction, ends of prefixes first.
        self.pool.share(known)
        for saved in by_rank(wanted.values()):
            self._store(saved, saved[0].block.rank)
        self.pool.release(known)
        return num_done

    def _kept(self, key: bytes, rank: int) -> Block | None:
        """The slot of a block that need not come to a rank again: one there, or one that is in use elsewhere.

        Another one gives way to it (`BlockPool.publish`), as prefixes of today find it in vain."""
        slot = self.pool.find(key, rank)
        return slot if slot is not None and (slot.rank == rank or slot.ref_count) else None

    def _store(self, saved: Sequence[CachedBlock], rank: int) -> None:
        """Begins to copy as many blocks of a rank to its slots as there is room for."""
        saved = saved[: self.pool.available[rank]]
        num_others = self._sink(len(saved), rank) if saved else 0
        if not (saved and saved[0].is_needed):
            saved = saved[:num_others]
        if not saved:
            return
        slots = self.pool.allocate(len(saved), rank)
        on_end = partial(self._store_ended, slots, saved)
        self._copy_down(saved, slots, on_end, likely=not saved[0].is_needed)

    def _copy_down(
        self, saved: Sequence[CachedBlock], slots: Sequence[Block], on_end: OnEnd, *, likely: bool
    ) -> None:
        """Begins to copy blocks from the device to slots."""
        blocks = [cached.block for cached in saved]
        source = DeviceBlocks([block.block_id for block in blocks])
        target = HostSlots([slot.block_id for slot in slots])
        self._storing.update(map(self._place, saved))
        self._ledger.open(on_end, source, target, blocks, likely=likely)

    def _place(self, cached: CachedBlock) -> tuple[int, bytes]:
        return self.pool.place(cached.key, cached.block.rank)

    def _store_ended(
        self, slots: Sequence[Block], saved: Sequence[CachedBlock], end: TransferEnd | None
    ) -> None:
        self._storing.difference_update(map(self._place, saved))
        if end is not None:
            self._num_failed += len(end.failed)
            failed = set(end.failed)
            for index, cached in enumerate(saved):
                if index not in failed:
                    parent, tokens = cached.parent, cached.token_ids
                    self.pool.publish(slots[index], cached.key, parent, tokens, cached.group)
        self.pool.release(slots)

    # ---- segments of running requests, which steps of a rank with all blocks read here (`Storey`)

    trouble = ""
    is_back_soon = False
    next_event_at: float | None = None

    @property
    def storey(self) -> HostTier:
        return self

    @property
    def num_held(self) -> int:
        return len(self.holds)

    @property
    def num_holdable(self) -> int:
        return self.pool.num_blocks

    def has(self, key: bytes) -> bool:
        return self.pool.find(key) is not None

    def is_held(self, key: bytes) -> bool:
        slot = self.pool.find(key)
        return slot is not None and slot.block_id in self.holds

    def hold_found(self, keys: Sequence[bytes]) -> Hold:
        slots = [slot for key in keys if (slot := self.pool.find(key)) is not None]
        if len(slots) != len(keys):
            raise ValueError(f"{len(keys)} blocks are to be held, {len(slots)} are here.")
        self.pool.share(slots)
        return self._hold(slots, is_there=True)

    def hold(self, blocks: Sequence[CachedBlock]) -> Hold | None:
        found = [self.pool.find(cached.key) for cached in blocks]
        lacking = [it for it, slot in zip(blocks, found, strict=True) if slot is None]
        places = [self._place(it) for it in lacking]
        if any(place in self._storing or place in self._reserved for place in places):
            return None
        known = [slot for slot in found if slot is not None]
        self.pool.share(known)
        if lacking:
            self._sink(len(lacking), 0)
        if len(lacking) > self.pool.num_available:
            self.pool.release(known)
            return None
        new = self.pool.allocate(len(lacking))
        rest = iter(new)
        slots = [next(rest) if slot is None else slot for slot in found]
        hold = self._hold(slots, is_there=not lacking)
        if lacking:
            self.pool.share(new)  # for the copy, which ends by itself
            on_end = partial(self._hold_copied, hold, new, lacking)
            self._copy_down(lacking, new, on_end, likely=True)
        return hold

    def _hold(self, slots: Sequence[Block], *, is_there: bool) -> Hold:
        ids = [slot.block_id for slot in slots]
        self.holds.update(ids)

        def release() -> None:
            for slot_id in ids:
                self.holds[slot_id] -= 1
                if not self.holds[slot_id]:
                    del self.holds[slot_id]
            self.pool.release(slots)

        return Hold(HostSlots(ids), release, is_there=is_there)

    def _hold_copied(
        self,
        hold: Hold,
        slots: Sequence[Block],
        saved: Sequence[CachedBlock],
        end: TransferEnd | None,
    ) -> None:
        self._store_ended(slots, saved, end)
        hold.is_there = end is not None and not end.failed
        if not hold.is_there:
            hold.error = "the workers are lost" if end is None else end.error

    def lose(self, keys: Sequence[bytes], *, hangs: bool) -> None:
        """Host memory loses nothing."""

    # ---- what goes down to the tier below

    def _sink(self, count: int, rank: int) -> int:
        """Prepares for the eviction of `count` blocks of a rank: what is needed again is written below first, or
        stays while the tier below is busy, and others go before it. Returns how many of these there are, at most
        `count`."""
        pool, lower = self.pool, self.lower
        if lower is None:
            return count
        num_available = pool.available[rank]
        num_others = num_available - pool.evictable[rank]
        room = pool.of_rank // _SINKING_SHARE - self._num_sinking[rank]
        needed: list[CachedBlock] = []
        for slot in islice(pool.in_order_of_eviction(rank), _MAX_SPARED * count):
            if num_others >= count:
                break
            cached = None if slot.key is None else self.find_needed(slot.key)
            if cached is not None and lower.wants(cached.key):
                needed.append(cached._replace(block=slot))
            else:
                num_others += 1
        sinking = needed[: max(0, min(room, num_available - count))]
        num_sinking = lower.store_slots(sinking) if sinking else 0
        slots = [cached.block for cached in needed]
        pool.share(slots)
        pool.release(slots[num_sinking:][::-1])
        self._num_sinking[rank] += num_sinking
        return min(num_others, count)

    def sunk(self, slots: Sequence[Block], *, is_good: bool) -> None:
        """The tier below has written slots of a rank, which are evicted before others, or has failed."""
        self._num_sinking[slots[0].rank] -= len(slots)
        self.pool.release(slots, likely=not is_good)

    # ---- what a slower tier copies here before it is loaded

    def room_behind(self, prefix: PrefixRequest, index: int) -> int:
        """Blocks from `prefix.keys[index]` on that find a place without taking that of one right before them.

        What they would put out is wanted before them, and would come back and put them out in turn."""
        keys, ranks = prefix.keys, prefix.ranks
        room = list(self.pool.available)
        for own in reversed(range(index)):
            slot = self.pool.find(keys[own], ranks.of(own))
            if slot is None:
                break
            room[slot.rank] -= 1
        end = index
        while end < len(keys) and room[ranks.of(end)] > 0:
            room[ranks.of(end)] -= 1
            end += 1
        if end < len(keys):
            self._refused.add(prefix.request_id)
        return end - index

    def reserve(self, prefix: PrefixRequest, index: int) -> int | None:
        """Returns a slot for the block of `prefix.keys[index]`, on the rank where it is to lie.

        None if the block is here or on its way, or if there is no room. The caller opens the transfer into the
        slot and calls `settle` when that has ended, unless the workers are lost before.
        """
        key, rank = prefix.keys[index], prefix.ranks.of(index)
        place = self.pool.place(key, rank)
        if self._kept(key, rank) is not None or place in self._reserved or place in self._storing:
            return None
        is_full = self._num_reserved[rank] >= self._max_reserved or not self.pool.available[rank]
        if is_full or not self._sink(1, rank):
            self._refused.add(prefix.request_id)
            return None
        (slot,) = self.pool.allocate(1, rank)
        parent = prefix.keys[index - 1] if index else None
        size = self._block_size * prefix.ratio
        token_ids = prefix.token_ids[index * size : (index + 1) * size]
        self._num_reserved[rank] += 1
        self._reserved[place] = _Reservation(
            slot, parent, token_ids, prefix.group, {prefix.request_id}
        )
        return slot.block_id

    def settle(self, key: bytes, rank: int = 0, *, is_good: bool) -> None:
        """The transfer into the slot of a rank that was reserved for `key` has ended."""
        reserved = self._reserved.pop(self.pool.place(key, rank))
        self._num_reserved[rank] -= 1
        if is_good:
            self.pool.publish(
                reserved.slot, key, reserved.parent, reserved.token_ids, reserved.group
            )
        else:
            self._num_failed += 1
        self.pool.release([reserved.slot])
        self._changed |= reserved.waiters | self._refused
        self._refused.clear()

    # ---- the workers, and the engine's loop

    def workers_ready(self, ready: WorkerReady) -> None:
        """Raises RuntimeError if the arenas are smaller than those of the workers before; or larger, of several
        ranks, whose slots are numbered over all of them."""
        num_slots, before = ready.kv_host_slots, self.pool.num_blocks
        if num_slots < before or (self.pool.num_ranks > 1 and num_slots != before):
            raise RuntimeError(
                f"The arenas in host memory have {num_slots} slots, those before had {before}."
            )
        each = max((place.block_bytes for place in ready.kv_places), default=1)
        most = min(self.pool.of_rank // _PREFETCH_SHARE, _PREFETCH_BYTES // each)
        self._max_reserved = max(1, most)

    def workers_lost(self) -> None:
        self.pool.release([reserved.slot for reserved in self._reserved.values()])
        self._reserved.clear()
        self._num_reserved = [0] * self.pool.num_ranks
        self.pool.clear_cache()

    def poll(self) -> Collection[str]:
        changed, self._changed = self._changed, set()
        return changed

    def pollables(self) -> list[object]:
        return []

    def load_report(self) -> TierLoad:
        return TierLoad(
            name=self.tier,
            num_blocks=self.pool.num_cached,
            num_total_blocks=self.pool.num_blocks,
            num_stored=self.pool.num_stored,
            num_removed=self.pool.num_removed,
            num_loaded=self._num_loaded,
            num_failed=self._num_failed,
        )

    def close(self) -> None: ...
