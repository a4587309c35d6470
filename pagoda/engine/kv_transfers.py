# SPDX-License-Identifier: Apache-2.0
"""KV that comes from tiers and other engines, and KV that is held for other engines.

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
from pagoda.engine.request import Request, RequestState
from pagoda.engine.scheduler import Scheduler
from pagoda.ipc.clock import Clock
from pagoda.kv.connector import PrefixRequest
from pagoda.kv.events import CacheRecorder
from pagoda.kv.group_lookup import PendingLookup
from pagoda.kv.manager import PrefixHit
from pagoda.kv.tiered_connector import LoadEnd, TieredKVConnector, TierMatch
from pagoda.kv.transfers import TransferLedger
from pagoda.messages.engine_config import EngineConfig
from pagoda.messages.frontend import (
    FinishReason,
    GenerateRequest,
    KVSource,
    TokenChunk,
    TokenLogprobs,
)
from pagoda.messages.transfers import TransferEnd, Transfers
from pagoda.messages.worker import WorkerReady
from pagoda.plugins.disaggregation.connector import Arrived, Failed, RemoteKV
from pagoda.plugins.disaggregation.exporter import KVExporter, Unwanted
from pagoda.plugins.disaggregation.links import HandoffLinks
from pagoda.plugins.disaggregation.messages import KVPrefilled
from pagoda.plugins.disaggregation.token_conditions import token_conditions
from pagoda.plugins.disaggregation.transfer_tokens import TransferTokens

TiersBuilder = Callable[..., TieredKVConnector | None]
"""`build_tiers`, or the one of a test."""
_NUM_PREFETCHED = 4
"""Requests at the front of the line that are looked at again when there is news: a long prompt takes time."""
_order_key = attrgetter("order_key")


class KVTransferHooks(KVHooks):
    """Loads from a `TieredKVConnector`, and holds KV with a `KVExporter`.

    Every `on_queued` of a connector is followed by exactly one `on_dequeued`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tiers: TieredKVConnector,
        exporter: KVExporter | None = None,
        remote: RemoteKV | None = None,
    ) -> None:
        """`exporter` holds KV; `remote`, if KV is fetched from other engines, is one of the connectors."""
        self._scheduler = scheduler
        self._kv, self._places = scheduler.kv, scheduler.places
        self._max_awaiting = scheduler.limits.max_num_seqs
        self.tiers, self.exporter, self.remote = tiers, exporter, remote
        self.near_pools = tiers.near_pools
        self._awaiting: dict[str, Request] = {}
        self._blocked: set[str] = set()
        """Requests in line that would await an answer, as far as is known."""
        self._prefetching: dict[str, Request] = {}
        """Requests in line for which more KV may be brought nearer."""
        scheduler.attach(self)

    # ---- requests come, go and get on

    def refusal(self, message: GenerateRequest) -> str | None:
        return super().refusal(message) if self.exporter is None else None

    def on_added(self, message: GenerateRequest, request: Request) -> list[TokenChunk]:
        chunks = []
        if message.holds_kv and self.exporter is not None:
            num_blocks = self._kv.num_handed_over(request.num_tokens)
            source = self.exporter.open(request.request_id, num_blocks)
            request.transfer_id = source.transfer_id
            chunks = [TokenChunk(request.request_id, [], kv_source=source)]
        self._on_queued(request, self._num_hits(request))
        return chunks

    def on_refused(self, message: GenerateRequest) -> None:
        if self.remote is not None and message.kv_source is not None:
            self.remote.release(message.kv_source)

    def _on_queued(self, request: Request, num_hits: int) -> None:
        """The request is queued; `num_hits` leading blocks are on the device."""
        has_token_behind = request.kv_source is not None and self._kv.keeps_all
        keys = self._kv.prefix_keys(request.table, request.token_ids, whole=has_token_behind)
        token_ids = request.token_ids[: len(keys) * self._kv.block_size]
        request.prefix = PrefixRequest(request.request_id, keys, token_ids, request.kv_source)
        request.load_tried = False
        self.tiers.on_queued(request.prefix, min(num_hits, len(keys)))

    def _num_hits(self, request: Request) -> int:
        """Leading blocks of the request that are on the device."""
        return self._kv.find_prefix(request.table, request.token_ids).num_blocks

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
        if request.transfer_id is not None and self.exporter is not None:
            missing = self.exporter.missing(request.transfer_id)
            first, end = missing.start, min(missing.stop, table.num_published)
            if end > first:
                parts = self._kv.part(table, missing.stop, first, end)
                keys = table.keys[first + 1 : end + 1]
                self.exporter.hold(request.transfer_id, parts, keys)

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
        transfer_id, request.transfer_id = request.transfer_id, None
        if transfer_id is None or self.exporter is None:
            return None
        key = self._kv.sequence_key(request.table, request.token_ids)
        num_cached_tokens = request.num_cached_tokens or 0
        conditions = _conditions(request)
        return self.exporter.finish(
            transfer_id, key, token_id, conditions, logprobs, num_cached_tokens
        )

    def on_preempted(self, request: Request) -> None:
        """Lets go of held KV: two requests that hold each other's room for others would wait for ever."""
        self._save_tails(request)
        self._drop(request, "its request was preempted", goes_on=True)
        self._on_queued(request, request.table.num_published)

    def on_finished(self, request: Request) -> None:
        if self.exporter is not None:
            self.exporter.request_ended(request.request_id)
        if request.state is RequestState.RUNNING:
            self._save_tails(request)
        self._drop(request, "its request failed or was aborted")
        self._abandon(request)
        self._on_dequeued(request)

    def _drop(self, request: Request, reason: str, *, goes_on: bool = False) -> None:
        transfer_id, request.transfer_id = request.transfer_id, None
        if transfer_id is not None and self.exporter is not None:
            self.exporter.drop(transfer_id, reason, goes_on=goes_on)

    def make_room(self) -> bool:
        return self.exporter is not None and self.exporter.make_room()

    # ---- awaiting and loading

    def leaves_line(self, request: Request) -> bool:
        if not self._may_load(request):
            return False
        hit = self._kv.find_prefix(request.table, request.token_ids)
        if (
            not self._scheduler.quarantine.requests
            and self._places.has_room(request, hit, in_turn=True)
            and self.start(request, hit) is LoadStart.LEFT_LINE
        ):
            return True
        self._abandon(request)
        self._prefetch(request, hit.num_blocks)
        return False

    def _may_load(self, request: Request) -> bool:
        """True if the request has yet to try whether there is KV for it, once for each time that it is queued."""
        return request.prefix is not None and not request.load_tried

    def start(self, request: Request, hit: PrefixHit) -> LoadStart:
        prefix = request.prefix
        if prefix is None or request.load_tried:
            return LoadStart.READY
        found = self.tiers.lookup(prefix, hit.num_blocks)
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
            self._places.enter(request, RequestState.AWAITING_KV)
        elif found.num_blocks == 0:
            return LoadStart.READY
        else:  # there is room for it: going on from a longer prefix takes no more blocks
            self._load(request, found)
            self._places.enter(request, RequestState.LOADING)
        return LoadStart.LEFT_LINE

    def _load(self, request: Request, found: TierMatch) -> None:
        self._leave_line(request)
        request.load_tried = True
        request.fetched = range(found.start + found.num_cached, found.end)
        request.loaded = found.targets
        blocks = self._kv.begin_load(request.table, request.token_ids, found.end, request.loaded)
        self.tiers.load(found, blocks)

    def _leave_line(self, request: Request) -> None:
        self._awaiting.pop(request.request_id, None)
        self._prefetching.pop(request.request_id, None)
        self._blocked.discard(request.request_id)

    def first_ready(self, in_line: Iterable[Request]) -> Request | None:
        if len(self._awaiting) < self._max_awaiting:
            return next(iter(in_line), None)
        if len(self._blocked) >= len(self._places.waiting):
            return None
        return next((request for request in in_line if not self._is_blocked(request)), None)

    def _is_blocked(self, request: Request) -> bool:
        """True if the request cannot go on because too many, and no fewer, await an answer already."""
        prefix = request.prefix
        if prefix is None or request.load_tried:
            return False
        if request.request_id not in self._blocked:
            if not isinstance(self.tiers.lookup(prefix, self._num_hits(request)), PendingLookup):
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

    def _prefetch(self, request: Request, num_hits: int) -> None:
        """Brings the KV of a request without room nearer, and more of it with later news."""
        self._prefetching.pop(request.request_id, None)
        if request.prefix is None or request.load_tried:
            return
        if not self.tiers.prefetch(request.prefix, num_hits):
            self._prefetching[request.request_id] = request

    # ---- news

    def transfer_ended(self, end: TransferEnd) -> None:
        self.tiers.transfer_ended(end)

    def step(self) -> list[TokenChunk]:
        if self.exporter is not None:
            self.exporter.step()
        if self.remote is None:
            return self.apply_events()
        self.remote.step()
        return self.apply_events(self.remote.drain_events())

    def apply_events(self, remote: Iterable[Arrived | Failed] = ()) -> list[TokenChunk]:
        """Applies releases by other engines, their first tokens and failures, ends of loads, and look-ups that
        may be answered now.

        `remote` is news of other engines from which KV is fetched. An event of a request that has finished, even
        by an event right before it, is dropped here and nowhere else.
        """
        scheduler = self._scheduler
        chunks: list[TokenChunk] = []
        unwanted = [] if self.exporter is None else self.exporter.drain_unwanted()
        for event in (*unwanted, *remote, *self.tiers.drain_load_ends()):
            request = scheduler.requests.get(event.request_id)
            if request is None:
                continue
            match event:
                case Unwanted():
                    scheduler.finish(request, FinishReason.ABORT)
                    chunks.append(TokenChunk(request.request_id, [], FinishReason.ABORT))
                case Arrived(_, token):
                    chunks += self._apply_first_token(request, token)
                case Failed(_, reason):
                    error = f"KV of this request could not be fetched: {reason}."
                    chunks.append(scheduler.fail(request, error))
                case LoadEnd(failure=failure):
                    self._end_load(request, event)
                    if failure is not None:
                        chunks.append(scheduler.fail(request, failure))
        news = self.tiers.poll()
        if news:
            self._blocked.difference_update(news)
            awaiting = (self._awaiting[it] for it in news if it in self._awaiting)
            for request in sorted(awaiting, key=_order_key):
                scheduler.place(request)
            for request in nsmallest(_NUM_PREFETCHED, self._prefetching.values(), key=_order_key):
                self._prefetch(request, self._num_hits(request))
        return chunks

    def _apply_first_token(self, request: Request, token: KVPrefilled) -> list[TokenChunk]:
        """Appends the token behind a request's prompt as if it had been sampled here.

        The token is ignored if the request has got further, is being computed and will sample it, asks for
        log-probabilities that the other engine did not send, or would have been sampled under other conditions.
        """
        if request.slot is not None or request.num_pending_samples:
            return []
        if request.transfer_id is not None:  # the engine that fetches from here wants the KV, too
            return []
        if self._kv.sequence_key(request.table, request.token_ids) != token.key:
            return []
        if token.conditions != _conditions(request):
            return []
        num_top, logprobs = request.sampling.logprobs, token.logprobs
        if num_top is None:
            logprobs = None
        elif logprobs is None or len(logprobs.top_token_ids) < num_top:
            return []
        else:
            top_ids, top = logprobs.top_token_ids[:num_top], logprobs.top_logprobs[:num_top]
            logprobs = TokenLogprobs(logprobs.logprob, logprobs.rank, top_ids, top)
        chunk = self._scheduler.append(
            request, [token.token_id], None if logprobs is None else [logprobs]
        )
        num_cached_tokens = min(token.num_cached_tokens, request.num_prompt_tokens)
        return [msgspec.structs.replace(chunk, num_cached_tokens=num_cached_tokens)]

    def _end_load(self, request: Request, end: LoadEnd) -> None:
        """Publishes the loaded blocks of a request that awaited KV, and frees them."""
        self._awaiting.pop(request.request_id, None)
        request.load_tried = True
        good, failed = request.loaded[: end.num_loaded], request.loaded[end.num_loaded :]
        if failed:
            group, first_failed = failed[0]
            num_fetched = first_failed - request.fetched.start if group == 0 else 0
            request.fetched = request.fetched[: max(0, num_fetched)]
        self._kv.publish_loaded(request.table, request.token_ids, good)
        self._kv.free(request.table)
        request.loaded = ()
        self._places.enter(request, RequestState.WAITING)
        self._scheduler.batcher.forget_blocked()

    # ---- the workers, and the engine's loop

    def workers_ready(self, worker: WorkerReady) -> None:
        self.tiers.workers_ready(worker)
        if self.exporter is not None:
            self.exporter.workers_ready(worker)

    def workers_lost(self) -> list[Request]:
        """Requests in line may load from now on. Those whose blocks were being filled do not try again: that load
        may be what ended the worker.
        """
        if self.exporter is not None:
            self.exporter.workers_lost()
        for request in self._places.waiting:
            request.load_tried = False
            if request.prefix is None:
                self._on_queued(request, 0)
        self.tiers.workers_lost()
        self._awaiting.clear()
        self._blocked.clear()
        requests = self._scheduler.requests.values()
        for request in requests:
            request.transfer_id = None
        awaiting = [request for request in requests if request.is_awaiting_kv]
        for request in awaiting:
            self._kv.free(request.table)
            request.loaded = ()
        return awaiting

    def drain_transfers(self) -> Transfers | None:
        transfers = self.tiers.drain_transfers()
        added, removed = ([], []) if self.remote is None else self.remote.drain_peer_changes()
        return Transfers(transfers, added, removed) if transfers or added or removed else None

    def load_figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = {"tiers": self.tiers.load_report()}
        if self.exporter is not None:
            figures |= {
                "num_leases": len(self.exporter.leases),
                "num_wanted_leases": self.exporter.num_wanted,
                "num_leased_blocks": self.exporter.num_leased_blocks,
                "num_leases_expired": self.exporter.num_expired,
            }
        return figures

    def next_event_at(self) -> float | None:
        parts = (self.tiers, self.exporter, self.remote)
        instants = (part.next_event_at() for part in parts if part is not None)
        return min((at for at in instants if at is not None), default=None)

    def pollables(self) -> list[object]:
        own = [] if self.exporter is None else self.exporter.pollables()
        return [*own, *self.tiers.pollables()]

    def close(self) -> None:
        if self.exporter is not None:
            self.exporter.close()
        self.tiers.close()


def _conditions(request: Request) -> bytes:
    return token_conditions(
        request.sampling, request.end_token_ids, request.num_output_tokens, request.grammar
    )


def attach_hooks(
    scheduler: Scheduler,
    config: EngineConfig,
    worker: WorkerReady,
    clock: Clock,
    links: HandoffLinks | None,
    build_tiers: TiersBuilder,
    recorder: CacheRecorder,
) -> None:
    """Attaches hooks to the scheduler if it has tiers, or `links` to other engines."""
    kv = scheduler.kv
    ledger = TransferLedger(kv.pool)
    remote: RemoteKV | None = None
    exporter: KVExporter | None = None
    handoff = config.handoff
    if links is not None and handoff is not None:
        tokens, engine_id = TransferTokens(handoff.keys), links.engine_id
        if links.peers is not None:
            remote = RemoteKV(
                links.peers,
                ledger,
                kv.layout,
                clock,
                tokens=tokens,
                engine_id=engine_id,
                also_holds=handoff.role.holds_kv,
                fails=config.fail_on_load_failure,
            )
        if links.listener is not None:
            tp_size = config.worker.parallel.tensor_parallel_size
            exporter = KVExporter(
                links.listener,
                kv.pool,
                kv.layout,
                clock,
                tokens,
                engine_id,
                handoff.lease_s,
                tp_size,
            )
    tiers = build_tiers(
        config.kv_tiers,
        worker,
        kv.pool,
        ledger,
        clock,
        recorder,
        remote,
        fail_on_load_failure=config.fail_on_load_failure,
    )
    if tiers is not None or exporter is not None:
        tiers = tiers or TieredKVConnector([], kv.pool, ledger, clock, layout=kv.layout)
        KVTransferHooks(scheduler, tiers, exporter, remote)
