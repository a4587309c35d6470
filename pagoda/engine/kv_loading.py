"""Requests whose KV may come from elsewhere than the device: neither running nor in line, they await news.

A request AWAITING_KV holds no blocks; one LOADING holds blocks that transfers fill. When a load ends, the loaded
blocks are published like computed ones and the request lets go of them: the common admission finds them.

Every `on_queued` is followed by exactly one `on_dequeued`.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from heapq import nsmallest
from operator import attrgetter

from pagoda.engine.request import Request, RequestState
from pagoda.kv.block_pool import Block
from pagoda.kv.connector import PrefixRequest
from pagoda.kv.manager import KVManager
from pagoda.kv.tiered_connector import LoadEnd, PendingLookup, TieredKVConnector, TierMatch

_NUM_PREFETCHED = 4
"""Requests at the front of the line that are looked at again when there is news: a long prompt takes time."""
_order_key = attrgetter("order_key")


class LoadStart(Enum):
    """Outcomes for a request for which there is room."""

    AWAITING = auto()
    """A place for KV has yet to answer."""
    LOADING = auto()
    """Transfers have begun."""
    BLOCKED = auto()
    """The request stays in line: so many await an answer that it must not ask yet."""
    READY = auto()
    """There is nothing to load."""


class KVLoader:
    """The scheduler's way to a `TieredKVConnector`; without one every request is ready."""

    def __init__(self, kv: KVManager, tiers: TieredKVConnector | None, max_awaiting: int) -> None:
        self._kv = kv
        self._tiers = tiers
        self._max_awaiting = max_awaiting
        self._awaiting: dict[str, Request] = {}
        self._loading: dict[str, Request] = {}
        self._blocked: set[str] = set()
        """Requests in line that would await an answer, as far as is known."""
        self._prefetching: dict[str, Request] = {}
        """Requests in line for which more KV may be brought nearer."""

    @property
    def num_requests(self) -> int:
        return len(self._awaiting) + len(self._loading)

    @property
    def num_blocked(self) -> int:
        """Requests in line for which `is_blocked` is known to be true."""
        return len(self._blocked) if self._is_full else 0

    @property
    def _is_full(self) -> bool:
        return len(self._awaiting) >= self._max_awaiting

    # ---- requests come, go and get on

    def on_queued(self, request: Request, num_hits: int) -> None:
        """The request is queued; `num_hits` leading blocks are on the device."""
        if self._tiers is None:
            return
        has_token_behind = request.kv_source is not None
        keys = self._kv.prefix_keys(request.table, request.token_ids, whole=has_token_behind)
        token_ids = request.token_ids[: len(keys) * self._kv.block_size]
        request.prefix = PrefixRequest(request.request_id, keys, token_ids, request.kv_source)
        request.load_tried = False
        self._tiers.on_queued(request.prefix, min(num_hits, len(keys)))

    def on_dequeued(self, request: Request) -> None:
        """The request is admitted or finished."""
        self._prefetching.pop(request.request_id, None)
        self._blocked.discard(request.request_id)
        if request.prefix is not None and self._tiers is not None:
            request.prefix = request.kv_source = None
            self._tiers.on_dequeued(request.request_id)

    def on_published(self, request: Request) -> None:
        table = request.table
        if self._tiers is not None and table.num_published > request.num_saved:
            first, request.num_saved = request.num_saved, table.num_published
            blocks = self._kv.cached_blocks(table, request.token_ids, first, table.num_published)
            self._tiers.save(blocks)

    # ---- awaiting and loading

    def may_load(self, request: Request) -> bool:
        """True if the request has yet to try whether there is KV for it, once for each time that it is queued."""
        return request.prefix is not None and not request.load_tried

    def start(self, request: Request, hits: list[Block]) -> LoadStart:
        """Begins to load or to await KV for the request, for which there is room besides `hits`."""
        prefix = request.prefix
        if prefix is None or request.load_tried or self._tiers is None:
            return LoadStart.READY
        found = self._tiers.lookup(prefix, len(hits))
        if isinstance(found, PendingLookup):
            return self._await(request, found, self._tiers)
        if found.num_blocks == 0:
            return LoadStart.READY
        self._load(request, hits, found, self._tiers)
        return LoadStart.LOADING

    def is_blocked(self, request: Request) -> bool:
        """True if the request, which is in line, cannot go on because too many await an answer already."""
        prefix, request_id = request.prefix, request.request_id
        if prefix is None or request.load_tried or self._tiers is None or not self._is_full:
            return False
        if request_id not in self._blocked:
            hits = self._kv.find_prefix(request.table, request.token_ids)
            if not isinstance(self._tiers.lookup(prefix, len(hits)), PendingLookup):
                return False
            self._blocked.add(request_id)
        return True

    def _await(
        self, request: Request, lookup: PendingLookup, tiers: TieredKVConnector
    ) -> LoadStart:
        if request.state is not RequestState.AWAITING_KV:
            if self._is_full:
                return LoadStart.BLOCKED
            self._leave_line(request)
            self._awaiting[request.request_id] = request
        tiers.wait(request.request_id, lookup)
        return LoadStart.AWAITING

    def _load(
        self, request: Request, hits: list[Block], found: TierMatch, tiers: TieredKVConnector
    ) -> None:
        self._leave_line(request)
        self._loading[request.request_id] = request
        request.load_tried = True
        request.fetched = range(len(hits) + found.num_cached, len(hits) + found.num_blocks)
        table = request.table
        self._kv.adopt(table, hits)
        if self._kv.grow(table, (len(hits) + found.num_blocks) * self._kv.block_size) is None:
            raise RuntimeError("KV is loaded for a request that does not fit.")
        tiers.load(found, table.blocks[len(hits) :])

    def _leave_line(self, request: Request) -> None:
        self._awaiting.pop(request.request_id, None)
        self._prefetching.pop(request.request_id, None)
        self._blocked.discard(request.request_id)

    def abandon(self, request: Request) -> None:
        """The request, if it awaits KV, does so no longer. No `LoadEnd` follows."""
        if request.is_awaiting_kv and self._tiers is not None:
            self._awaiting.pop(request.request_id, None)
            self._loading.pop(request.request_id, None)
            self._tiers.abandon(request.request_id)
            self._kv.free(request.table)

    def prefetch(self, request: Request, num_hits: int) -> None:
        """Brings the KV of a request without room nearer, and more of it with later news."""
        self._prefetching.pop(request.request_id, None)
        if request.prefix is None or request.load_tried or self._tiers is None:
            return
        if not self._tiers.prefetch(request.prefix, num_hits):
            self._prefetching[request.request_id] = request

    def prefetch_more(self) -> None:
        for request in nsmallest(_NUM_PREFETCHED, self._prefetching.values(), key=_order_key):
            hits = self._kv.find_prefix(request.table, request.token_ids)
            self.prefetch(request, len(hits))

    # ---- news

    def drain_load_ends(self) -> list[LoadEnd]:
        return [] if self._tiers is None else self._tiers.drain_load_ends()

    def end_load(self, request: Request, end: LoadEnd) -> None:
        """Publishes the loaded blocks of a request that awaited KV, and frees them."""
        self._loading.pop(request.request_id, None)
        self._awaiting.pop(request.request_id, None)
        request.load_tried = True
        table = request.table
        num_blocks = table.num_published + end.num_loaded
        request.fetched = request.fetched[: max(0, num_blocks - request.fetched.start)]
        self._kv.publish(table, request.token_ids, num_blocks * self._kv.block_size)
        self._kv.free(table)

    def poll(self) -> list[Request] | None:
        """Requests that awaited an answer which may be known now, in order; None if there is no news."""
        news = () if self._tiers is None else self._tiers.poll()
        if not news:
            return None
        self._blocked.difference_update(news)
        return sorted((self._awaiting[it] for it in news if it in self._awaiting), key=_order_key)

    def on_workers_lost(self, in_line: Iterable[Request]) -> list[Request]:
        """All KV on its way is lost; returns the requests that awaited it.

        Requests in line may load from now on. Those whose blocks were being filled do not try again: that load may
        be what ended the worker.
        """
        if self._tiers is None:
            return []
        for request in in_line:
            request.load_tried = False
            if request.prefix is None:
                self.on_queued(request, 0)
        self._tiers.workers_lost()
        requests = [*self._awaiting.values(), *self._loading.values()]
        self._awaiting.clear()
        self._loading.clear()
        self._blocked.clear()
        for request in requests:
            self._kv.free(request.table)
        return requests
