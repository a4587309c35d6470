"""All connectors of an engine, as the scheduler sees them: one place for KV besides the device.

A prefix is looked up in one connector after the other, as far as any of them goes on; what each has becomes one
transfer of the request's load. The load has ended when all of them have, and what counts is how many leading
blocks came. Two loads never bring the same block: a request whose next block is under way waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pagoda.ipc.clock import Clock
from pagoda.kv.block_pool import Block, BlockPool
from pagoda.kv.connector import CachedBlock, KVConnector, PrefixRequest
from pagoda.kv.transfers import TransferLedger
from pagoda.messages.load import TierLoad
from pagoda.messages.transfers import Transfer, TransferEnd
from pagoda.messages.worker import WorkerReady

LOAD_TIMEOUT_S = 10.0
"""A request that has waited so long for an answer, or for its blocks, goes on without."""


class LoadEnd(NamedTuple):
    """What became of a request's wait."""

    request_id: str
    num_loaded: int
    """Leading blocks that came."""
    failure: str | None = None
    """Why the request fails, in a sentence; None if it goes on by computing what did not come."""


class Segment(NamedTuple):
    """A part of a prefix, and who has it."""

    connector: KVConnector
    start: int
    end: int


class PendingLookup(NamedTuple):
    """Somebody may have a part of a prefix, which will be known later."""

    whom: KVConnector
    """Who does not say, or is just loading it for another request."""


class TierMatch(NamedTuple):
    """What can be loaded of a prefix from `start` on."""

    prefix: PrefixRequest
    start: int
    segments: Sequence[Segment]
    """Without a gap."""

    @property
    def num_blocks(self) -> int:
        return self.segments[-1].end - self.start if self.segments else 0

    @property
    def num_cached(self) -> int:
        """Leading ones of them that were not computed for the request."""
        cached = [segment.end for segment in self.segments if segment.connector.is_cache]
        return cached[-1] - self.start if cached else 0


@dataclass
class _Load:
    request_id: str | None
    """None when nobody waits for it any more."""
    keys: Sequence[bytes]
    num_open: int
    """Transfers that have not ended."""
    num_good: int
    error: str | None = None


class _Part(NamedTuple):
    """One transfer of a load."""

    load: _Load
    connector: KVConnector
    first: int
    """Index into the load's keys."""
    end: int


class TieredKVConnector:
    """Asks connectors from the nearest to the farthest, and keeps the books of loads and stores."""

    def __init__(
        self,
        connectors: Sequence[KVConnector],
        pool: BlockPool,
        ledger: TransferLedger,
        clock: Clock,
        *,
        near_pools: Sequence[BlockPool] = (),
        fail_on_load_failure: bool = False,
    ) -> None:
        self.near_pools = near_pools
        """Where a block is found that is nearly as good as one on the device."""
        self._connectors = connectors
        self._pool = pool
        self._ledger = ledger
        self._clock = clock
        self._fail_on_load_failure = fail_on_load_failure
        self._parts: dict[int, _Part] = {}
        """By transfer."""
        self._overdue: dict[int, KVConnector] = {}
        """Transfers of loads that nobody had the patience to wait for, and who began them."""
        self._loads: dict[str, _Load] = {}
        """Those that a request waits for."""
        self._loading: dict[bytes, KVConnector] = {}
        """The keys of these, and where they come from."""
        self._deadlines: dict[str, float] = {}
        """When a request that waits stops doing so, the earliest first; not of those who wait for a connector that
        gives up by itself."""
        self._ended: dict[str, LoadEnd] = {}
        """Ends that `drain_load_ends` has yet to return, by request."""
        self._backlog: list[deque[CachedBlock]] = [deque() for _ in connectors]
        """What each connector was offered when there was no room for stores."""
        self._behind: set[str] = set()
        """Requests that found a block on its way for another one."""
        self._told: set[str] = set()
        self._has_workers = False

    # ---- requests that could use KV

    def on_queued(self, prefix: PrefixRequest, start: int) -> None:
        """A request is queued that finds `keys[:start]` on the device. `forget` follows."""
        for connector in self._connectors:
            connector.on_queued(prefix, start)

    def on_dequeued(self, request_id: str) -> None:
        """Nothing will be asked for the request any more."""
        for connector in self._connectors:
            connector.on_dequeued(request_id)

    def prefetch(self, prefix: PrefixRequest, start: int) -> bool:
        """The request must wait: brings what it will need nearer. Returns whether all of it is at the nearest.

        If not, it is worth while to ask again when `poll` has news.
        """
        is_near = self._has_workers
        for index, connector in enumerate(self._connectors if self._has_workers else ()):
            if start >= len(prefix.keys):
                break
            if connector in self._overdue.values():
                is_near = False
                continue
            connector.prefetch(prefix, start)
            count = connector.lookup(prefix, start)
            is_near = is_near and (count == 0 or (index == 0 and count is not None))
            start += count or 0
        return is_near

    def lookup(self, prefix: PrefixRequest, start: int) -> TierMatch | PendingLookup:
        """What can be loaded from `keys[start]` on; if it is unknown, ask again when `poll` says so."""
        segments: list[Segment] = []
        end = start
        while self._has_workers and (end < len(prefix.keys) or not segments):
            segment = self._next_segment(prefix, end)
            if isinstance(segment, PendingLookup):
                return segment
            loader = self._loader(prefix.keys[segment.start : segment.end + 1])
            if loader is not None:
                self._behind.add(prefix.request_id)
                return PendingLookup(loader)
            if segment.end == end:
                break
            segments.append(segment)
            end = segment.end
        return TierMatch(prefix, start, segments)

    def _next_segment(self, prefix: PrefixRequest, start: int) -> Segment | PendingLookup:
        """What the first connector that has `keys[start]` has; empty if none has.

        One that still holds blocks of an overdue load is not asked: it would come to hold all of them.
        """
        for connector in self._connectors:
            if connector in self._overdue.values():
                continue
            count = connector.lookup(prefix, start)
            if count is None:
                return PendingLookup(connector)
            if count:
                return Segment(connector, start, start + count)
        return Segment(self._connectors[-1], start, start)

    def _loader(self, keys: Sequence[bytes]) -> KVConnector | None:
        """Where the first of `keys` comes from that is on its way."""
        if not self._loading:
            return None
        return next((self._loading[key] for key in keys if key in self._loading), None)

    # ---- waiting

    def wait(self, request_id: str, unknown: PendingLookup) -> None:
        """The request waits for an answer to `lookup`, with patience that began when it first did."""
        if unknown.whom.has_own_timeout:
            self.stop_waiting(request_id)
        else:
            self._begin_patience(request_id)

    def _begin_patience(self, request_id: str) -> None:
        self._deadlines.setdefault(request_id, self._clock.now() + LOAD_TIMEOUT_S)

    def load(self, found: TierMatch, blocks: Sequence[Block]) -> None:
        """Fills `blocks` with what `lookup` has just found. A `LoadEnd` follows.

        Raises:
            ValueError: these are not as many.
        """
        prefix, start, segments = found
        if not blocks or len(blocks) != found.num_blocks:
            raise ValueError(
                f"{found.num_blocks} blocks were found, {len(blocks)} are to be filled."
            )
        keys = prefix.keys[start : start + len(blocks)]
        load = _Load(prefix.request_id, keys, len(segments), len(blocks))
        for segment in segments:
            first, end = segment.start - start, segment.end - start
            part = blocks[first:end]
            after_step = max(block.used_by for block in part)
            transfer_id = segment.connector.load(prefix, segment.start, part, after_step)
            self._parts[transfer_id] = _Part(load, segment.connector, first, end)
            self._loading.update(dict.fromkeys(keys[first:end], segment.connector))
        self._loads[prefix.request_id] = load
        self.stop_waiting(prefix.request_id)
        if not all(segment.connector.has_own_timeout for segment in segments):
            self._begin_patience(prefix.request_id)

    def abandon(self, request_id: str) -> None:
        """The request waits no longer; no `LoadEnd` follows. Blocks stay referenced until their transfer ends."""
        self.stop_waiting(request_id)
        self._ended.pop(request_id, None)
        load = self._loads.pop(request_id, None)
        if load is not None:
            load.request_id = None
            for key in load.keys:
                self._loading.pop(key, None)
            self._told |= self._behind | {request_id}
            self._behind.clear()

    def stop_waiting(self, request_id: str) -> None:
        """Patience begins anew when the request waits again."""
        self._deadlines.pop(request_id, None)

    def drain_load_ends(self) -> list[LoadEnd]:
        """Requests that need not wait any more, since the last call."""
        for end in self._ledger.drain_settled():
            self._apply_end(end)
        self._run_out_of_patience()
        ended, self._ended = self._ended, {}
        return list(ended.values())

    def _run_out_of_patience(self) -> None:
        now = self._clock.now()
        while self._deadlines:
            request_id, deadline = next(iter(self._deadlines.items()))
            if deadline > now:
                return
            load = self._loads.get(request_id)
            if load is None:
                self.abandon(request_id)
                self._ended[request_id] = LoadEnd(request_id, 0)
                continue
            missing = {i: part for i, part in self._parts.items() if part.load is load}
            overdue = [i for i, part in missing.items() if not part.connector.has_own_timeout]
            if not overdue:
                self.stop_waiting(request_id)
                continue
            self.abandon(request_id)
            self._overdue.update((i, missing[i].connector) for i in overdue)
            num_loaded = min(load.num_good, *(part.first for part in missing.values()))
            load.error = load.error or f"it took longer than {LOAD_TIMEOUT_S:g} s"
            self._end_load(request_id, num_loaded, load.error)

    def _end_load(self, request_id: str, num_loaded: int, error: str | None) -> None:
        failure = None
        if error is not None and self._fail_on_load_failure:
            failure = f"KV that was found for this request could not be loaded: {error}."
        self._ended[request_id] = LoadEnd(request_id, num_loaded, failure)

    # ---- blocks to keep

    def save(self, cached_blocks: Sequence[CachedBlock]) -> None:
        """A request has passed through these blocks of a prefix."""
        if not self._has_workers:
            return
        for connector, backlog in zip(self._connectors, self._backlog, strict=True):
            num_done = 0 if backlog else connector.save(cached_blocks)
            room = self._pool.num_blocks - len(backlog)
            backlog.extend(cached_blocks[num_done : num_done + room])
        self._offer_again()

    def _offer_again(self) -> None:
        for connector, backlog in zip(self._connectors, self._backlog, strict=True):
            while backlog and (room := self._ledger.store_room) > 0:
                oldest = [backlog.popleft() for _ in range(min(room, len(backlog)))]
                cached_blocks = [o for o in oldest if self._pool.find(o.key) is o.block]
                connector.save(
                    cached_blocks
                )  # is done with all of them, since there is room for as many

    # ---- transfers

    def drain_transfers(self) -> list[Transfer]:
        """What was begun since the last call."""
        return self._ledger.drain()

    def transfer_ended(self, end: TransferEnd) -> None:
        """Takes what the executor says; ends that do not count are ignored."""
        if self._ledger.close(end):
            self._apply_end(end)

    def _apply_end(self, end: TransferEnd) -> None:
        self._overdue.pop(end.transfer_id, None)
        part = self._parts.pop(end.transfer_id, None)
        if part is not None:
            self._end_part(part, end)
        self._offer_again()

    def _end_part(self, part: _Part, end: TransferEnd) -> None:
        load, connector, first, last = part
        connector.loaded(load.keys[first:last], end.failed)
        if end.failed:
            good = first + min(end.failed)
            if good < load.num_good:
                load.num_good, load.error = good, end.error
        load.num_open -= 1
        if load.num_open == 0 and load.request_id is not None:
            request_id = load.request_id
            self.abandon(request_id)
            self._end_load(request_id, load.num_good, load.error)

    # ---- the workers, and the engine's loop

    def workers_ready(self, ready: WorkerReady) -> None:
        for connector in self._connectors:
            connector.workers_ready(ready)
        self._has_workers = True

    def workers_lost(self) -> None:
        """All loads and stores are gone; nobody waits any more, and nobody is told so."""
        self._has_workers = False
        self._ledger.drop_all()
        for connector in self._connectors:
            connector.workers_lost()
        self._parts.clear()
        self._overdue.clear()
        self._loads.clear()
        self._loading.clear()
        self._deadlines.clear()
        self._ended.clear()
        self._behind.clear()
        for backlog in self._backlog:
            backlog.clear()

    def poll(self) -> bool | Collection[str]:
        """Takes news; True if any `lookup` that was unknown may be known now, or the requests whose may be."""
        told, self._told = self._told, set()
        is_news_for_all = False
        for connector in self._connectors:
            news = connector.poll()
            if isinstance(news, bool):
                is_news_for_all |= news
            else:
                told.update(news)
        return is_news_for_all or told

    def pollables(self) -> list[object]:
        return [source for connector in self._connectors for source in connector.pollables()]

    def next_event_at(self) -> float | None:
        """When patience ends next."""
        return next(iter(self._deadlines.values()), None)

    def load_report(self) -> tuple[TierLoad, ...]:
        return tuple(connector.load_report() for connector in self._connectors)

    def close(self) -> None:
        for connector in self._connectors:
            connector.close()
