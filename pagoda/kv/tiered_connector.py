# SPDX-License-Identifier: Apache-2.0
"""All KV connectors of an engine behind one interface, nearest first, as the scheduler uses them.

A prefix is looked up in one connector after the other, as far as any of them goes on. Each part that one
connector has becomes one transfer of the request's load. A load ends when all its transfers have ended, and its
leading blocks that came count. Two loads never bring the same block: a request whose next block is being loaded
waits for that load.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec

from pagoda.ipc.clock import Clock
from pagoda.kv.block_pool import Block, BlockPool
from pagoda.kv.connector import CachedBlock, KVConnector, PrefixRequest
from pagoda.kv.group_lookup import GroupLookup, PendingLookup, Segment, other_blocks
from pagoda.kv.layout import KVLayout
from pagoda.kv.post import TierPost
from pagoda.kv.rates import DEVICE, TransferRates
from pagoda.kv.swap import Swap
from pagoda.kv.transfers import TransferLedger
from pagoda.messages.load import TierLoad
from pagoda.messages.transfers import Transfer, TransferEnd
from pagoda.messages.worker import WorkerReady

_UNWEIGHED_S = 0.05
"""Loads that take no longer than this are begun anyway: a few turns of busy loops are not told apart."""
LOAD_TIMEOUT_S = 10.0
"""Seconds that a request waits for a lookup, or for its blocks, before it goes on without them."""


class LoadEnd(NamedTuple):
    """The end of a request's wait for KV."""

    request_id: str
    num_loaded: int
    failure: str | None = None
    """Sentence that says why the request fails; None if it goes on and computes what is missing."""


class TierMatch(NamedTuple):
    """Blocks that can be loaded, so that a prefix of `end` blocks is usable, of which the device has `start`."""

    prefix: PrefixRequest
    start: int
    end: int
    segments: Sequence[Segment]
    """Groups in their order, and the blocks of each in order; what is not in them is on the device."""

    @property
    def num_blocks(self) -> int:
        """Blocks that are to be loaded, in all groups."""
        return sum(segment.end - segment.start for segment in self.segments)

    @property
    def targets(self) -> list[tuple[int, int]]:
        """Groups and indices of these blocks."""
        return [(it.group, index) for it in self.segments for index in range(it.start, it.end)]

    def cut(self, count: int) -> TierMatch:
        """The match of the first segments alone, of a layout that is a chain; nothing is left of none."""
        segments = self.segments[:count]
        return self._replace(end=segments[-1].end if segments else self.start, segments=segments)

    @property
    def num_cached(self) -> int:
        """Leading blocks behind `start` that were cached before, rather than computed for this request."""
        if all(segment.connector.is_cache for segment in self.segments):
            return self.end - self.start
        cached = [it.end for it in self.segments if it.connector.is_cache and it.group == 0]
        return cached[-1] - self.start if cached else 0


@dataclass(eq=False)
class _LoadPart:
    """One transfer of a load."""

    load: _Load
    connector: KVConnector
    first: int
    """Index in the load of its first block."""
    is_overdue: bool = False
    """The load timed out while this transfer was under way."""


@dataclass(eq=False)
class _Load:
    request_id: str
    keys: list[bytes]
    num_good: int
    """Leading blocks that have not failed."""
    error: str | None = None
    parts: set[_LoadPart] = field(default_factory=set)
    """Transfers that have not ended."""
    waiters: set[str] = field(default_factory=set)
    """Other requests whose next block this load brings."""


class TieredKVConnector:
    """Asks connectors from the nearest to the farthest, and keeps track of loads and saves.

    Every `on_queued` is followed by one `on_dequeued`. Every `wait` and `load` is followed by one `LoadEnd`,
    unless `abandon` or `workers_lost` comes first.
    """

    def __init__(
        self,
        connectors: Sequence[KVConnector],
        pool: BlockPool,
        ledger: TransferLedger,
        clock: Clock,
        *,
        layout: KVLayout | None = None,
        near_pools: Sequence[BlockPool] = (),
        fail_on_load_failure: bool = False,
        post: TierPost | None = None,
    ) -> None:
        """All layers keep all where there is no `layout`."""
        self.connectors = connectors
        self.post = post or TierPost()
        """Reaches the workers' halves of the tiers."""
        self.near_pools = near_pools
        """Pools from which a block is loaded at next to no cost."""
        self.storeys = [it.storey for it in connectors if it.storey is not None]
        self._pool = pool
        self._layout = layout or KVLayout(1)
        self.ledger = ledger
        self._clock = clock
        self._fail_on_load_failure = fail_on_load_failure
        self.rates = TransferRates()
        self.swap = Swap(connectors, pool, ledger, self.rates, clock)
        self.parts: dict[int, _LoadPart] = {}
        """Loading transfers by id, abandoned ones included."""
        self._num_overdue: Counter[KVConnector] = Counter()
        """Overdue transfers by connector. A connector that has any is not asked: it could come to hold all
        blocks."""
        self.loads: dict[str, _Load] = {}
        """Loads by the request that waits for them."""
        self._loading: dict[bytes, _LoadPart] = {}
        """Transfers of these loads by key."""
        self.deadlines: dict[str, float] = {}
        """Time at which a waiting request times out, earliest first."""
        self._waiting_since: dict[str, float] = {}
        """Time of the first wait of a request since it was queued, also while it is in line in between."""
        self.ended: dict[str, LoadEnd] = {}
        """Ends to be drained, by request."""
        self.backlog: list[deque[CachedBlock]] = [deque() for _ in connectors]
        """Blocks to save, by connector, for which there was no room among the stores."""
        self._changed: set[str] = set()
        self._has_workers = False

    @property
    def is_idle(self) -> bool:
        """No transfer is under way, no request waits and no block is to be saved."""
        books = (self.parts, self.loads, self._loading, self.deadlines, self.ended, *self.backlog)
        return not (any(books) or self._num_overdue.total() or self.ledger.num_open)

    # ---- requests that could use KV

    def on_queued(self, prefix: PrefixRequest, start: int) -> None:
        if not self._layout.is_chain:
            others = partial(other_blocks, self._layout, prefix, start, self._is_near)
            prefix = msgspec.structs.replace(prefix, other_blocks=others)
        self._waiting_since.pop(prefix.request_id, None)
        for connector in self.connectors:
            connector.on_queued(prefix, start)

    def _is_near(self, key: bytes) -> bool:
        """True if a block can be found at once. Any thread may ask."""
        return any(pool.find(key) is not None for pool in (self._pool, *self.near_pools))

    def on_dequeued(self, request_id: str) -> None:
        self._waiting_since.pop(request_id, None)
        self.swap.dequeued(request_id)
        for connector in self.connectors:
            connector.on_dequeued(request_id)

    def worth_loading(self, match: TierMatch, block_s: float) -> TierMatch:
        """The part of a match that takes less time to load, behind what is queued, than to compute.

        Computing a block of the prefix takes `block_s`; 0 if that is not known. What other engines have computed
        for the request is always loaded.
        """
        segments = match.segments
        if not block_s or not all(segment.connector.is_cache for segment in segments):
            return match
        if not self._layout.is_chain:
            computing_s = block_s * (match.end - match.start)
            return match if self._pays(segments, computing_s) else match.cut(0)
        for index, segment in enumerate(segments):
            if not self._pays([segment], block_s * (segment.end - segment.start)):
                return match.cut(index)
        return match

    def _pays(self, segments: Sequence[Segment], computing_s: float) -> bool:
        counts = Counter[str]()
        for segment in segments:
            counts[segment.connector.tier] += segment.end - segment.start
        now, rates = self._clock.now(), self.rates
        loading_s = max(rates.seconds(tier, DEVICE, n, now) for tier, n in counts.items())
        if loading_s <= max(computing_s, _UNWEIGHED_S):
            return True
        for tier in counts:
            rates.doubt(tier, DEVICE)
        return False

    def prefetch(self, prefix: PrefixRequest, start: int, block_s: float = 0.0) -> bool:
        """Moves blocks of a request for which there is no room yet to nearer tiers, unless moving them takes
        longer than computing them: `block_s` for each block of the prefix, 0 if that is not known.

        Returns whether the nearest tier has all of them; if not, call again when `poll` names any request.
        """
        is_near = self._has_workers
        if block_s and not self._may_prefetch(block_s):
            return True
        if is_near and not self._layout.is_chain:
            return self._prefetch_groups(prefix, start)
        for index, connector in enumerate(self.connectors if self._has_workers else ()):
            if start >= len(prefix.keys):
                break
            if self._num_overdue[connector]:
                is_near = False
                continue
            connector.prefetch(prefix, start)
            count = connector.lookup(prefix, start)
            is_near = is_near and (count == 0 or (index == 0 and count is not None))
            start += count or 0
        return is_near

    def _may_prefetch(self, block_s: float) -> bool:
        """True if one more block reaches the nearest tier in less time than those before it take to compute."""
        now = self._clock.now()
        nearest, *others = [it.tier for it in self.connectors if it.is_cache] or [DEVICE]
        for tier in others:
            queued = self.rates.num_queued(tier, nearest)
            moving_s = self.rates.seconds(tier, nearest, 1, now)
            if moving_s > max(_UNWEIGHED_S, (queued + 1) * block_s):
                self.rates.doubt(tier, nearest)
                return False
        return True

    def _prefetch_groups(self, prefix: PrefixRequest, start: int) -> bool:
        found = self.lookup(prefix, start)
        if isinstance(found, PendingLookup):
            return False
        is_near = True
        for segment in found.segments:
            if segment.connector is not self.connectors[0]:
                segment.connector.prefetch(self._view(prefix, segment), segment.start)
                is_near = False
        return is_near

    def _view(self, prefix: PrefixRequest, segment: Segment) -> PrefixRequest:
        """The blocks of a segment's group up to its end."""
        if self._layout.is_chain:
            return prefix
        return prefix.of_group(segment.group, self._layout.ratios[segment.group], segment.end)

    def lookup(self, prefix: PrefixRequest, start: int) -> TierMatch | PendingLookup:
        """Finds what can be loaded from `keys[start]` on. Repeat a pending lookup when `poll` names the
        request."""
        segments: list[Segment] = []
        end = start
        if self._has_workers and not self._layout.is_chain:
            return self._lookup_groups(prefix, start)
        while self._has_workers and (end < len(prefix.keys) or not segments):
            segment = self._next_segment(prefix, end)
            if isinstance(segment, PendingLookup):
                return segment
            if segment.end == end:
                break
            segments.append(segment)
            end = segment.end
        return TierMatch(prefix, start, end, segments)

    def _lookup_groups(self, prefix: PrefixRequest, start: int) -> TierMatch | PendingLookup:
        num_keys = len(prefix.keys)
        if start >= self._layout.usable(num_keys):  # the token behind them may be missing
            last = self._next_segment(prefix, num_keys)
            return last if isinstance(last, PendingLookup) else TierMatch(prefix, start, start, ())
        groups = GroupLookup(self._layout, self._pool, prefix, self._next_segment)
        end, segments = groups.segments(start)
        return groups.pending or TierMatch(prefix, start, end, segments)

    def _next_segment(self, prefix: PrefixRequest, start: int) -> Segment | PendingLookup:
        """The segment of the first connector that has `keys[start]`; an empty one if none has.

        It is pending if another request is loading any of its blocks, or the one behind it.
        """
        segment = Segment(self.connectors[-1], start, start, prefix.group)
        for connector in self.connectors:
            if self._num_overdue[connector]:
                continue
            count = connector.lookup(prefix, start)
            if count is None:
                return PendingLookup(connector)
            if count:
                segment = Segment(connector, start, start + count, prefix.group)
                break
        keys = prefix.keys[segment.start : segment.end + 1] if self._loading else ()
        loading = next((self._loading[key] for key in keys if key in self._loading), None)
        if loading is not None:
            loading.load.waiters.add(prefix.request_id)
            return PendingLookup(loading.connector)
        return segment

    # ---- waiting

    def wait(self, request_id: str, pending: PendingLookup) -> None:
        """The request waits for `pending`, at most `LOAD_TIMEOUT_S` at a time."""
        self._wait_for(request_id, [pending.connector])
        if request_id in self.deadlines:
            self._waiting_since.setdefault(request_id, self._clock.now())

    def has_waited_enough(self, request_id: str) -> bool:
        """True if the first wait of a request was `LOAD_TIMEOUT_S` ago: KV that comes and goes again and again, as
        others need its room, is not worth more."""
        since = self._waiting_since.get(request_id)
        return since is not None and self._clock.now() - since >= LOAD_TIMEOUT_S

    def _wait_for(self, request_id: str, connectors: Iterable[KVConnector]) -> None:
        if all(connector.has_own_timeout for connector in connectors):
            self.deadlines.pop(request_id, None)
        else:
            self.deadlines.setdefault(request_id, self._clock.now() + LOAD_TIMEOUT_S)

    def load(self, match: TierMatch, blocks: Sequence[Block]) -> None:
        """Fills `blocks` with what `lookup` has just found.

        Raises ValueError if the number of blocks is not `match.num_blocks`.
        """
        prefix, segments = match.prefix, match.segments
        if not blocks or len(blocks) != match.num_blocks:
            raise ValueError(
                f"{match.num_blocks} blocks were found, {len(blocks)} are to be filled."
            )
        load = _Load(prefix.request_id, [], len(blocks))
        for segment in segments:
            view, first = self._view(prefix, segment), len(load.keys)
            keys = view.keys[segment.start : segment.end]
            targets = blocks[first : first + len(keys)]
            after_step = max(block.used_by for block in targets)
            transfer_id = segment.connector.load(view, segment.start, targets, after_step)
            part = self.parts[transfer_id] = _LoadPart(load, segment.connector, first)
            load.parts.add(part)
            load.keys += keys
            self._loading.update(dict.fromkeys(keys, part))
        self.loads[prefix.request_id] = load
        self.deadlines.pop(prefix.request_id, None)
        self._wait_for(prefix.request_id, (segment.connector for segment in segments))

    def abandon(self, request_id: str) -> None:
        """The request no longer waits; an end that was not drained yet is dropped.

        Blocks under transfer stay referenced until their transfers have ended.
        """
        self.deadlines.pop(request_id, None)
        self.ended.pop(request_id, None)
        load = self.loads.pop(request_id, None)
        if load is not None:
            for key in load.keys:
                self._loading.pop(key, None)
            self._changed |= load.waiters
            self._changed.add(request_id)

    def drain_load_ends(self) -> list[LoadEnd]:
        """Ends of waits since the last call, without those of abandoned requests."""
        for end in self.ledger.drain_settled():
            self._apply_end(end)
        self._expire_waits()
        ended, self.ended = self.ended, {}
        return list(ended.values())

    def _expire_waits(self) -> None:
        now = self._clock.now()
        while self.deadlines:
            request_id, deadline = next(iter(self.deadlines.items()))
            if deadline > now:
                return
            load = self.loads.get(request_id)
            if load is None:
                self.abandon(request_id)
                self.ended[request_id] = LoadEnd(request_id, 0)
                continue
            overdue = [part for part in load.parts if not part.connector.has_own_timeout]
            if not overdue:
                del self.deadlines[request_id]
                continue
            for part in overdue:
                part.is_overdue = True
                self._num_overdue[part.connector] += 1
            load.num_good = min(load.num_good, *(part.first for part in load.parts))
            load.error = load.error or f"it took longer than {LOAD_TIMEOUT_S:g} s"
            self._end_load(load)

    def _end_load(self, load: _Load) -> None:
        self.abandon(load.request_id)
        failure = None
        if load.error is not None and self._fail_on_load_failure:
            failure = f"KV that was found for this request could not be loaded: {load.error}."
        self.ended[load.request_id] = LoadEnd(load.request_id, load.num_good, failure)

    # ---- blocks to keep

    def save(self, cached_blocks: Sequence[CachedBlock]) -> None:
        """A request has passed through these blocks of a prefix; each connector may keep them."""
        if not self._has_workers:
            return
        for connector, backlog in zip(self.connectors, self.backlog, strict=True):
            num_done = 0 if backlog else connector.save(cached_blocks)
            room = self._pool.num_blocks - len(backlog)
            backlog.extend(cached_blocks[num_done : num_done + room])
        self._save_backlog()

    def _save_backlog(self) -> None:
        for connector, backlog in zip(self.connectors, self.backlog, strict=True):
            while backlog and (room := self.ledger.store_room) > 0:
                oldest = [backlog.popleft() for _ in range(min(room, len(backlog)))]
                # There is room for all of them, so the connector leaves none over.
                connector.save([it for it in oldest if self._pool.find(it.key) is it.block])

    # ---- transfers

    def drain_transfers(self, num_wanted: int = 0) -> list[Transfer]:
        """Transfers to begin now; running requests want `num_wanted` blocks of the device soon."""
        if self._has_workers:
            self.swap.copy(num_wanted)
        begun, now = self.ledger.drain(), self._clock.now()
        for transfer in begun:
            self.rates.begun(transfer, now)
        return begun

    def transfer_ended(self, end: TransferEnd) -> None:
        """Applies an end that the executor reports; a repeated one, or one of lost workers, is ignored."""
        entry = self.ledger.transfers.get(end.transfer_id)
        if self.ledger.close(end) and entry is not None:
            self.rates.ended(entry.transfer, end, self._clock.now())
            self._apply_end(end)

    def _apply_end(self, end: TransferEnd) -> None:
        part = self.parts.pop(end.transfer_id, None)
        if part is not None:
            load = part.load
            self._num_overdue[part.connector] -= part.is_overdue
            if end.failed and part.first + min(end.failed) < load.num_good:
                load.num_good, load.error = part.first + min(end.failed), end.error
            load.parts.remove(part)
            if not load.parts and self.loads.get(load.request_id) is load:
                self._end_load(load)
        self._save_backlog()

    # ---- the workers, and the engine's loop

    def workers_ready(self, ready: WorkerReady) -> None:
        for connector in self.connectors:
            connector.workers_ready(ready)
        self.post.workers_ready()
        self._has_workers = bool(self.connectors)

    def workers_lost(self) -> None:
        """All loads and stores are gone. No request waits any more, and no `LoadEnd` follows."""
        self._has_workers = False
        self.ledger.drop_all()
        self.rates.lost()
        self.post.workers_lost()
        self.swap.clear()
        for connector in self.connectors:
            connector.workers_lost()
        self.parts.clear()
        self._num_overdue.clear()
        self.loads.clear()
        self._loading.clear()
        self.deadlines.clear()
        self._waiting_since.clear()
        self.ended.clear()
        for backlog in self.backlog:
            backlog.clear()

    def poll(self) -> Collection[str]:
        """Reads what connectors have heard. Returns the requests whose lookups may have another answer now."""
        changed, self._changed = self._changed, set()
        for connector in self.connectors:
            changed.update(connector.poll())
        return changed

    def pollables(self) -> list[object]:
        return [source for connector in self.connectors for source in connector.pollables()]

    def next_event_at(self) -> float | None:
        if self.ledger.settled:  # since the ends of this turn were drained
            return self._clock.now()
        instants = [next(iter(self.deadlines.values()), None)]
        instants += [storey.next_event_at for storey in self.storeys]
        return min((at for at in instants if at is not None), default=None)

    def load_report(self) -> tuple[TierLoad, ...]:
        return tuple(connector.load_report() for connector in self.connectors)

    def close(self) -> None:
        for connector in self.connectors:
            connector.close()
