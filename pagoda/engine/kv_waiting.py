"""Requests that wait for KV from elsewhere than the device.

Such a request is neither running nor waiting for a step: it costs nothing until there is news. Some wait for an
answer where their KV is, and hold nothing. Others have blocks that are being filled; those count against the limit
of sequences, and room is kept for them as for those that run. When a load ends, what came is cached like computed
blocks and the request lets go of it: the common admission will find it.

In between, requests come and go by ways that all pass through here, so that every announcement is followed by one
farewell.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from heapq import nsmallest
from typing import NamedTuple

from pagoda.engine.request import Request
from pagoda.kv.block_pool import Block
from pagoda.kv.connector import PrefixRequest
from pagoda.kv.manager import KVManager
from pagoda.kv.tiered_connector import PendingLookup, TieredKVConnector, TierMatch

_NUM_PREFETCHED = 4
"""So many of those in line, the first, are looked at again when there is news: a long prompt takes time."""


class Begin(Enum):
    """What a request does for which there is room."""

    WAITS = auto()
    """It waits for KV now, or goes on doing so."""
    STAYS = auto()
    """It stays in line: so many wait for an answer that it must not be asked yet."""
    COMPUTES = auto()
    """There is nothing to wait for."""


class Arrival(NamedTuple):
    """A request that waits for KV no longer."""

    request: Request
    failure: str | None
    """Why it fails, in a sentence; None if it goes on."""


class KVWaiting:
    """The scheduler's way to a `TieredKVConnector`, and the requests that wait for it."""

    def __init__(self, kv: KVManager, tiers: TieredKVConnector, max_unanswered: int) -> None:
        self._kv = kv
        self._tiers = tiers
        self._max_unanswered = max_unanswered
        self._unanswered: dict[str, Request] = {}
        self._loading: dict[str, Request] = {}
        self._staying: set[str] = set()
        """Those in line that would wait for an answer, as far as is known."""
        self._in_line: dict[str, Request] = {}
        """Those that wait for room, and of whose KV more may be brought nearer."""

    @property
    def num_requests(self) -> int:
        return len(self._unanswered) + len(self._loading)

    @property
    def loading(self) -> Iterable[Request]:
        """Those that hold blocks."""
        return self._loading.values()

    @property
    def num_staying(self) -> int:
        """How many in line are known to be such that `must_stay`."""
        return len(self._staying) if self._is_full else 0

    @property
    def _is_full(self) -> bool:
        return len(self._unanswered) >= self._max_unanswered

    # ---- as requests come and go

    def on_queued(self, request: Request, num_hits: int) -> None:
        """The request is queued, and finds so many blocks on the device."""
        has_token_behind = request.kv_source is not None
        keys = self._kv.prefix_keys(request.table, request.token_ids, whole=has_token_behind)
        token_ids = request.token_ids[: len(keys) * self._kv.block_size]
        request.prefix = PrefixRequest(request.request_id, keys, token_ids, request.kv_source)
        request.load_tried = False
        self._tiers.on_queued(request.prefix, min(num_hits, len(keys)))

    def on_dequeued(self, request: Request) -> None:
        """The request is admitted or ends."""
        self._in_line.pop(request.request_id, None)
        self._staying.discard(request.request_id)
        if request.prefix is not None:
            request.prefix = request.kv_source = None
            self._tiers.on_dequeued(request.request_id)

    def passed(self, request: Request) -> None:
        """The request has got past further blocks: they are published, by itself or by whoever computed them."""
        table = request.table
        if table.num_published > request.num_saved:
            first, request.num_saved = request.num_saved, table.num_published
            self._tiers.save(
                self._kv.cached_blocks(table, request.token_ids, first, table.num_published)
            )

    # ---- waiting

    def begin(self, request: Request, hits: list[Block]) -> Begin:
        """Lets the request, for which there is room, wait for KV if there may be some.

        It tries to load once for each time that it is queued: KV that is evicted again before it is admitted must
        not keep it here for ever.
        """
        prefix = request.prefix
        if prefix is None or request.load_tried:
            return Begin.COMPUTES
        found = self._tiers.lookup(prefix, len(hits))
        if isinstance(found, PendingLookup):
            return self._wait_for_answer(request, found)
        if found.num_blocks == 0:
            return Begin.COMPUTES
        self._load(request, hits, found)
        return Begin.WAITS

    def must_stay(self, request: Request) -> bool:
        """Whether the request, which is in line, cannot go on because too many wait for an answer already."""
        prefix, request_id = request.prefix, request.request_id
        if prefix is None or request.load_tried or not self._is_full:
            return False
        if request_id not in self._staying:
            hits = self._kv.find_prefix(request.table, request.token_ids)
            if not isinstance(self._tiers.lookup(prefix, len(hits)), PendingLookup):
                return False
            self._staying.add(request_id)
        return True

    def _wait_for_answer(self, request: Request, unknown: PendingLookup) -> Begin:
        if request.request_id not in self._unanswered:
            if self._is_full:
                return Begin.STAYS
            self._unanswered[request.request_id] = request
            self._in_line.pop(request.request_id, None)
            self._staying.discard(request.request_id)
        self._tiers.wait(request.request_id, unknown)
        return Begin.WAITS

    def _load(self, request: Request, hits: list[Block], found: TierMatch) -> None:
        self._unanswered.pop(request.request_id, None)
        self._in_line.pop(request.request_id, None)
        self._staying.discard(request.request_id)
        self._loading[request.request_id] = request
        request.load_tried = True
        request.fetched = range(len(hits) + found.num_cached, len(hits) + found.num_blocks)
        table = request.table
        self._kv.adopt(table, hits)
        if self._kv.grow(table, (len(hits) + found.num_blocks) * self._kv.block_size) is None:
            raise RuntimeError("KV is loaded for a request that does not fit.")
        self._tiers.load(found, table.blocks[len(hits) :])

    def prefetch(self, request: Request, num_hits: int) -> None:
        """There is no room for the request now: brings what it will need nearer, and more with later news."""
        self._in_line.pop(request.request_id, None)
        if request.prefix is None or request.load_tried:
            return
        if not self._tiers.prefetch(request.prefix, num_hits):
            self._in_line[request.request_id] = request

    def prefetch_more(self) -> None:
        """There is news of what could not be found, or had no place, when it was asked for."""
        first = nsmallest(_NUM_PREFETCHED, self._in_line.values(), key=lambda it: it.rank)
        for request in first:
            hits = self._kv.find_prefix(request.table, request.token_ids)
            self.prefetch(request, len(hits))

    def leave(self, request: Request) -> bool:
        """The request waits for KV no longer; returns whether it did."""
        state = self._loading if request.request_id in self._loading else self._unanswered
        if state.pop(request.request_id, None) is None:
            return False
        self._tiers.abandon(request.request_id)
        self._kv.free(request.table)
        return True

    def take_arrivals(self) -> list[Arrival]:
        """Requests that need not wait any more, with what came of their KV cached."""
        arrivals = []
        for request_id, num_loaded, failure in self._tiers.drain_load_ends():
            request = self._loading.pop(request_id, None)
            if request is None:
                request = self._unanswered.pop(request_id)
            request.load_tried = True
            table = request.table
            num_blocks = table.num_published + num_loaded
            request.fetched = request.fetched[: max(0, num_blocks - request.fetched.start)]
            self._kv.publish(table, request.token_ids, num_blocks * self._kv.block_size)
            self._kv.free(table)
            arrivals.append(Arrival(request, failure))
        return arrivals

    def take_news(self) -> list[Request] | None:
        """The unanswered at which it is time to look again, in order of rank; None if there is no news."""
        told = self._tiers.poll()
        if not told:
            return None
        if isinstance(told, bool):
            self._staying.clear()
            told = self._unanswered
        self._staying.difference_update(told)
        named = [self._unanswered[it] for it in told if it in self._unanswered]
        return sorted(named, key=lambda request: request.rank)

    def start_over(self, requests: Iterable[Request]) -> None:
        """The workers are lost: requests that did not wait for KV may do so from now on."""
        for request in requests:
            request.load_tried = False
            if request.prefix is None:
                self.on_queued(request, 0)

    def lose_workers(self) -> list[Request]:
        """All KV on its way is lost; returns who waited for it.

        Those whose blocks were being filled do not try that again: it may be what ended the worker.
        """
        self._tiers.workers_lost()
        requests = [*self._unanswered.values(), *self._loading.values()]
        self._unanswered.clear()
        self._loading.clear()
        self._staying.clear()
        for request in requests:
            self._kv.free(request.table)
        return requests
