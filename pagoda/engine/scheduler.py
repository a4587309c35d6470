"""Continuous batching: what becomes of requests from step to step.

The scheduler knows no sockets and no devices, and no choice depends on the time. Several steps may be in flight;
all stages of the worker execute them in order, so a block that is freed while a step still uses it can be handed
to a later plan at once. Transfers go on beside the steps; what they must wait for is noted in the block.

Every ending of a request goes through `_finish`, and every change of its state through `Places.enter`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from pagoda.engine.batching import Batcher, SchedulerLimits
from pagoda.engine.kv_exports import KVExports
from pagoda.engine.kv_loading import KVLoader, LoadStart
from pagoda.engine.places import Places, Quarantine
from pagoda.engine.request import OrderKey, Request, RequestState, order_key
from pagoda.engine.request_tracing import RequestRows
from pagoda.ipc.clock import Clock
from pagoda.kv.manager import KVManager
from pagoda.kv.tiered_connector import LoadEnd, TieredKVConnector
from pagoda.messages.frontend import FinishReason, GenerateRequest, TokenChunk, TokenLogprobs
from pagoda.messages.worker import StepResult
from pagoda.pd.connector import Arrived, Failed
from pagoda.pd.exporter import KVExporter, Unwanted
from pagoda.pd.messages import KVPrefilled


class Scheduler:
    """Continuous batching over one KV cache."""

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KVManager,
        clock: Clock,
        tiers: TieredKVConnector | None = None,
        exporter: KVExporter | None = None,
        order: Callable[[GenerateRequest, int], OrderKey] = order_key,
    ) -> None:
        """`clock` measures how long requests wait; `order` is the policy (see `order_key`)."""
        if kv.pool.num_blocks * kv.block_size < limits.max_model_len:
            raise ValueError(
                f"A KV cache of {kv.pool.num_blocks} blocks of {kv.block_size} tokens cannot hold one "
                f"sequence of {limits.max_model_len} tokens."
            )
        self.limits = limits
        self.kv = kv
        self.tiers = tiers
        self.exporter = exporter
        self._clock = clock
        self._order = order
        self.requests: dict[str, Request] = {}
        self.places = Places(kv, limits.max_num_seqs)
        self.running, self.waiting = self.places.running, self.places.waiting
        self.loader = KVLoader(kv, tiers, limits.max_num_seqs)
        self.quarantine = Quarantine()
        self._exports = KVExports(kv, exporter)
        self.batcher = Batcher(
            limits, kv, clock, self.places, self.loader, self._exports, self.quarantine
        )
        self.in_flight, self.counters = self.batcher.in_flight, self.batcher.counters
        self.schedule, self.preempt = self.batcher.schedule, self.batcher.preempt
        self._num_arrivals = 0

    def trace(self, rows: RequestRows | None) -> None:
        """Tells `rows` what becomes of requests from now on, first where they are; None for nobody."""
        self.places.rows = rows
        if rows is not None:
            for request in self.requests.values():
                rows.moved(request, RequestState.NEW)

    # ---- requests come and go

    def add(self, message: GenerateRequest) -> list[TokenChunk]:
        """Takes a request, which may have been here or in another engine before.

        A request whose answer is already complete, or that can never run, is answered at once.
        """
        request = Request(
            message=message,
            order_key=self._order(message, self._num_arrivals),
            table=self.kv.new_table(message.cache_salt),
            max_model_len=self.limits.max_model_len,
            runs_ahead=self.limits.num_stages == 1,
            added_at=self._clock.now(),
        )
        self._num_arrivals += 1
        problem = self._refusal(request) or self._exports.refusal(message)
        if problem is not None:
            return [TokenChunk(message.request_id, [], FinishReason.ERROR, error=problem)]
        if request.num_output_tokens:
            reason, stop_reason = request.finish_reason()
            if reason is not None:
                return [TokenChunk(message.request_id, [], reason, stop_reason)]
        self.requests[request.request_id] = request
        chunks = self._exports.open(message, request)
        if self.tiers is not None:
            hits = self.kv.find_prefix(request.table, request.token_ids)
            self.loader.on_queued(request, len(hits))
        self._place(request)
        return chunks

    def _refusal(self, request: Request) -> str | None:
        if request.request_id in self.requests:
            return f"A request with id {request.request_id} is already running."
        if request.num_prompt_tokens == 0:
            return "The prompt has no tokens."
        if request.num_prompt_tokens >= self.limits.max_model_len:
            return (
                f"The prompt has {request.num_prompt_tokens} tokens, "
                f"the context holds {self.limits.max_model_len} including at least one of the answer."
            )
        return None

    def _place(self, request: Request) -> None:
        """Lets a new request, or one that awaits KV, load if there is room besides those in line before it.

        Else the request goes in line.
        """
        if self.loader.may_load(request):
            hits = self.kv.find_prefix(request.table, request.token_ids)
            if (
                not self.quarantine.requests
                and self.places.has_room(request, hits, in_turn=True)
                and self.batcher.start_load(request, hits)
                in (LoadStart.AWAITING, LoadStart.LOADING)
            ):
                return
            self.loader.abandon(request)
            self.loader.prefetch(request, len(hits))
        self.places.enter(request, RequestState.WAITING)

    def abort(self, request_id: str) -> bool:
        """Ends a request without a chunk; returns False if there is none."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._finish(request, FinishReason.ABORT)
        return True

    def _fail(self, request: Request, error: str) -> TokenChunk:
        """`error` is a sentence."""
        self._finish(request, FinishReason.ERROR)
        return TokenChunk(request.request_id, [], FinishReason.ERROR, error=error)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """Every ending of a request goes through here."""
        del self.requests[request.request_id]
        self.quarantine.on_finished(request)
        self._exports.on_finished(request)
        self.loader.abandon(request)
        self.loader.on_dequeued(request)
        self.batcher.free_blocks(request)
        self.batcher.forget_blocked()
        self.places.enter(request, RequestState.FINISHED)
        if self.places.rows is not None:
            self.places.rows.ended(request, reason)

    # ---- step results

    def update(self, result: StepResult) -> list[TokenChunk]:
        """Applies the result of the oldest step in flight; returns what its requests gained.

        Raises RuntimeError if the result does not belong to that step; the worker cannot be trusted any more.
        """
        if not self.in_flight or self.in_flight[0].step != result.step:
            raise RuntimeError(
                f"The worker answered step {result.step}, which is not the next one."
            )
        step = self.in_flight.popleft()
        self.counters.num_steps += 1
        sampled = dict(zip(result.slots, result.token_ids, strict=True))
        logprobs, errors = result.logprobs, result.errors
        chunks: list[TokenChunk] = []
        for part in step.scheduled:
            request, slot, samples = part.request, part.slot, part.samples
            if samples:
                request.num_pending_samples -= 1
            if request.state is RequestState.FINISHED:
                continue
            if slot in errors:
                chunks.append(self._fail(request, errors[slot]))
                continue
            is_current = part.admission == request.admission and request.slot is not None
            if is_current:  # else the request was preempted meanwhile, and only its sample counts
                self._confirm(request, part.num_tokens)
            if samples:
                if slot not in sampled:
                    raise RuntimeError(f"The result of step {result.step} lacks slot {slot}.")
                self.counters.num_generated_tokens += 1
                chunks.append(self._append(request, sampled[slot], logprobs.get(slot)))
            elif is_current:
                chunk = TokenChunk(
                    request.request_id, [], num_computed_tokens=request.num_computed_tokens
                )
                chunks.append(_with_queue_time(chunk, request))
        return chunks

    def _confirm(self, request: Request, num_tokens: int) -> None:
        """Further tokens of a running request are computed."""
        self.places.count_computed(request, num_tokens)
        if request.num_computed_tokens >= (request.table.num_published + 1) * self.kv.block_size:
            self.kv.publish(request.table, request.token_ids, request.num_computed_tokens)
            self.batcher.on_published(request)
        if request.crash_count:
            self.quarantine.on_progress(request)

    def _append(
        self, request: Request, token_id: int, logprobs: TokenLogprobs | None
    ) -> TokenChunk:
        source = None
        if request.transfer_id is not None:
            source = self._exports.on_prefilled(request, token_id, logprobs)
        self.places.append(request, token_id)
        reason, stop_reason = request.finish_reason()
        if reason is not None:
            self._finish(request, reason)
        chunk = TokenChunk(
            request.request_id,
            [token_id],
            reason,
            stop_reason,
            None if logprobs is None else [logprobs],
            request.num_cached_tokens or 0,
            kv_source=source,
        )
        return chunk if request.queue_time_s is None else _with_queue_time(chunk, request)

    # ---- events of KV

    def apply_kv_events(self, remote: Iterable[Arrived | Failed] = ()) -> list[TokenChunk]:
        """Applies what has happened to KV since the last call: releases by other engines, their first tokens and
        failures, ends of loads, and look-ups that may be answered now.

        `remote` is news of other engines from which KV is fetched. An event of a request that has finished, even
        by an event right before it, is dropped here and nowhere else.
        """
        chunks: list[TokenChunk] = []
        unwanted, load_ends = self._exports.drain_unwanted(), self.loader.drain_load_ends()
        for event in (*unwanted, *remote, *load_ends):
            request = self.requests.get(event.request_id)
            if request is None:
                continue
            match event:
                case Unwanted():
                    self._finish(request, FinishReason.ABORT)
                    chunks.append(TokenChunk(request.request_id, [], FinishReason.ABORT))
                case Arrived(_, token):
                    chunks += self._apply_first_token(request, token)
                case Failed(_, reason):
                    error = f"KV of this request could not be fetched: {reason}."
                    chunks.append(self._fail(request, error))
                case LoadEnd(failure=failure):
                    self.loader.end_load(request, event)
                    self.places.enter(request, RequestState.WAITING)
                    self.batcher.forget_blocked()
                    if failure is not None:
                        chunks.append(self._fail(request, failure))
        news = self.loader.poll()
        if news is not None:
            for request in news:
                self._place(request)
            self.loader.prefetch_more()
        return chunks

    def _apply_first_token(self, request: Request, token: KVPrefilled) -> list[TokenChunk]:
        """Appends the token behind a request's prompt as if it had been sampled here.

        The token is ignored if the request has got further, is being computed and will sample it, or asks for
        log-probabilities that the other engine did not send.
        """
        if request.slot is not None or request.num_pending_samples:
            return []
        if request.transfer_id is not None:  # the engine that fetches from here wants the KV, too
            return []
        if self.kv.sequence_key(request.table, request.token_ids) != token.key:
            return []
        num_top, logprobs = request.sampling.logprobs, token.logprobs
        if num_top is None:
            logprobs = None
        elif logprobs is None or len(logprobs.top_token_ids) < num_top:
            return []
        else:
            top_ids, top = logprobs.top_token_ids[:num_top], logprobs.top_logprobs[:num_top]
            logprobs = TokenLogprobs(logprobs.logprob, logprobs.rank, top_ids, top)
        chunk = self._append(request, token.token_id, logprobs)
        return [msgspec.structs.replace(chunk, num_cached_tokens=token.num_cached_tokens)]

    # ---- when the worker is lost

    def recover(self) -> list[TokenChunk]:
        """The worker and all KV are gone: every request waits again, with the tokens it has.

        Returns the ends of requests that crashed the worker too often (`Quarantine`).
        """
        crashed = {part.request for step in self.in_flight for part in step.scheduled}
        self.in_flight.clear()
        failing = self.quarantine.on_crash(crashed)
        self._exports.on_workers_lost(self.requests.values())
        for request in list(self.running):
            self.kv.free(request.table)
            self._wait_again(request)
        for request in self.loader.on_workers_lost(list(self.waiting)):
            self._wait_again(request)
        for request in self.waiting:
            request.num_pending_samples = request.num_saved = 0
        self.kv.pool.clear_cache()
        self.places.drain_freed_slots()
        self.batcher.forget_blocked()
        return [
            self._fail(request, "The worker died whenever this request was computed.")
            for request in failing
        ]

    def _wait_again(self, request: Request) -> None:
        """The request waits: its KV, or the KV on its way, is lost."""
        self.places.forget_computed(request)
        self.places.enter(request, RequestState.WAITING, is_lost=True)


def _with_queue_time(chunk: TokenChunk, request: Request) -> TokenChunk:
    """The chunk, with how long the request waited if no chunk has said so before."""
    queue_time_s, request.queue_time_s = request.queue_time_s, None
    return msgspec.structs.replace(chunk, queue_time_s=queue_time_s)
