# SPDX-License-Identifier: Apache-2.0
"""KV that comes from tiers and other engines.

A request AWAITING_KV holds no blocks; one LOADING holds blocks that transfers fill. Neither runs or is in line.
When a load ends, the loaded blocks are published like computed ones and the request lets go of them: the common
admission finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import nsmallest
from operator import attrgetter
from typing import Any

import msgspec

from pagoda.engine.kv_hooks import KVHooks, LoadStart
from pagoda.engine.peer_hooks import NO_PEERS, EngineLinks, PeerHooks, PeerNews
from pagoda.engine.request import Request, RequestState
from pagoda.engine.scheduler import Scheduler
from pagoda.engine.streaming import no_room_below
from pagoda.ipc.clock import Clock
from pagoda.kv.block_table import PrefixHit
from pagoda.kv.cold_segments import ColdSegments
from pagoda.kv.connector import PrefixRequest
from pagoda.kv.events import CacheRecorder
from pagoda.kv.group_lookup import PendingLookup
from pagoda.kv.tiered_connector import LoadEnd, TieredKVConnector, TierMatch
from pagoda.kv.transfers import TransferLedger
from pagoda.messages.engine_config import EngineConfig
from pagoda.messages.frontend import GenerateRequest, KVSource, TokenChunk, TokenLogprobs
from pagoda.messages.transfers import TierWord, TransferEnd, Transfers
from pagoda.messages.worker import WorkerReady
from pagoda.parallel.segments import BlockRanks

TiersBuilder = Callable[..., TieredKVConnector | None]
"""`build_tiers`, or the one of a test."""
_NUM_PREFETCHED = 4
"""Requests at the front of the line that are looked at again when there is news: a long prompt takes time."""
_NUM_STEPS = 2
"""Steps for whose blocks copies leave room."""
_MAX_LOADS = 3
"""Loads of a request each time that it is queued: others may evict what was loaded before it is admitted."""
_order_key = attrgetter("order_key")


class KVTransferHooks(KVHooks):
    """Loads from a `TieredKVConnector`; `peers` hold KV for other engines.

    Every `on_queued` of a connector is followed by exactly one `on_dequeued`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tiers: TieredKVConnector,
        peers: PeerHooks = NO_PEERS,
    ) -> None:
        """The connector of `peers`, if they have one, is one of the `tiers`."""
        self._scheduler = scheduler
        self._kv, self._queue = scheduler.kv, scheduler.queue
        self._max_awaiting = scheduler.limits.max_num_seqs
        self.tiers, self.peers = tiers, peers
        self.near_pools = tiers.near_pools
        self._max_step_blocks = -(-scheduler.limits.max_num_batched_tokens // self._kv.block_size)
        self._prompts = scheduler.batcher.streams.prompts
        self._candidates = scheduler.batcher.candidates
        self._awaiting: dict[str, Request] = {}
        self._blocked: set[str] = set()
        """Requests in line that would await an answer, as far as is known."""
        self._prefetching: dict[str, Request] = {}
        """Requests in line for which more KV may be brought nearer."""
        self._has_ended = False
        """A request has ended, so the turn of the first in line is near."""
        scheduler.attach(self)
        if tiers.storeys and self._kv.segment_tokens:
            self._kv.cold = ColdSegments(self._kv, tiers.storeys)

    # ---- requests come, go and get on

    def refusal(self, message: GenerateRequest) -> str | None:
        return self.peers.refusal(message)

    def on_added(self, message: GenerateRequest, request: Request) -> list[TokenChunk]:
        chunks = self.peers.on_added(message, request)
        self._on_queued(request, self._kv.find_prefix(request.table, request.token_ids).num_blocks)
        return chunks

    def on_refused(self, message: GenerateRequest) -> None:
        self.peers.on_refused(message)

    def _on_queued(self, request: Request, num_hits: int) -> None:
        """The request is queued; `num_hits` leading blocks are on the device."""
        has_token_behind = request.kv_source is not None and self._kv.keeps_all
        keys = self._kv.prefix_keys(request.table, request.token_ids, whole=has_token_behind)
        token_ids = request.token_ids[: len(keys) * self._kv.block_size]
        request.prefix = PrefixRequest(request.request_id, keys, token_ids, request.kv_source)
        request.load_tried, request.num_loads = False, 0
        if self._kv.num_ranks > 1:  # it may come to a rank that has none of them
            num_hits = 0
        self.tiers.on_queued(request.prefix, min(num_hits, len(keys)))

    def _ranks(self, request: Request, hit: PrefixHit) -> BlockRanks:
        """The ranks of the blocks of a request that starts with a prefix on the device, which has a rank then if
        ranks have requests of their own."""
        prefix, spread = request.prefix, self._kv.spread
        if spread is None:
            return BlockRanks(request.table.rank)
        near = self.tiers.near_rank(prefix.keys[0]) if prefix is not None and prefix.keys else None
        num_blocks = self._kv.num_blocks_for(request.num_tokens)
        return spread.ranks(hit, num_blocks, near, kept=self._queue.reserved_blocks)

    def num_near(self, request: Request, hit: PrefixHit) -> int:
        prefix = request.prefix
        if prefix is None or request.load_tried:
            return 0
        placed = msgspec.structs.replace(prefix, ranks=self._ranks(request, hit))
        return self.tiers.num_near(placed, hit.num_blocks)

    def _on_dequeued(self, request: Request) -> None:
        self._prefetching.pop(request.request_id, None)
        self._blocked.discard(request.request_id)
        if request.prefix is not None:
            request.prefix = request.kv_source = None
            self.tiers.on_dequeued(request.request_id)

    def on_admitted(self, request: Request) -> None:
        self._on_dequeued(request)
        self.on_published(request)
        self._save_tails(request)

    def on_published(self, request: Request) -> None:
        table = request.table
        if table.num_published > request.num_saved:
            first, request.num_saved = request.num_saved, table.num_published
            blocks = self._kv.cached_blocks(table, request.token_ids, first, table.num_published)
            self.tiers.save(blocks)
        num_prompt_blocks = request.num_prompt_tokens // self._kv.block_size
        if table.num_published >= num_prompt_blocks > request.num_saved_tail:
            self._save_tails(request)
        self.peers.on_published(request)

    def _save_tails(self, request: Request) -> None:
        """Saves what groups that do not keep all have at the end of what is computed.

        Prefixes of later requests may end there: behind a prefix that was found, a prompt and an answer.
        """
        end = request.table.num_published
        if self._kv.keeps_all or end <= request.num_saved_tail:
            return
        first, request.num_saved_tail = request.num_saved_tail, end
        self.tiers.save(self._kv.cached_tails(request.table, request.token_ids, first, end))

    def on_prefilled(
        self, request: Request, token_id: int, logprobs: TokenLogprobs | None
    ) -> KVSource | None:
        return self.peers.on_prefilled(request, token_id, logprobs)

    def on_preempted(self, request: Request) -> None:
        self._save_tails(request)
        self.peers.on_preempted(request)
        num_blocks = request.table.num_published
        num_cold = len(request.table.cold) * self._kv.segment_tokens // self._kv.block_size
        self._on_queued(request, num_blocks)
        self.tiers.swap.preempted(
            request.request_id,
            self._kv.needed_blocks(request.table, request.token_ids, num_blocks),
            self._prompts.seconds((num_blocks - num_cold) * self._kv.block_size),
        )

    def on_finished(self, request: Request) -> None:
        if request.state is RequestState.RUNNING:
            self._save_tails(request)
        self._has_ended = True
        self.peers.on_finished(request)
        self._abandon(request)
        self._on_dequeued(request)

    def make_room(self) -> bool:
        return self.peers.make_room()

    # ---- awaiting and loading

    def leaves_line(self, request: Request) -> bool:
        if not self._may_load(request):
            return False
        hit = self._candidates.find_prefix(request)
        if (
            not self._scheduler.quarantine.requests
            and self._queue.has_room(request, hit, in_turn=True)
            and self.start(request, hit) is LoadStart.LEFT_LINE
        ):
            return True
        self._abandon(request)
        self._prefetch(request, hit)
        return False

    def _may_load(self, request: Request) -> bool:
        """True if the request has yet to try whether there is KV for it, once for each time that it is queued."""
        return request.prefix is not None and not request.load_tried

    def start(self, request: Request, hit: PrefixHit) -> LoadStart:
        prefix = request.prefix
        if prefix is None or request.load_tried:
            return LoadStart.READY
        found = self.tiers.lookup(self._usable(request, prefix, hit), hit.num_blocks)
        if isinstance(found, PendingLookup):
            if self.tiers.has_waited_enough(request.request_id):
                request.load_tried = True
                return LoadStart.READY
            if request.state is not RequestState.AWAITING_KV:
                if len(self._awaiting) >= self._max_awaiting:
                    return LoadStart.BLOCKED
                self._leave_line(request)
                self._awaiting[request.request_id] = request
            self.tiers.wait(request.request_id, found)
            self._queue.enter(request, RequestState.AWAITING_KV)
        elif found.num_blocks == 0:
            return LoadStart.READY
        elif not (worth := self._worth_loading(found, hit)).num_blocks:
            request.load_tried = True
            return LoadStart.READY
        else:  # there is room for it: going on from a longer prefix takes no more blocks
            self._load(request, worth, hit.num_cold)
            self._queue.enter(request, RequestState.LOADING)
        return LoadStart.LEFT_LINE

    def _worth_loading(self, found: TierMatch, hit: PrefixHit) -> TierMatch:
        """The part of a match that takes less time to load than to compute; all of it behind cold segments, which
        each step would read."""
        return found if hit.num_cold else self.tiers.worth_loading(found, self._block_s)

    @property
    def _block_s(self) -> float:
        """Seconds that a block of a prompt takes to compute; 0 if that is not known."""
        return self._prompts.seconds(self._kv.block_size)

    def _usable(self, request: Request, prefix: PrefixRequest, hit: PrefixHit) -> PrefixRequest:
        """The part of a prefix for which a request has room on the device, behind its cold segments, on the ranks
        where it is to lie."""
        if self._kv.pool.num_ranks > 1:
            return msgspec.structs.replace(prefix, ranks=self._ranks(request, hit))
        if not self._kv.is_streamed(request.num_tokens):
            return prefix
        most = self._kv.most_reused(request.table, request.token_ids, hit.num_cold)
        if hit.num_cold and not self._kv.keeps_all:
            most = hit.num_blocks
        return prefix.leading(max(most, hit.num_blocks))

    def _load(self, request: Request, found: TierMatch, num_cold: int) -> None:
        self._leave_line(request)
        request.load_tried = True
        request.num_loads += 1
        request.fetched = range(found.start + found.num_cached, found.end)
        request.loaded = found.targets
        table, token_ids = request.table, request.token_ids
        ranks = found.prefix.ranks
        blocks = self._kv.begin_load(
            table, token_ids, found.end, request.loaded, num_cold, ranks=ranks
        )
        self.tiers.load(found, blocks)

    def _leave_line(self, request: Request) -> None:
        self._awaiting.pop(request.request_id, None)
        self._prefetching.pop(request.request_id, None)
        self._blocked.discard(request.request_id)

    def first_ready(self, in_line: Iterable[Request]) -> Request | None:
        if len(self._awaiting) < self._max_awaiting:
            return next(iter(in_line), None)
        if len(self._blocked) >= len(self._queue.waiting):
            return None
        return next((request for request in in_line if not self._is_blocked(request)), None)

    def _is_blocked(self, request: Request) -> bool:
        """True if the request cannot go on because too many, and no fewer, await an answer already."""
        prefix = request.prefix
        if prefix is None or request.load_tried:
            return False
        if request.request_id not in self._blocked:
            hit = self._candidates.find_prefix(request)
            found = self.tiers.lookup(self._usable(request, prefix, hit), hit.num_blocks)
            if not isinstance(found, PendingLookup):
                return False
            self._blocked.add(request.request_id)
        return True

    def _abandon(self, request: Request) -> None:
        """The request, if it awaits KV, does so no longer. No `LoadEnd` follows."""
        if request.is_awaiting_kv:
            self._awaiting.pop(request.request_id, None)
            self.tiers.abandon(request.request_id)
            self._kv.free(request.table)
            request.loaded = ()

    def _prefetch(self, request: Request, hit: PrefixHit) -> None:
        """Brings the KV of a request without room nearer, and more of it with later news."""
        self._prefetching.pop(request.request_id, None)
        is_streamed = self._kv.is_streamed(
            request.num_tokens
        )  # its segments are read where they are
        if request.prefix is None or request.load_tried or is_streamed:
            return
        prefix = self._usable(request, request.prefix, hit)
        if not self.tiers.prefetch(prefix, hit.num_blocks, self._block_s):
            self._prefetching[request.request_id] = request

    # ---- news

    def transfer_ended(self, end: TransferEnd) -> None:
        self.tiers.transfer_ended(end)

    def take_word(self, word: TierWord) -> None:
        self.tiers.post.take(word)

    def step(self) -> list[TokenChunk]:
        return [*self.apply_events(self.peers.news()), *self._fail_the_stuck()]

    def _fail_the_stuck(self) -> list[TokenChunk]:
        """Ends requests that are streamed and for which no storey has room, though nobody else has any there."""
        chunks: list[TokenChunk] = []
        stuck = self._scheduler.batcher.streams.stuck
        while stuck:
            request = stuck.pop()
            if request.request_id in self._scheduler.requests:
                trouble = "" if self._kv.cold is None else self._kv.cold.trouble
                chunks.append(self._scheduler.fail(request, no_room_below(trouble)))
        return chunks

    def apply_events(self, news: Iterable[PeerNews] = ()) -> list[TokenChunk]:
        """Applies news of other engines, ends of loads, and look-ups that may be answered now.

        An event of a request that has finished, even by an event right before it, is dropped here and nowhere
        else.
        """
        scheduler = self._scheduler
        chunks: list[TokenChunk] = []
        events: list[PeerNews | LoadEnd] = [*news, *self.tiers.drain_load_ends()]
        for event in events:
            request = scheduler.requests.get(event.request_id)
            if request is None:
                continue
            if not isinstance(event, LoadEnd):
                chunks += event.apply(scheduler, request)
                continue
            self._end_load(request, event)
            if event.failure is not None:
                chunks.append(scheduler.fail(request, event.failure))
        if self._has_ended and (first := next(iter(self._queue.waiting), None)) is not None:
            self._prefetch(first, self._candidates.find_prefix(first))
        self._has_ended = False
        answered = self.tiers.poll()
        if answered:
            self._blocked.difference_update(answered)
            awaiting = (self._awaiting[it] for it in answered if it in self._awaiting)
            for request in sorted(awaiting, key=_order_key):
                scheduler.place(request)
            for request in nsmallest(_NUM_PREFETCHED, self._prefetching.values(), key=_order_key):
                self._prefetch(request, self._candidates.find_prefix(request))
        return chunks

    def _end_load(self, request: Request, end: LoadEnd) -> None:
        """Publishes the loaded blocks of a request that awaited KV, and frees them."""
        self._awaiting.pop(request.request_id, None)
        is_whole = 0 < end.num_loaded == len(request.loaded) and request.kv_source is None
        request.load_tried = not is_whole or request.num_loads >= _MAX_LOADS
        good, failed = request.loaded[: end.num_loaded], request.loaded[end.num_loaded :]
        if failed:
            group, first_failed = failed[0]
            num_fetched = first_failed - request.fetched.start if group == 0 else 0
            request.fetched = request.fetched[: max(0, num_fetched)]
        self._kv.publish_loaded(request.table, request.token_ids, good)
        self._kv.free(request.table)
        request.loaded = ()
        self._queue.enter(request, RequestState.WAITING)
        self._scheduler.batcher.candidates.forget_blocked()

    # ---- the workers, and the engine's loop

    def workers_ready(self, worker: WorkerReady) -> None:
        self.tiers.workers_ready(worker)
        self.peers.workers_ready(worker)

    def workers_lost(self) -> list[Request]:
        """Requests in line may load from now on. Those whose blocks were being filled do not try again: that load
        may be what ended the worker.
        """
        self.peers.workers_lost()
        for request in self._queue.waiting:
            request.load_tried = False
            if request.prefix is None:
                self._on_queued(request, 0)
        self.tiers.workers_lost()
        self._awaiting.clear()
        self._blocked.clear()
        requests = self._scheduler.requests.values()
        awaiting = [request for request in requests if request.is_awaiting_kv]
        for request in awaiting:
            self._kv.free(request.table)
            request.loaded = ()
        return awaiting

    def drain_transfers(self) -> Transfers | None:
        transfers = self.tiers.drain_transfers(self._wanted_soon())
        words = self.tiers.post.drain()
        changes = self.peers.drain_transfers()
        if not (transfers or words):
            return changes
        changes = changes or Transfers()
        return msgspec.structs.replace(changes, transfers=transfers, words=words)

    def _wanted_soon(self) -> list[int]:
        """Blocks of each rank that running requests take in the next steps, while copies are under way; none if
        none are due."""
        if not self.tiers.swap.has_pending:
            return []
        wanted = [0] * self._kv.pool.num_ranks
        for request in self._queue.running:
            num_left = request.num_tokens - request.num_scheduled_tokens
            num_tokens = request.num_scheduled_tokens + max(_NUM_STEPS, num_left)
            table, spread = request.table, self._kv.spread
            rank = table.rank if spread is None else spread.next_rank(table.groups[0])
            wanted[rank] += self._kv.num_missing(table, num_tokens, request.num_computed_tokens)
        most = _NUM_STEPS * self._max_step_blocks + len(self._queue.running) * len(self._kv.groups)
        return [min(count, most) for count in wanted]

    def load_figures(self) -> dict[str, Any]:
        return {"tiers": self.tiers.load_report()} | self.peers.load_figures()

    def next_event_at(self) -> float | None:
        instants = [self.tiers.next_event_at(), self.peers.next_event_at()]
        if self._scheduler.batcher.streams.stuck:
            instants.append(self._scheduler.clock.now())
        return min((at for at in instants if at is not None), default=None)

    def pollables(self) -> list[object]:
        return [*self.peers.pollables(), *self.tiers.pollables()]

    def close(self) -> None:
        self.peers.close()
        self.tiers.close()


def attach_hooks(
    scheduler: Scheduler,
    config: EngineConfig,
    worker: WorkerReady,
    clock: Clock,
    links: EngineLinks | None,
    build_tiers: TiersBuilder,
    recorder: CacheRecorder,
) -> None:
    """Attaches hooks to the scheduler if it has tiers, or `links` to other engines."""
    kv = scheduler.kv
    ledger = TransferLedger(kv.pool)
    peers = NO_PEERS if links is None else links.hooks(config, scheduler, ledger, clock)
    tiers = build_tiers(
        config.kv_tiers,
        worker,
        kv.pool,
        ledger,
        clock,
        recorder,
        peers.connector,
        fail_on_load_failure=config.fail_on_load_failure,
    )
    if tiers is not None or links is not None:
        tiers = tiers or TieredKVConnector([], kv.pool, ledger, clock, layout=kv.layout)
        KVTransferHooks(scheduler, tiers, peers)
