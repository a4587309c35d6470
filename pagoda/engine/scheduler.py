# SPDX-License-Identifier: Apache-2.0
"""Continuous batching with overlap scheduling: the scheduler adds requests, applies step results, ends requests.

The scheduler knows no sockets and no devices, and no choice depends on the time. Several steps may be in flight;
all stages of the worker execute them in order, so a block that is freed while a step still uses it can be handed
to a later plan at once. Transfers go on beside the steps; what they must wait for is noted in the block.

Every ending of a request goes through `finish`, and every change of its state through `RequestQueue.enter`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from pagoda.engine.batching import Batcher, SchedulerLimits
from pagoda.engine.encoder_inputs import problem_with_input
from pagoda.engine.kv_hooks import KVHooks
from pagoda.engine.request import OrderKey, Request, RequestState, order_key
from pagoda.engine.request_queue import Quarantine, RequestQueue
from pagoda.engine.request_tracing import RequestRows
from pagoda.engine.result_check import result_fits
from pagoda.engine.structured_output.constraint import Constraint
from pagoda.ipc.clock import Clock
from pagoda.kv.manager import KVManager
from pagoda.messages.frontend import (
    FinishReason,
    GenerateRequest,
    PromptLogprobs,
    TokenChunk,
    TokenLogprobs,
)
from pagoda.messages.spans import problem_with_spans
from pagoda.messages.worker import LostSegments, StepResult, TokenMasks

_NOT_IN_LANGUAGE = "The answer left the language of its grammar."
_UNREADABLE = "KV of this request could not be read from a tier again and again: {}."
_MAX_LOST = 3
"""Losses of cold segments one after the other that a request survives."""
_TOO_COMPLEX = "the grammar takes too much work at this point of the answer."


class Scheduler:
    """Continuous batching over one KV cache."""

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KVManager,
        clock: Clock,
        order: Callable[[GenerateRequest, float, int], OrderKey] = order_key,
    ) -> None:
        """`clock` measures how long requests wait; `order` is the policy (see `order_key`)."""
        if not kv.fit(limits.max_model_len, limits.batch_multiple):
            raise ValueError(
                f"A KV cache of {kv.pool.num_blocks} blocks of {kv.block_size} tokens cannot hold one "
                f"sequence of {limits.max_model_len} tokens, nor can the tiers below it, if there are any."
            )
        self.limits = limits
        self.kv = kv
        self.clock = clock
        self._order = order
        self.requests: dict[str, Request] = {}
        self.queue = RequestQueue(kv, limits.max_num_seqs)
        self.running, self.waiting = self.queue.running, self.queue.waiting
        self.quarantine = Quarantine()
        self.batcher = Batcher(limits, kv, clock, self.queue, self.quarantine)
        self.in_flight, self.counters = self.batcher.in_flight, self.batcher.counters
        self.schedule, self.preempt = self.batcher.schedule, self.batcher.preempt
        self._num_arrivals = 0
        self.on_finished: Callable[[Request], None] = lambda _: None
        """Listener for the end of a request."""
        self.attach(KVHooks())

    def attach(self, hooks: KVHooks) -> None:
        """`hooks` are told of requests and KV from now on."""
        self.hooks = self.batcher.candidates.hooks = hooks

    def trace(self, rows: RequestRows | None) -> None:
        """Tells `rows` what becomes of requests from now on, first where they are; None for nobody."""
        self.queue.rows = rows
        if rows is not None:
            for request in self.requests.values():
                rows.moved(request, RequestState.NEW)

    @property
    def num_awaiting_kv(self) -> int:
        """Requests that neither run nor stand in line."""
        return len(self.requests) - len(self.running) - len(self.waiting)

    # ---- requests come and go

    def add(
        self, message: GenerateRequest, constraint: Constraint | None = None
    ) -> list[TokenChunk]:
        """Takes a request, which may have been here or in another engine before.

        `constraint` is the place in its grammar behind its output tokens.

        A request whose answer is already complete, or that can never run, is answered at once.
        """
        charge = self.batcher.shares.charge(message)
        request = Request(
            message=message,
            order_key=self._order(message, charge.start, self._num_arrivals),
            charge=charge,
            table=self.kv.new_table(message.salt, message.work.adapter, message.work.spans),
            max_model_len=self.limits.max_model_len,
            runs_ahead=self.limits.num_stages == 1,
            constraint=constraint,
            added_at=self.clock.now(),
        )
        self._num_arrivals += 1
        problem = self._refusal(request) or self.hooks.refusal(message)
        if problem is not None:
            self._settle(request)
            return [TokenChunk(message.request_id, [], FinishReason.ERROR, error=problem)]
        if request.num_output_tokens:
            reason, stop_reason = request.finish_reason()
            if reason is not None:
                self._settle(request)
                return [TokenChunk(message.request_id, [], reason, stop_reason)]
        self.requests[request.request_id] = request
        # Here the work is bounded by the bytes of a turn; a step may admit many long prompts that are cached.
        self.kv.prefix_keys(request.table, request.token_ids)
        chunks = self.hooks.on_added(message, request)
        self.place(request)
        return chunks

    def _refusal(self, request: Request) -> str | None:
        if request.request_id in self.requests:
            return f"A request with id {request.request_id} is already running."
        if request.num_prompt_tokens == 0:
            return "The prompt has no tokens."
        if self.limits.whole_prompts and request.work.pooling is None:
            return (
                "The model is an encoder: it gives vectors or scores of texts and generates none."
            )
        if not self.limits.gives_hidden and request.work.pooling is not None:
            return "The server's backend gives tokens alone, and no embeddings; choose another --backend."
        if spans := request.work.spans:
            hidden_size = self.limits.hidden_size
            if hidden_size == 0:
                return "The server's backend embeds tokens alone; choose another --backend."
            problem = problem_with_spans(spans, request.num_prompt_tokens, hidden_size)
            if problem is not None:
                return f"{problem[0].upper()}{problem[1:]}."
        if problem := problem_with_input(request, self.limits):
            return problem
        if request.num_prompt_tokens + request.generates > self.limits.max_model_len:
            return (
                f"The prompt has {request.num_prompt_tokens} tokens, the context holds "
                f"{self.limits.max_model_len} including at least one of the answer, if there is one."
            )
        return None

    def place(self, request: Request) -> None:
        """Puts a new request, or one that awaits KV, in line unless its KV is loaded first."""
        if not self.hooks.leaves_line(request):
            self.queue.enter(request, RequestState.WAITING)

    def abort(self, request_id: str) -> bool:
        """Ends a request without a chunk; returns False if there is none."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self.finish(request, FinishReason.ABORT)
        return True

    def fail(
        self,
        request: Request,
        error: str,
        *,
        blamed_field: str = "",
        timed_out: bool = False,
    ) -> TokenChunk:
        """Ends a request with an error; `error` is a sentence."""
        self.finish(request, FinishReason.ERROR)
        return TokenChunk(
            request.request_id,
            [],
            FinishReason.ERROR,
            error=error,
            blamed_field=blamed_field,
            timed_out=timed_out,
        )

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Every ending of a request goes through here."""
        del self.requests[request.request_id]
        self._settle(request)
        self.on_finished(request)
        if self.batcher.speculator is not None:
            self.batcher.speculator.finished(request)
        self.quarantine.on_finished(request)
        self.hooks.on_finished(request)
        self.batcher.in_flight_prefixes.leave(request)
        self.batcher.free_blocks(request)
        self.batcher.candidates.forget_blocked()
        self.queue.enter(request, RequestState.FINISHED)
        if self.queue.rows is not None:
            self.queue.rows.ended(request, reason)

    def _settle(self, request: Request) -> None:
        """Charges the tenant of a request that ends for what was computed here."""
        num_new = request.num_output_tokens - len(request.message.output_token_ids)
        self.batcher.shares.settle(request.charge, request.num_cached_tokens, num_new)

    # ---- step results

    def awaits(self, result: StepResult) -> bool:
        """True if the result is that of the oldest step in flight."""
        return bool(self.in_flight) and self.in_flight[0].step == result.step

    def problem_with(self, result: StepResult, vocab_size: int) -> str | None:
        """Clause that says why this cannot be the result that is due; None if it can. Of a worker that sends such
        a result, nothing can be trusted any more."""
        if not self.awaits(result):
            return f"a result got lost or came twice, as step {result.step} did not come in turn"
        scheduled = self.in_flight[0].scheduled
        requests, drafts = {part.slot: part.request for part in scheduled}, self.in_flight[0].drafts
        if not result_fits(result, requests, vocab_size, drafts):
            return f"the result of step {result.step} is not of its requests"
        due = {part.slot for part in scheduled if part.samples and _is_due(part.request)}
        asked = self.in_flight[0].proposals
        if any(
            len(token_ids) > asked.get(slot, 0) or max(token_ids, default=0) >= vocab_size
            for slot, token_ids in result.proposals.items()
        ):
            return f"the result of step {result.step} proposes what it was not asked for"
        lacking = due.difference(
            result.slots, result.embeddings, result.errors, result.lost_segments
        )
        if drafts:
            for slot, (*right, _) in zip(result.slots, result.token_ids, strict=True):
                if slot in drafts and right != drafts[slot][: len(right)]:
                    return f"the result of step {result.step} leaves the drafts of slot {slot}"
        return f"the result of step {result.step} lacks slot {min(lacking)}" if lacking else None

    def update(self, result: StepResult) -> list[TokenChunk]:
        """Applies the result of the oldest step in flight; returns what its requests gained.

        Raises RuntimeError if the result does not belong to that step; the worker cannot be trusted any more.
        """
        if not self.awaits(result):
            raise RuntimeError(
                f"The worker answered step {result.step}, which is not the next one."
            )
        step = self.in_flight.popleft()
        self.counters.num_steps += 1
        sampled = dict(zip(result.slots, result.token_ids, strict=True))
        logprobs, errors = result.logprobs, result.errors
        if self.kv.cold is not None:
            self.kv.cold.step_done(step.step)
            self.counters.num_streamed_bytes += result.streamed_bytes
        self.batcher.streams.observe(step, result.step_time_s, result.stream_time_s)
        chunks: list[TokenChunk] = []
        for part in step.scheduled:
            request, slot, samples = part.request, part.slot, part.samples
            is_known = False
            if slot in step.drafts:
                request.is_drafted = False
            if samples and request.num_overtaken:
                request.num_overtaken -= 1
                samples = False
            elif samples:
                is_known = request.num_known_samples > 0
                if is_known:
                    request.num_known_samples -= 1
                else:
                    request.num_pending_samples -= 1
                    request.num_masked = 0
            if request.state is RequestState.FINISHED:
                continue
            if slot in errors:
                field = result.blamed_fields.get(slot, "")
                chunks.append(self.fail(request, errors[slot], blamed_field=field))
                continue
            is_current = part.admission == request.admission and request.slot is not None
            if slot in result.lost_segments:
                if is_current:
                    chunks += self._lose_segments(request, result.lost_segments[slot])
                continue
            if is_current:  # else the request was preempted meanwhile, and only its sample counts
                self._confirm(request, part.num_tokens)
                request.got_on(part.num_cold)
            scores = result.prompt_logprobs.get(slot)
            if scores is not None:
                scores = request.add_scores(scores)
            if samples and not request.generates:
                chunks.append(self._end_prompt(request, scores, result.embeddings.get(slot)))
            elif samples:
                if not sampled.get(slot):
                    raise RuntimeError(f"The result of step {result.step} lacks slot {slot}.")
                if is_known:
                    continue
                num_more = len(sampled[slot]) - 1
                draft = step.drafts.get(slot)
                if num_more and request.constraint is not None and draft is None:
                    raise RuntimeError(
                        f"Step {result.step} gave several tokens of slot {slot}, but a mask is for one."
                    )
                request.overtake(num_more)
                chunk = self.append(request, sampled[slot], logprobs.get(slot))
                self.counters.num_generated_tokens += len(chunk.token_ids)
                if draft is not None:
                    self.counters.count_draft(len(draft), num_more)
                    chunk = msgspec.structs.replace(
                        chunk, num_drafted=len(draft), num_accepted=num_more
                    )
                    if is_current and chunk.finish_reason is None:
                        num_kept = 0 if self.kv.keeps_states else num_more
                        request.num_scheduled_tokens -= len(draft) - num_kept
                        self._confirm(request, num_kept)
                if scores is not None:
                    chunk = msgspec.structs.replace(chunk, prompt_logprobs=scores)
                chunks.append(chunk)
            elif is_current or scores is not None:
                chunk = TokenChunk(
                    request.request_id,
                    [],
                    num_computed_tokens=request.num_computed_tokens,
                    prompt_logprobs=scores,
                )
                chunks.append(_with_queue_time(chunk, request))
        if self.batcher.speculator is not None:
            self.batcher.speculator.observe(step, result)
        return chunks

    def _confirm(self, request: Request, num_tokens: int) -> None:
        """Further tokens of a running request are computed."""
        self.queue.count_computed(request, num_tokens)
        if request.num_computed_tokens >= (request.table.num_published + 1) * self.kv.block_size:
            self.kv.publish(request.table, request.token_ids, request.num_computed_tokens)
            self.batcher.in_flight_prefixes.advance(request)
            self.hooks.on_published(request)
        self._drop_behind(request)
        if request.crash_count:
            self.quarantine.on_progress(request)

    def _lose_segments(self, request: Request, lost: LostSegments) -> list[TokenChunk]:
        """Cold segments of a running request could not be read: it is computed again from there, a few times."""
        request.num_lost += 1
        request.last_lost = max(request.last_lost, lost.first)
        self.counters.num_lost_segments += 1
        if self.kv.cold is not None:
            self.kv.cold.lose(request.table, lost)
        if request.num_lost > _MAX_LOST:
            return [self.fail(request, _UNREADABLE.format(lost.reason))]
        self.preempt(request)
        return []

    def _drop_behind(self, request: Request) -> None:
        """Gives back blocks that lie behind the windows of all tokens to come."""
        last_step = self.batcher.next_step - 1
        if self.kv.keeps_all or not self.kv.drop_behind(
            request.table, request.num_computed_tokens, last_step
        ):
            return
        self.queue.update(request)

    def append(
        self, request: Request, sampled: list[int], logprobs: list[TokenLogprobs] | None
    ) -> TokenChunk:
        """Appends what a step sampled of a request, up to the token that ends the answer."""
        source = reason = stop_reason = None
        token_ids: list[int] = []
        for index, token_id in enumerate(sampled):
            if request.transfer_id is not None:
                first = None if logprobs is None else logprobs[index]
                source = self.hooks.on_prefilled(request, token_id, first)
            self.queue.append(request, token_id)
            token_ids.append(token_id)
            reason, stop_reason = request.finish_reason()
            if reason is None and request.constraint is not None:
                if not request.constraint.consume(token_id):
                    if request.constraint.is_exhausted:
                        return self.fail(request, _TOO_COMPLEX, blamed_field="grammar")
                    return self.fail(request, _NOT_IN_LANGUAGE)
                if index == len(sampled) - 1:
                    reason, stop_reason = self._append_forced(request, token_ids)
            if reason is not None:
                break
        if reason is not None:
            self.finish(request, reason)
        chunk = TokenChunk(
            request.request_id,
            token_ids,
            reason,
            stop_reason,
            None if logprobs is None else logprobs[: len(token_ids)],
            request.num_cached_tokens or 0,
            kv_source=source,
        )
        return chunk if request.queue_time_s is None else _with_queue_time(chunk, request)

    def _end_prompt(
        self, request: Request, scores: PromptLogprobs | None, embedding: bytes | None
    ) -> TokenChunk:
        """Ends a request of which only the prompt is computed."""
        self.finish(request, FinishReason.LENGTH)
        chunk = TokenChunk(
            request.request_id,
            [],
            FinishReason.LENGTH,
            num_cached_tokens=request.num_cached_tokens or 0,
            prompt_logprobs=scores,
            embedding=embedding,
        )
        return _with_queue_time(chunk, request)

    # ---- grammars

    def _append_forced(
        self, request: Request, token_ids: list[int]
    ) -> tuple[FinishReason | None, int | None]:
        """Appends the tokens that the grammar forces, to `token_ids` too, until one ends the answer."""
        constraint = request.constraint
        if constraint is None or not request.may_force_tokens:
            return None, None
        for token_id in constraint.forced_tokens():
            self.queue.append(request, token_id)
            token_ids.append(token_id)
            reason, stop_reason = request.finish_reason()
            if reason is not None:
                return reason, stop_reason
            if not constraint.consume(token_id):
                break  # too much work, of which the next mask tells
            request.expect(token_id)
        return None, None

    def take_masks(self) -> tuple[list[TokenMasks], list[TokenChunk]]:
        """The masks of all steps in flight for which they can be made now, each once, and the ends of requests
        whose grammars take too much work."""
        messages: list[TokenMasks] = []
        chunks: list[TokenChunk] = []
        unmasked = self.batcher.unmasked
        while unmasked:
            step = unmasked[0]
            parts = [
                (part.slot, part.request)
                for part in step.scheduled
                if part.samples and part.request.constraint is not None
            ]
            # Of a request, all samples before this one must be known.
            if any(r.num_masked and r.state is not RequestState.FINISHED for _, r in parts):
                break
            message = TokenMasks(unmasked.popleft().step)
            for slot, request in parts:
                if request.state is not RequestState.FINISHED:
                    chunks += self._mask(request, slot, message, step.drafts.get(slot, ()))
            messages.append(message)
        return messages, chunks

    def _mask(
        self, request: Request, slot: int, message: TokenMasks, draft: Sequence[int]
    ) -> list[TokenChunk]:
        if request.known_tokens:
            message.tokens[slot] = request.known_tokens.popleft()
            return []
        constraint = request.constraint
        if constraint is None:
            raise RuntimeError(f"Request {request.request_id} has no grammar.")
        request.num_masked = 1
        if request.may_force_tokens and (forced := constraint.forced_tokens()):
            message.tokens[slot] = forced[0]
            return []
        mask = constraint.mask(request.held_back_tokens())
        if mask is None:
            return [self.fail(request, _TOO_COMPLEX, blamed_field="grammar")]
        message.masks[slot] = mask
        if draft:
            held_back = [request.held_back_tokens(count) for count in range(1, len(draft) + 1)]
            message.draft_masks[slot] = constraint.masks_behind(draft, held_back)
        return []

    # ---- when the worker is lost

    def recover(self, suspicion: int = 1) -> list[TokenChunk]:
        """The worker and all KV are gone: every request waits again, with the tokens it has. `suspicion`
        is as in `WorkerLost`.

        Returns the ends of requests that crashed the worker too often (`Quarantine`).
        """
        crashed = {part.request for step in self.in_flight for part in step.scheduled}
        self.in_flight.clear()
        self.batcher.unmasked.clear()
        self.batcher.in_flight_prefixes.clear()
        failing = self.quarantine.on_crash(crashed, suspicion)
        for request in list(self.running):
            self.kv.free(request.table)
            self._wait_again(request)
        for request in self.hooks.workers_lost():
            self._wait_again(request)
        for request in self.waiting:
            request.forget_steps()
            request.num_saved = request.num_saved_tail = 0
        if self.kv.cold is not None:
            self.kv.cold.workers_lost()
        self.kv.pool.clear_cache()
        self.queue.drain_freed_slots()
        self.batcher.candidates.forget_blocked()
        return [
            self.fail(request, "The worker died whenever this request was computed.")
            for request in failing
        ]

    def _wait_again(self, request: Request) -> None:
        """The request waits: its KV, or the KV on its way, is lost."""
        self.queue.forget_computed(request)
        self.queue.enter(request, RequestState.WAITING, is_lost=True)


def _is_due(request: Request) -> bool:
    """True if the oldest step in flight that is to sample for the request must say something of it."""
    is_wanted = request.generates or request.work.pooling is not None
    return is_wanted and not request.num_overtaken and request.state is not RequestState.FINISHED


def _with_queue_time(chunk: TokenChunk, request: Request) -> TokenChunk:
    """The chunk, with how long the request waited if no chunk has said so before."""
    queue_time_s, request.queue_time_s = request.queue_time_s, None
    return msgspec.structs.replace(chunk, queue_time_s=queue_time_s)
