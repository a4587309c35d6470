"""Which request computes how many tokens in the next step.

There is no prefill phase and no decode phase. A request has tokens and computed tokens; a step gives each
chosen request some of those not yet computed, within a token budget. Chunked prefill, prefix hits, preemption
and recovery only change the two numbers. A request samples when its computed tokens reach its tokens.

The scheduler is pure: it knows no sockets and no devices, and its clock only measures: no choice depends on the
time. `schedule` makes a plan, `update` applies the results in the order of the plans. Several steps may be in
flight; the worker executes them in order, so a block that is freed while a step still uses it can be handed to
a later plan at once. The same holds for a worker of several stages, each of which has KV of its own and executes
the plans in order. Transfers go on beside the steps; what they must wait for is noted in the block.

With several stages, a request whose sample is pending waits for it, and decoding requests are spread over as many
steps as there are stages: while one stage computes some of them, the others compute the rest.

A turn of the engine applies events in this order: step results (`update`); then in `apply_kv_events` releases by
other engines, first tokens and failures of other engines, ends of loads, and look-ups that may be answered now.
Every ending of a request goes through `_finish`, and every change of its state through `_enter`.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import msgspec

from pagoda.engine.kv_exports import KVExports, Unwanted
from pagoda.engine.kv_loading import KVLoader, LoadStart
from pagoda.engine.limits import SchedulerLimits
from pagoda.engine.plan import InFlightStep, PlanBuilder
from pagoda.engine.quarantine import Quarantine
from pagoda.engine.request import OrderKey, Request, RequestState, order_key
from pagoda.engine.request_tracing import RequestRows
from pagoda.engine.waiting_queue import Reserved, WaitingQueue
from pagoda.ipc.clock import Clock
from pagoda.kv.block_pool import Block
from pagoda.kv.manager import KVManager
from pagoda.kv.tiered_connector import LoadEnd, TieredKVConnector
from pagoda.messages.frontend import (
    FinishReason,
    GenerateRequest,
    TokenChunk,
    TokenLogprobs,
)
from pagoda.messages.worker import SlotStart, StepPlan, StepResult
from pagoda.pd.connector import Arrived, Failed
from pagoda.pd.exporter import FirstToken, KVExporter

_BLOCKED_STEPS = 16
"""Steps after which a request that did not fit is looked at again, when nothing became free."""

_key = attrgetter("order_key")
_NO_KEY: OrderKey = (-(2**63), -1)
"""In front of every order key."""


class _Blocked(NamedTuple):
    """A waiting request that did not fit, and what was there at the time."""

    request: Request
    step: int
    num_available: int
    num_running: int


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
        self._clock = clock
        self._order = order
        self.num_preemptions = 0
        self.num_steps = 0
        self.num_prefix_hit_tokens = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_pending_tokens = 0
        """Prompt and output tokens of all requests that are not computed yet."""
        self._requests: dict[str, Request] = {}
        self._running: list[Request] = []
        """In order."""
        self._waiting = WaitingQueue()
        self._num_reserved_blocks = 0
        """`reserved_blocks` of the requests that run or are being loaded, added up."""
        self.tiers = tiers
        self.exporter = exporter
        self._loader = KVLoader(kv, tiers, limits.max_num_seqs)
        self._exports = KVExports(kv, exporter)
        self._rows: RequestRows | None = None
        self._quarantine = Quarantine()
        self._blocked: _Blocked | None = None
        self._last_was_decodes = False
        """With `mixed_steps` off: the kind of the last step."""
        self._in_flight: deque[InFlightStep] = deque()
        self._free_slots = list(range(limits.max_num_seqs))
        self._freed_slots: list[int] = []
        """Slots that the worker has not been told about yet."""
        self._num_arrivals = 0
        self._step = 0

    # ---- what others may look at

    @property
    def requests(self) -> Mapping[str, Request]:
        return self._requests

    @property
    def quarantined(self) -> Collection[Request]:
        return self._quarantine.requests

    @property
    def in_flight(self) -> Sequence[InFlightStep]:
        return self._in_flight

    @property
    def next_step(self) -> int:
        return self._step

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_awaiting_kv(self) -> int:
        return self._loader.num_requests

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def has_requests(self) -> bool:
        return bool(self._requests)

    def trace(self, rows: RequestRows | None) -> None:
        """Tells `rows` what becomes of requests from now on, first where they are; None for nobody."""
        self._rows = rows
        if rows is None:
            return
        for request in self._requests.values():
            if request.state is RequestState.RUNNING:
                rows.admitted(request)
            elif request.is_awaiting_kv:
                rows.awaits_kv(request)
            else:
                rows.queued(request)

    def check(self) -> None:
        """Verifies the scheduler's own bookkeeping; for tests and debugging.

        Raises:
            ValueError: a request is in two places or in none, or a sum is wrong.
        """
        loader = self._loader
        places = {
            RequestState.RUNNING: self._running,
            RequestState.WAITING: list(self._waiting),
            RequestState.AWAITING_KV: list(loader.awaiting),
            RequestState.LOADING: list(loader.loading),
        }
        found = {(r.request_id, state) for state, requests in places.items() for r in requests}
        if found != {(r.request_id, r.state) for r in self._requests.values()}:
            raise ValueError("A request is not in the place of its state.")
        if sum(map(len, places.values())) != len(self._requests):
            raise ValueError("A request is in a place twice.")
        for state in (RequestState.RUNNING, RequestState.WAITING):
            if sorted(places[state], key=_key) != places[state]:
                raise ValueError(f"Requests that are {state.name} are out of order.")
        if any(r.state is not RequestState.WAITING for r in loader.prefetching):
            raise ValueError("KV is prefetched for a request that is not in line.")
        for request in self._requests.values():
            if request.state is not RequestState.AWAITING_KV and (
                request.reserved_blocks != self._blocks_to_reserve(request)
            ):
                raise ValueError(f"Request {request.request_id} reserves a wrong number of blocks.")
        holders = [*self._running, *places[RequestState.LOADING]]
        sums = {
            "reserved blocks": (self._num_reserved_blocks, sum(r.reserved_blocks for r in holders)),
            "reserved blocks of requests in line": (
                self._waiting.ahead_of((2**63, 0)).num_blocks,
                sum(r.reserved_blocks for r in self._waiting),
            ),
            "pending tokens": (
                self.num_pending_tokens,
                sum(r.num_tokens - r.num_computed_tokens for r in self._requests.values()),
            ),
            "slots": (len(self._free_slots) + len(self._running), self.limits.max_num_seqs),
        }
        for what, (counted, true) in sums.items():
            if counted != true:
                raise ValueError(f"{counted} {what} are counted, there are {true}.")

    # ---- requests come and go

    def add(self, message: GenerateRequest) -> list[TokenChunk]:
        """Takes a request: a first arrival or a return; both are the same.

        A request whose answer is already complete, or that can never run, is answered at once.
        """
        request = Request(
            message,
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
            reason, stop_reason = self._finish_reason(request)
            if reason is not None:
                return [TokenChunk(message.request_id, [], reason, stop_reason)]
        self._requests[request.request_id] = request
        self.num_pending_tokens += request.num_tokens
        chunks = self._exports.open(message, request)
        if self._loader.has_tiers:
            hits = self.kv.find_prefix(request.table, request.token_ids)
            self._loader.on_queued(request, len(hits))
        self._place(request)
        return chunks

    def _refusal(self, request: Request) -> str | None:
        if request.request_id in self._requests:
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
        if self._loader.may_load(request):
            hits = self.kv.find_prefix(request.table, request.token_ids)
            if (
                not self._quarantine.requests
                and self._has_room(request, hits, self._waiting.ahead_of(request.order_key))
                and self._start_load(request, hits) in (LoadStart.AWAITING, LoadStart.LOADING)
            ):
                return
            self._loader.abandon(request)
            self._loader.prefetch(request, len(hits))
        self._enter(request, RequestState.WAITING)
        if self._rows is not None:
            self._rows.queued(request)

    def _start_load(self, request: Request, hits: list[Block]) -> LoadStart:
        start = self._loader.start(request, hits)
        if start in (LoadStart.AWAITING, LoadStart.LOADING):
            is_loading = start is LoadStart.LOADING
            self._enter(request, RequestState.LOADING if is_loading else RequestState.AWAITING_KV)
            if self._rows is not None:
                self._rows.awaits_kv(request)
        return start

    def abort(self, request_id: str) -> bool:
        """Ends a request without a chunk; returns False if there is none."""
        request = self._requests.get(request_id)
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
        del self._requests[request.request_id]
        self.num_pending_tokens -= request.num_tokens - request.num_computed_tokens
        self._quarantine.on_finished(request)
        self._exports.on_finished(request)
        self._loader.abandon(request)
        self._loader.on_dequeued(request)
        self._free_blocks(request)
        self._enter(request, RequestState.FINISHED)
        self._blocked = None
        if self._rows is not None:
            self._rows.ended(request, reason)

    def _free_blocks(self, request: Request) -> None:
        """Steps in flight may still use the blocks: what a preempted request samples in them counts."""
        is_confirmed = request.num_computed_tokens == request.num_scheduled_tokens
        self.kv.free(request.table, last_step=-1 if is_confirmed else self._step - 1)

    def _enter(self, request: Request, state: RequestState) -> None:
        """Moves the request to the place of `state`, and what it reserves with it."""
        before, request.state = request.state, state
        if before is RequestState.RUNNING:
            self._leave_slot(request)
        elif before is RequestState.LOADING:
            self._num_reserved_blocks -= request.reserved_blocks
        elif before is RequestState.WAITING:
            self._waiting.remove(request)
        request.reserved_blocks = 0
        if state is RequestState.WAITING:
            request.reserved_blocks = self._blocks_to_reserve(request)
            self._waiting.add(request)
        elif state is RequestState.RUNNING:
            insort(self._running, request, key=_key)
            request.slot = heapq.heappop(self._free_slots)
            self._update_reserved(request)
        elif state is RequestState.LOADING:
            self._update_reserved(request)

    def _leave_slot(self, request: Request) -> None:
        slot = request.slot
        if slot is None:
            raise RuntimeError(f"Request {request.request_id} has no slot.")
        del self._running[bisect_left(self._running, request.order_key, key=_key)]
        heapq.heappush(self._free_slots, slot)
        self._freed_slots.append(slot)
        request.slot = None
        self._num_reserved_blocks -= request.reserved_blocks

    # ---- room

    def _blocks_to_reserve(self, request: Request) -> int:
        """Blocks that the known tokens of the request still need, and one more: a newcomer must not be preempted
        right away."""
        missing = self.kv.num_blocks_for(request.num_tokens) - len(request.table.blocks)
        return max(0, missing) + 1

    def _update_reserved(self, request: Request) -> None:
        """Tokens or blocks of the request have changed."""
        blocks = self._blocks_to_reserve(request)
        if request.state is RequestState.WAITING:
            self._waiting.remove(request)
            request.reserved_blocks = blocks
            self._waiting.add(request)
        elif request.state in (RequestState.RUNNING, RequestState.LOADING):
            self._num_reserved_blocks += blocks - request.reserved_blocks
            request.reserved_blocks = blocks

    @property
    def _reserved(self) -> Reserved:
        """What requests that run or are being loaded keep."""
        return Reserved(len(self._running) + self._loader.num_loading, self._num_reserved_blocks)

    def _has_room(self, request: Request, hits: list[Block], ahead: Reserved | None = None) -> bool:
        """True if all known tokens of the request fit, besides what others keep and what those `ahead` need."""
        num_seqs, num_blocks = self._reserved
        if ahead is not None:
            num_seqs, num_blocks = num_seqs + ahead.num_seqs, num_blocks + ahead.num_blocks
        if num_seqs >= self.limits.max_num_seqs:
            return False
        shared_hits = sum(block.ref_count > 0 for block in hits)
        wanted = self.kv.num_blocks_for(request.num_tokens) - shared_hits
        return wanted + num_blocks <= self.kv.pool.num_available

    # ---- planning

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is nothing that can be computed now."""
        for decodes in self._kinds():
            plan = PlanBuilder(self._step, self.limits, decodes, self._max_decodes())
            alone = self._quarantine.first()
            if alone is not None:
                self._schedule_alone(alone, plan)
            else:
                self._yield_to_higher_priority()
                self._fill(plan)
            if plan.scheduled:
                self._last_was_decodes = bool(decodes)
                self._step += 1
                self._in_flight.append(InFlightStep(plan.step, plan.scheduled, plan.has_decodes))
                freed_slots, self._freed_slots = self._freed_slots, []
                return plan.plan(freed_slots)
        return None

    def _kinds(self) -> tuple[bool | None, ...]:
        """What the step may hold: anything, or where steps are of one kind, single tokens and chunks in turn."""
        if self.limits.mixed_steps:
            return (None,)
        return (not self._last_was_decodes, self._last_was_decodes)

    def _max_decodes(self) -> int:
        """How many decoding requests the step may take, so that every stage gets an equal part of them.

        0 while as many parts are in flight as there are stages: requests left over join a part that comes back,
        since a step costs much that does not depend on its size.
        """
        num_stages = self.limits.num_stages
        if num_stages == 1:
            return self.limits.max_num_seqs
        if sum(step.has_decodes for step in self._in_flight) >= num_stages:
            return 0
        decoding = sum(
            request.num_pending_samples > 0 or request.num_schedulable_tokens == 1
            for request in self._running
        )
        return max(1, -(-decoding // num_stages))

    def _schedule_alone(self, request: Request, plan: PlanBuilder) -> None:
        if request.state is RequestState.RUNNING:
            self._extend(request, plan, request.num_schedulable_tokens)
            return
        hits = self._fitting_prefix(request)
        while hits is None and self._running:
            self.preempt(self._running[-1])
            hits = self._fitting_prefix(request)
        if hits is not None:
            self._admit(request, hits, plan)

    def _yield_to_higher_priority(self) -> None:
        """Makes room for the first waiting request, as far as running requests have a lower priority."""
        while self._running and (first := self._next_in_line(_NO_KEY)) is not None:
            last = self._running[-1]
            has_priority = first.order_key[0] < last.order_key[0] and not first.num_pending_samples
            if not has_priority or self._fitting_prefix(first) is not None:
                return
            self.preempt(last)

    def _fill(self, plan: PlanBuilder) -> None:
        """Gives tokens in order of priority; among equals to running requests before waiting ones.

        No request is admitted once another was preempted, or behind one that does not fit. Requests that may not
        ask yet whether there is KV for them are passed over.
        """
        preemptions = self.num_preemptions
        index = 0
        first = self._next_in_line(_NO_KEY)
        while plan.budget > 0:
            request = self._running[index] if index < len(self._running) else None
            if first is not None and (request is None or first.order_key[0] < request.order_key[0]):
                hits = self._fitting_prefix(first)
                start = LoadStart.READY if hits is None else self._start_load(first, hits)
                if start is LoadStart.READY:
                    if hits is None or not self._admit(first, hits, plan):
                        first = None
                        continue
                    index += 1  # it now stands before the next one
                if start is LoadStart.BLOCKED:
                    first = None
                else:
                    first = self._next_in_line(first.order_key)
            elif request is not None:
                available = request.num_schedulable_tokens
                num_behind = 0
                if available > 1 and plan.is_mixed:
                    num_behind = min(self._num_decodes_behind(index), plan.decodes_left)
                self._extend(request, plan, available, num_behind)
                if self.num_preemptions != preemptions:
                    first = None
                index += 1
            else:
                return

    def _next_in_line(self, key: OrderKey) -> Request | None:
        """The first waiting request behind `key` that may go on, if there is room for it."""
        if self._loader.num_blocked >= len(self._waiting):
            return None
        in_line = self._waiting.after(key)
        return next((it for it in in_line if not self._loader.is_blocked(it)), None)

    def _num_decodes_behind(self, index: int) -> int:
        """Requests behind running request `index`, and of its priority, that need a single token."""
        priority = self._running[index].order_key[0]
        return sum(
            other.order_key[0] == priority and other.num_schedulable_tokens == 1
            for other in self._running[index + 1 :]
        )

    def _extend(
        self, request: Request, plan: PlanBuilder, available: int, num_behind: int = 0
    ) -> None:
        """Gives a running request tokens, preempting requests behind it for blocks if need be."""
        slot, count = request.slot, plan.count_for(available, num_behind)
        if count == 0 or slot is None:
            return
        if available == 1:
            if plan.decodes_left == 0:
                return
            plan.decodes_left -= 1
            plan.has_decodes = True
        num_tokens = request.num_scheduled_tokens + count
        if num_tokens > len(request.table.blocks) * self.kv.block_size:
            new_blocks = self.kv.grow(request.table, num_tokens)
            while new_blocks is None:
                if not self._exports.make_room():
                    victim = self._running[-1]
                    self.preempt(victim)
                    if victim is request:
                        return
                new_blocks = self.kv.grow(request.table, num_tokens)
            plan.new_blocks.append((slot, new_blocks))
            self._update_reserved(request)
        if not request.runs_ahead:
            new_tokens = request.token_ids[request.num_sent_tokens :]
            plan.new_tokens += [(slot, token_id) for token_id in new_tokens]
            request.num_sent_tokens = request.num_tokens
        plan.add(request, slot, count, available)

    def preempt(self, request: Request) -> None:
        """Takes slot and blocks away; the request keeps its tokens and will compute them again."""
        num_published = request.table.num_published
        self._exports.on_preempted(request)
        self._free_blocks(request)
        self._forget_kv(request)
        self._enter(request, RequestState.WAITING)
        self._loader.on_queued(request, num_published)
        self.num_preemptions += 1
        if self._rows is not None:
            self._rows.preempted(request)

    def _forget_kv(self, request: Request) -> None:
        """Makes the request a value again: it keeps all tokens, none of them computed."""
        self.num_pending_tokens += request.num_computed_tokens
        request.num_scheduled_tokens = request.num_computed_tokens = 0

    def _fitting_prefix(self, request: Request) -> list[Block] | None:
        """The request's cached prefix if it can be admitted now, else None.

        A request whose last sample is still pending waits for it.
        """
        if not self._free_slots or request.num_pending_samples or self._is_still_blocked(request):
            return None
        hits = self.kv.find_prefix(request.table, request.token_ids)
        while not self._has_room(request, hits):
            is_full = self._reserved.num_seqs >= self.limits.max_num_seqs
            if is_full or not self._exports.make_room():
                num_available, num_running = self.kv.pool.num_available, len(self._running)
                self._blocked = _Blocked(request, self._step, num_available, num_running)
                return None
        return hits

    def _is_still_blocked(self, request: Request) -> bool:
        """True if nothing became free since the request last did not fit: looking at a long prompt costs time."""
        blocked = self._blocked
        return (
            blocked is not None
            and blocked.request is request
            and self._step < blocked.step + _BLOCKED_STEPS
            and self.kv.pool.num_available <= blocked.num_available
            and len(self._running) == blocked.num_running > 0
        )

    def _admit(self, request: Request, hits: list[Block], plan: PlanBuilder) -> bool:
        """Moves a waiting request into a slot with its first chunk; False if the step has no room for it."""
        num_hit_tokens = len(hits) * self.kv.block_size
        available = request.num_tokens - num_hit_tokens
        count = plan.count_for(available)
        if count == 0:
            return False
        self.kv.adopt(request.table, hits)
        if self.kv.grow(request.table, num_hit_tokens + count) is None:
            raise RuntimeError("A request was admitted that does not fit.")
        request.num_scheduled_tokens = request.num_computed_tokens = num_hit_tokens
        self.num_pending_tokens -= num_hit_tokens
        self._enter(request, RequestState.RUNNING)
        slot = request.slot
        if slot is None:
            raise RuntimeError("A running request has no slot.")
        request.admission += 1
        request.num_sent_tokens = request.num_tokens
        if request.num_cached_tokens is None:
            self._note_first_admission(request, len(hits))
        plan.starts.append(
            SlotStart(
                slot=slot,
                token_ids=list(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=num_hit_tokens,
                block_ids=request.table.block_ids(),
                sampling=request.sampling,
                eos_token_ids=tuple(request.eos_token_ids),
                request_id=request.request_id,
            )
        )
        self._loader.on_dequeued(request)
        self._on_published(request)
        plan.add(request, slot, count, available)
        if self._rows is not None:
            self._rows.admitted(request)
        return True

    def _note_first_admission(self, request: Request, num_hits: int) -> None:
        request.queue_time_s = self._clock.now() - request.added_at
        num_fetched = max(0, min(num_hits, request.fetched.stop) - request.fetched.start)
        num_cached_tokens = (num_hits - num_fetched) * self.kv.block_size
        request.num_cached_tokens = min(num_cached_tokens, request.num_prompt_tokens)
        self.num_prefix_hit_tokens += request.num_cached_tokens
        self.num_prompt_tokens += request.num_prompt_tokens

    def _on_published(self, request: Request) -> None:
        """Further blocks of the request are published: tiers may save them, other engines fetch them."""
        self._loader.on_published(request)
        self._exports.on_published(request)

    # ---- step results

    def update(self, result: StepResult) -> list[TokenChunk]:
        """Applies the result of the oldest step in flight; returns what its requests gained.

        Raises:
            RuntimeError: the result does not belong to that step; the worker cannot be trusted any more.
        """
        if not self._in_flight or self._in_flight[0].step != result.step:
            raise RuntimeError(
                f"The worker answered step {result.step}, which is not the next one."
            )
        step = self._in_flight.popleft()
        self.num_steps += 1
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
                self.num_generated_tokens += 1
                chunks.append(self._append(request, sampled[slot], logprobs.get(slot)))
            elif is_current:
                chunk = TokenChunk(
                    request.request_id, [], num_computed_tokens=request.num_computed_tokens
                )
                chunks.append(_with_queue_time(chunk, request))
        return chunks

    def _confirm(self, request: Request, num_tokens: int) -> None:
        """Further tokens of a running request are computed."""
        request.num_computed_tokens += num_tokens
        self.num_pending_tokens -= num_tokens
        if request.num_computed_tokens >= (request.table.num_published + 1) * self.kv.block_size:
            self.kv.publish(request.table, request.token_ids, request.num_computed_tokens)
            self._on_published(request)
        if request.crash_count:
            self._quarantine.on_progress(request)

    def _append(
        self, request: Request, token_id: int, logprobs: TokenLogprobs | None
    ) -> TokenChunk:
        source = None
        if request.transfer_id is not None:
            source = self._exports.on_prefilled(request, token_id, logprobs)
        token_ids = request.token_ids
        token_ids.append(token_id)
        self.num_pending_tokens += 1
        if len(token_ids) % self.kv.block_size == 1 or self.kv.block_size == 1:
            self._update_reserved(request)
        if self._rows is not None:
            self._rows.sampled(request)
        reason, stop_reason = None, None
        if token_id in request.end_token_ids or len(token_ids) >= request.max_total_tokens:
            reason, stop_reason = self._finish_reason(request)
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

    def _finish_reason(self, request: Request) -> tuple[FinishReason | None, int | None]:
        """Why the last output token ends the answer, if it does, and the stop token if one was asked for."""
        token_id = request.token_ids[-1]
        if request.num_output_tokens >= request.sampling.min_tokens:
            if token_id in request.eos_token_ids:
                return FinishReason.STOP, None
            if token_id in request.stop_token_ids:
                return FinishReason.STOP, token_id
        if len(request.token_ids) >= request.max_total_tokens:
            return FinishReason.LENGTH, None
        return None, None

    # ---- events of KV

    def apply_kv_events(self, remote: Iterable[Arrived | Failed] = ()) -> list[TokenChunk]:
        """Applies what has happened to KV since the last call, in the order that the module's docstring gives.

        `remote` is news of other engines from which KV is fetched. An event of a request that has finished, even
        by an event right before it, is dropped here and nowhere else.
        """
        chunks: list[TokenChunk] = []
        unwanted, load_ends = self._exports.drain_unwanted(), self._loader.drain_load_ends()
        for event in (*unwanted, *remote, *load_ends):
            request = self._requests.get(event.request_id)
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
                    self._loader.end_load(request, event)
                    self._enter(request, RequestState.WAITING)
                    self._blocked = None
                    if self._rows is not None:
                        self._rows.queued(request)
                    if failure is not None:
                        chunks.append(self._fail(request, failure))
        news = self._loader.poll()
        if news is not None:
            for request in news:
                self._place(request)
            self._loader.prefetch_more()
        return chunks

    def _apply_first_token(self, request: Request, token: FirstToken) -> list[TokenChunk]:
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
        crashed = {part.request for step in self._in_flight for part in step.scheduled}
        self._in_flight.clear()
        failing = self._quarantine.on_crash(crashed)
        self._exports.on_workers_lost(self._requests.values())
        for request in list(self._running):
            self.kv.free(request.table)
            self._wait_again(request)
        for request in self._loader.on_workers_lost(list(self._waiting)):
            self._wait_again(request)
        for request in self._waiting:
            request.num_pending_samples = request.num_saved = 0
        self.kv.pool.clear_cache()
        self._freed_slots.clear()
        self._blocked = None
        return [
            self._fail(request, "The worker died whenever this request was computed.")
            for request in failing
        ]

    def _wait_again(self, request: Request) -> None:
        """What the request had computed, or waited for, is lost."""
        self._forget_kv(request)
        self._enter(request, RequestState.WAITING)
        if self._rows is not None:
            self._rows.lost(request)


def _with_queue_time(chunk: TokenChunk, request: Request) -> TokenChunk:
    """The chunk, with how long the request waited if no chunk has said so before."""
    queue_time_s, request.queue_time_s = request.queue_time_s, None
    return msgspec.structs.replace(chunk, queue_time_s=queue_time_s)
