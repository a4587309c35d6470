"""Which request computes how many tokens in the next step.

There is no prefill phase and no decode phase. A request has tokens and computed tokens; a step gives each
chosen request some of those not yet computed, within a token budget. Chunked prefill, prefix hits, preemption
and recovery only change the two numbers. A request samples when its computed tokens reach its tokens.

The scheduler is pure: it knows no sockets and no devices, and its clock only measures: no choice depends on the
time. `schedule` makes a plan, `update` takes the
results in the order of the plans. Several plans may be under way at once; the worker executes them in order,
which is why a block that is freed while a step still uses it can be handed to a later plan at once. The same
holds for a worker of several stages, each of which has KV of its own and executes the plans in order. Transfers go
on beside the steps; what they must wait for is noted in the block.

Where KV is kept elsewhere too (`tiers`), a request may wait for some of it before it is admitted
(`pagoda.engine.kv_waiting`).

With several stages, a request whose sample is under way waits for it, and decoding requests are spread over as
many steps as there are stages: while one stage computes some of them, the others compute the rest.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

import msgspec

from pagoda.engine.kv_waiting import Begin, KVWaiting
from pagoda.engine.observer import SchedulerObserver
from pagoda.engine.request import Request
from pagoda.ipc.clock import Clock
from pagoda.kv.block_pool import Block
from pagoda.kv.manager import KVManager
from pagoda.kv.tiered_connector import TieredKVConnector
from pagoda.messages.frontend import (
    FinishReason,
    GenerateRequest,
    KVSource,
    TokenChunk,
    TokenLogprobs,
)
from pagoda.messages.worker import Capabilities, SlotStart, StepPlan, StepResult
from pagoda.pd.exporter import FirstToken, KVExporter

SOLO_STRIKES = 2
"""From this many strikes on, a request is tried alone, so that it can neither give strikes to others nor get
strikes for them."""
MAX_STRIKES = SOLO_STRIKES + 3
"""A request that broke three steps alone is not tried again."""
_BLOCKED_STEPS = 16
"""How many steps may pass before a request that did not fit is looked at again, when nothing became free."""

_by_rank = attrgetter("rank")


class SchedulerLimits(msgspec.Struct, frozen=True, kw_only=True):
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    batch_multiple: int = 1
    mixed_steps: bool = True
    num_stages: int = 1

    @classmethod
    def within(
        cls,
        capabilities: Capabilities,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_stages: int = 1,
    ) -> SchedulerLimits:
        """What was asked for, cut to what the backend can do."""
        multiple = capabilities.batch_multiple
        budget = min(max_num_batched_tokens, capabilities.max_batch_tokens)
        return cls(
            max_num_seqs=min(max_num_seqs, capabilities.max_batch_seqs),
            max_num_batched_tokens=max(multiple, budget - budget % multiple),
            max_model_len=min(max_model_len, capabilities.max_model_len),
            batch_multiple=capabilities.batch_multiple,
            mixed_steps=capabilities.mixed_steps,
            num_stages=num_stages,
        )


class _Share(NamedTuple):
    """One request's part of a step."""

    request: Request
    admission: int
    slot: int
    num_tokens: int
    samples: bool


class _Blocked(NamedTuple):
    """A waiting request that did not fit, and what was there at the time."""

    request: Request
    step: int
    num_available: int
    num_running: int


class _Kept(NamedTuple):
    """What sequences keep: those that run or are being loaded, and some that wait."""

    num_seqs: int
    num_blocks: int
    """That they still need for their tokens, and one more each: a newcomer must not be preempted right away."""


_NOTHING = _Kept(0, 0)


class _Flight(NamedTuple):
    """A step under way."""

    step: int
    shares: list[_Share]
    decodes: bool
    """Whether requests that decode are among them."""


class Scheduler:
    """Continuous batching over one KV cache."""

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KVManager,
        clock: Clock,
        tiers: TieredKVConnector | None = None,
        exporter: KVExporter | None = None,
    ) -> None:
        """`clock` says how long requests wait."""
        if kv.pool.num_blocks * kv.block_size < limits.max_model_len:
            raise ValueError(
                f"A KV cache of {kv.pool.num_blocks} blocks of {kv.block_size} tokens cannot hold one "
                f"sequence of {limits.max_model_len} tokens."
            )
        self.limits = limits
        self.kv = kv
        self._clock = clock
        self.num_preemptions = 0
        self.num_steps = 0
        self.num_prefix_hit_tokens = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self._requests: dict[str, Request] = {}
        self._running: list[Request] = []
        """In order of rank, as is `_waiting`."""
        self._waiting: list[Request] = []
        self._kv_waiting = None if tiers is None else KVWaiting(kv, tiers, limits.max_num_seqs)
        self._exporter = exporter
        self._observer: SchedulerObserver | None = None
        self._suspects: set[Request] = set()
        """Requests that are tried alone because workers died during their steps."""
        self._blocked: _Blocked | None = None
        self._last_was_decodes = False
        """With `mixed_steps` off: the kind of the last step."""
        self._in_flight: deque[_Flight] = deque()
        self._free_slots = list(range(limits.max_num_seqs))
        self._orphans: list[Request] = []
        """Whose KV was lost here, after an engine that computes it now had asked for it."""
        self._freed_slots: list[int] = []
        """Slots that the worker has not yet been told about."""
        self._num_arrivals = 0
        self._step = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_awaiting_kv(self) -> int:
        return 0 if self._kv_waiting is None else self._kv_waiting.num_requests

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_pending_tokens(self) -> int:
        return sum(r.num_tokens - r.num_computed_tokens for r in self._requests.values())

    def has_requests(self) -> bool:
        return bool(self._requests)

    def observe(self, observer: SchedulerObserver | None) -> None:
        """Tells `observer` what becomes of requests, first where those are that are there; None for nobody."""
        self._observer = observer
        if observer is None:
            return
        waiting = {request.request_id for request in self._waiting}
        for request in self._requests.values():
            if request.slot is not None:
                observer.admitted(request)
            elif request.request_id in waiting:
                observer.queued(request)
            else:
                observer.awaits_kv(request)

    # ---- requests come and go

    def add(self, message: GenerateRequest) -> list[TokenChunk]:
        """Takes a request: a first arrival or a return; both are the same.

        A request whose answer is already complete, or that can never run, is answered at once.
        """
        request = Request(
            message,
            arrival=self._num_arrivals,
            table=self.kv.new_table(message.cache_salt),
            max_model_len=self.limits.max_model_len,
            runs_ahead=self.limits.num_stages == 1,
            added_at=self._clock.now(),
        )
        self._num_arrivals += 1
        problem = self._refusal(request)
        if problem is None and message.holds_kv and self._exporter is None:
            problem = (
                "This engine holds no KV for others; it was started without --role prefill or both."
            )
        if problem is not None:
            return [TokenChunk(message.request_id, [], FinishReason.ERROR, error=problem)]
        if request.num_output_tokens:
            finish, stop_reason = self._finish_of(request)
            if finish is not None:
                return [TokenChunk(message.request_id, [], finish, stop_reason)]
        self._requests[request.request_id] = request
        news = []
        if message.holds_kv and self._exporter is not None:
            source = self._exporter.open(
                request.request_id, request.num_tokens // self.kv.block_size
            )
            request.transfer_id = source.transfer_id
            news = [TokenChunk(request.request_id, [], kv_source=source)]
        if self._kv_waiting is None:
            self._wait(request)
        else:
            hits = self.kv.find_prefix(request.table, request.token_ids)
            self._kv_waiting.on_queued(request, len(hits))
            self._queue([request], self._kv_waiting)
        return news

    def _queue(self, requests: Iterable[Request], kv_waiting: KVWaiting) -> None:
        """Lets each wait for KV at once if there is room besides those in line before it, else in line.

        `requests` are in order of rank.
        """
        kept, num_counted = self._kept_by(self._holders()), 0
        for request in requests:
            hits = self.kv.find_prefix(request.table, request.token_ids)
            num_ahead = bisect_left(self._waiting, request.rank, key=_by_rank)
            kept = self._kept_by(self._waiting[num_counted:num_ahead], kept)
            num_counted = num_ahead
            has_room = not self._suspects and self._has_room(request, hits, kept)
            if not has_room or kv_waiting.begin(request, hits) is not Begin.WAITS:
                kv_waiting.leave(request)
                self._wait(request)
                kv_waiting.prefetch(request, len(hits))
                continue
            self._await_kv(request)
            if request.table.blocks:
                kept = self._kept_by([request], kept)

    def _wait(self, request: Request) -> None:
        """The request waits for a step."""
        insort(self._waiting, request, key=_by_rank)
        if self._observer is not None:
            self._observer.queued(request)

    def _await_kv(self, request: Request) -> None:
        """The request is with those that wait for KV."""
        if self._observer is not None:
            self._observer.awaits_kv(request)

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

    def abort(self, request_id: str) -> bool:
        """Ends a request without a word; returns whether there was one."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._end(request, FinishReason.ABORT)
        return True

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.finished = True
        del self._requests[request.request_id]
        self._let_go(request, "its request failed or was aborted")
        self._suspects.discard(request)
        if request.slot is not None:
            self._leave_slot(request)
        elif self._kv_waiting is None or not self._kv_waiting.leave(request):
            _remove(self._waiting, request)
        if self._kv_waiting is not None:
            self._kv_waiting.on_dequeued(request)
            self._blocked = None
        self._free_blocks(request)
        if self._observer is not None:
            self._observer.ended(request, reason)

    def _let_go(self, request: Request, reason: str) -> None:
        """What is held of the request for another engine is worth nothing to it any more."""
        if request.transfer_id is not None and self._exporter is not None:
            self._exporter.drop(request.transfer_id, reason)
            request.transfer_id = None

    def _note_orphan(self, request: Request) -> None:
        """What is held of it will be lost; an engine that has asked for it is told, and computes it."""
        if (
            request.transfer_id is not None
            and self._exporter is not None
            and self._exporter.is_asked_for(request.transfer_id)
        ):
            self._orphans.append(request)

    def end_unwanted(self) -> list[TokenChunk]:
        """Ends requests that were to be computed for other engines which do not need that any more."""
        if self._exporter is None:
            return []
        orphans, self._orphans = self._orphans, []
        unwanted = [request for request in orphans if not request.finished]
        for request_id, transfer_id in self._exporter.drain_unwanted():
            request = self._requests.get(request_id)
            if request is not None and request.transfer_id == transfer_id:
                unwanted.append(request)
        for request in unwanted:
            self._end(request, FinishReason.ABORT)
        return [TokenChunk(request.request_id, [], FinishReason.ABORT) for request in unwanted]

    def _free_blocks(self, request: Request) -> None:
        """Steps under way may still use the blocks: what a preempted request samples in them counts."""
        is_confirmed = request.num_computed_tokens == request.num_scheduled_tokens
        self.kv.free(request.table, last_step=-1 if is_confirmed else self._step - 1)

    def _leave_slot(self, request: Request) -> None:
        slot = request.slot
        if slot is None:
            raise RuntimeError(f"Request {request.request_id} has no slot.")
        _remove(self._running, request)
        heapq.heappush(self._free_slots, slot)
        self._freed_slots.append(slot)
        request.slot = None

    # ---- planning

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is nothing that can be computed now."""
        for decodes in self._kinds():
            draft = _Draft(self._step, self.limits, decodes, self._max_decodes())
            if self._suspects:
                self._schedule_alone(min(self._suspects, key=_by_rank), draft)
            else:
                self._yield_to_higher_priority()
                self._fill(draft)
            if draft.shares:
                self._last_was_decodes = bool(decodes)
                self._step += 1
                self._in_flight.append(_Flight(draft.step, draft.shares, draft.decodes))
                return draft.plan(self._take_freed_slots())
        return None

    def _kinds(self) -> tuple[bool | None, ...]:
        """What the step may hold: anything, or where steps are of one kind, single tokens and chunks in turn."""
        if self.limits.mixed_steps:
            return (None,)
        return (not self._last_was_decodes, self._last_was_decodes)

    def _max_decodes(self) -> int:
        """How many of the decoding requests the step may take, so that every stage gets an equal part of them.

        None while as many parts are under way as there are stages: those left over join one that comes back, since
        a step costs much that does not depend on its size.
        """
        num_stages = self.limits.num_stages
        if num_stages == 1:
            return self.limits.max_num_seqs
        if sum(flight.decodes for flight in self._in_flight) >= num_stages:
            return 0
        decoding = sum(
            request.num_pending_samples > 0 or request.num_schedulable_tokens == 1
            for request in self._running
        )
        return max(1, -(-decoding // num_stages))

    def _take_freed_slots(self) -> list[int]:
        freed, self._freed_slots = self._freed_slots, []
        return freed

    def _schedule_alone(self, request: Request, draft: _Draft) -> None:
        if request.slot is not None:
            self._extend(request, draft)
            return
        hits = self._fitting_prefix(request)
        while hits is None and self._running:
            self._preempt(self._running[-1])
            hits = self._fitting_prefix(request)
        if hits is not None:
            self._admit(request, hits, draft)

    def _yield_to_higher_priority(self) -> None:
        """Makes room for the first waiting request, as far as those that run have a lower priority."""
        while self._running and (index := self._next_in_line(0)) is not None:
            first, last = self._waiting[index], self._running[-1]
            outranked = first.rank[0] < last.rank[0] and not first.num_pending_samples
            if not outranked or self._fitting_prefix(first) is not None:
                return
            self._preempt(last)

    def _fill(self, draft: _Draft) -> None:
        """Gives tokens in order of priority; among equals to those that run before those that wait.

        Nobody is admitted once somebody was preempted, or behind a request that does not fit. Those that may not
        ask yet whether there is KV for them are passed over.
        """
        preemptions = self.num_preemptions
        admitting = True
        index = 0
        in_line: int | None = 0
        while draft.budget > 0:
            request = self._running[index] if index < len(self._running) else None
            if in_line is not None and admitting:
                in_line = self._next_in_line(in_line)
            first = self._waiting[in_line] if in_line is not None and admitting else None
            if first is not None and (request is None or first.rank[0] < request.rank[0]):
                hits = self._fitting_prefix(first)
                begin = Begin.STAYS if hits is None else self._begin(first, hits)
                if begin is Begin.WAITS:
                    _remove(self._waiting, first)
                    self._await_kv(first)
                    continue
                admitting = (
                    hits is not None and begin is Begin.COMPUTES and self._admit(first, hits, draft)
                )
                index += admitting  # it now stands before the next one
            elif request is not None:
                num_behind = self._num_decodes_behind(index) if draft.mixed else 0
                self._extend(request, draft, min(num_behind, draft.decodes_left))
                admitting = admitting and self.num_preemptions == preemptions
                index += 1
            else:
                return

    def _next_in_line(self, start: int) -> int | None:
        """Index of the first waiting request from `start` on that may go on, if there is room for it."""
        kv_waiting, num_waiting = self._kv_waiting, len(self._waiting)
        if kv_waiting is None:
            return start if start < num_waiting else None
        if kv_waiting.num_staying == num_waiting:
            start = num_waiting
        line = range(start, num_waiting)
        return next((it for it in line if not kv_waiting.must_stay(self._waiting[it])), None)

    def _begin(self, request: Request, hits: list[Block]) -> Begin:
        if self._kv_waiting is None:
            return Begin.COMPUTES
        return self._kv_waiting.begin(request, hits)

    def _num_decodes_behind(self, index: int) -> int:
        """If running request `index` computes a chunk: how many of its priority wait behind it for one token."""
        request = self._running[index]
        if request.num_schedulable_tokens <= 1:
            return 0
        return sum(
            other.rank[0] == request.rank[0] and other.num_schedulable_tokens == 1
            for other in self._running[index + 1 :]
        )

    def _extend(self, request: Request, draft: _Draft, num_behind: int = 0) -> None:
        """Gives a running request tokens, preempting requests of higher rank for blocks if need be.

        A chunk leaves one token of the budget to each of the `num_behind` requests that come after, but takes
        at least half of it.
        """
        slot = request.slot
        decodes = request.num_schedulable_tokens == 1
        count = draft.share_of(request, num_behind)
        if count == 0 or slot is None or (decodes and draft.decodes_left == 0):
            return
        draft.decodes_left -= decodes
        draft.decodes |= decodes
        new_blocks = self.kv.grow(request.table, request.num_scheduled_tokens + count)
        while new_blocks is None:
            if not self._make_room():
                victim = self._running[-1]
                self._preempt(victim)
                if victim is request:
                    return
            new_blocks = self.kv.grow(request.table, request.num_scheduled_tokens + count)
        if new_blocks:
            draft.new_blocks.append((slot, new_blocks))
        if not request.runs_ahead:
            draft.appended += [
                (slot, token) for token in request.token_ids[request.num_told_tokens :]
            ]
            request.num_told_tokens = request.num_tokens
        draft.add(request, slot, count)

    def _preempt(self, request: Request) -> None:
        """Takes slot and blocks away; the request keeps its tokens and will compute them again."""
        num_published = request.table.num_published
        # Two requests that hold each other's room for others would wait for ever.
        self._note_orphan(request)
        self._let_go(request, "its request was preempted")
        self._leave_slot(request)
        self._free_blocks(request)
        request.forget_kv()
        insort(self._waiting, request, key=_by_rank)
        if self._kv_waiting is not None:
            self._kv_waiting.on_queued(request, num_published)
        self.num_preemptions += 1
        if self._observer is not None:
            self._observer.preempted(request)

    def _fitting_prefix(self, request: Request) -> list[Block] | None:
        """The request's cached prefix if it can be admitted now, else None.

        A request whose last sample is still under way waits for it.
        """
        if not self._free_slots or request.num_pending_samples or self._is_still_blocked(request):
            return None
        hits = self.kv.find_prefix(request.table, request.token_ids)
        kept = self._kept_by(self._holders())
        while not self._has_room(request, hits, kept):
            if kept.num_seqs >= self.limits.max_num_seqs or not self._make_room():
                break
        else:
            return hits
        self._blocked = _Blocked(
            request, self._step, self.kv.pool.num_available, len(self._running)
        )
        return None

    def _has_room(self, request: Request, hits: list[Block], kept: _Kept) -> bool:
        """Whether there is room for all known tokens of the request, besides what others keep."""
        if kept.num_seqs >= self.limits.max_num_seqs:
            return False
        taken_hits = sum(block.ref_count > 0 for block in hits)
        wanted = self.kv.num_blocks_for(request.num_tokens) - taken_hits
        return wanted + kept.num_blocks <= self.kv.pool.num_available

    def _holders(self) -> list[Request]:
        """Those that have blocks."""
        loading = () if self._kv_waiting is None else self._kv_waiting.loading
        return [*self._running, *loading]

    def _kept_by(self, requests: Sequence[Request], kept: _Kept = _NOTHING) -> _Kept:
        """By these, and `kept` by others."""
        missing = (
            self.kv.num_blocks_for(request.num_tokens) - len(request.table.blocks)
            for request in requests
        )
        num_blocks = sum(max(0, count) + 1 for count in missing)
        return _Kept(kept.num_seqs + len(requests), kept.num_blocks + num_blocks)

    def _make_room(self) -> bool:
        """Takes blocks from what is held for others that have not asked for it; False if there is nothing."""
        return self._exporter is not None and self._exporter.make_room()

    def _is_still_blocked(self, request: Request) -> bool:
        """Whether nothing became free since the request last did not fit: looking at a long prompt costs time."""
        blocked = self._blocked
        return (
            blocked is not None
            and blocked.request is request
            and self._step < blocked.step + _BLOCKED_STEPS
            and self.kv.pool.num_available <= blocked.num_available
            and len(self._running) == blocked.num_running > 0
        )

    def _admit(self, request: Request, hits: list[Block], draft: _Draft) -> bool:
        """Moves a waiting request into a slot with its first chunk; False if the step has no room for it."""
        num_hit_tokens = len(hits) * self.kv.block_size
        request.num_scheduled_tokens = num_hit_tokens
        count = draft.share_of(request)
        if count == 0:
            request.num_scheduled_tokens = 0
            return False
        self.kv.adopt(request.table, hits)
        if self.kv.grow(request.table, num_hit_tokens + count) is None:
            raise RuntimeError("A request was admitted that does not fit.")
        _remove(self._waiting, request)
        insort(self._running, request, key=_by_rank)
        slot = request.slot = heapq.heappop(self._free_slots)
        request.admission += 1
        request.num_computed_tokens = num_hit_tokens
        request.num_told_tokens = request.num_tokens
        if request.num_cached_tokens is None:
            request.queue_time_s = self._clock.now() - request.added_at
            num_fetched = max(0, min(len(hits), request.fetched.stop) - request.fetched.start)
            num_cached_tokens = num_hit_tokens - num_fetched * self.kv.block_size
            request.num_cached_tokens = min(num_cached_tokens, request.num_prompt_tokens)
            self.num_prefix_hit_tokens += request.num_cached_tokens
            self.num_prompt_tokens += request.num_prompt_tokens
        draft.starts.append(
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
        if self._kv_waiting is not None:
            self._kv_waiting.on_dequeued(request)
        self._passed(request)
        draft.add(request, slot, count)
        if self._observer is not None:
            self._observer.admitted(request)
        return True

    def _passed(self, request: Request) -> None:
        """The request has got past further blocks: others may keep them, or fetch them."""
        if self._kv_waiting is not None:
            self._kv_waiting.passed(request)
        if request.transfer_id is not None and self._exporter is not None:
            table, transfer_id = request.table, request.transfer_id
            first, end = self._exporter.num_held(transfer_id), table.num_published
            if end > first:
                self._exporter.hold(
                    transfer_id, table.blocks[first:end], table.keys[first + 1 : end + 1]
                )

    # ---- results

    def update(self, result: StepResult) -> list[TokenChunk]:
        """Takes the result of the oldest step under way; returns what its requests gained.

        Raises:
            RuntimeError: the result does not belong to that step; the worker cannot be trusted any more.
        """
        if not self._in_flight or self._in_flight[0].step != result.step:
            raise RuntimeError(
                f"The worker answered step {result.step}, which is not the next one."
            )
        flight = self._in_flight.popleft()
        self.num_steps += 1
        sampled = dict(zip(result.slots, result.token_ids, strict=True))
        chunks: list[TokenChunk] = []
        for share in flight.shares:
            request = share.request
            request.num_pending_samples -= share.samples
            if request.finished:
                continue
            error = result.errors.get(share.slot)
            if error is not None:
                chunks.append(self._fail(request, error))
                continue
            is_current = self._confirm(share)
            if share.samples:
                token_id = sampled.get(share.slot)
                if token_id is None:
                    raise RuntimeError(
                        f"The worker's result of step {result.step} lacks slot {share.slot}."
                    )
                chunks.append(self._append(request, token_id, result.logprobs.get(share.slot)))
                self.num_generated_tokens += 1
            elif is_current:
                chunks.append(
                    TokenChunk(
                        request.request_id,
                        [],
                        num_computed_tokens=request.num_computed_tokens,
                        queue_time_s=_untold_queue_time(request),
                    )
                )
        return chunks

    def _confirm(self, share: _Share) -> bool:
        """Whether what was computed still counts: the request was not preempted meanwhile."""
        request = share.request
        if share.admission != request.admission or request.slot is None:
            return False
        request.num_computed_tokens += share.num_tokens
        self.kv.publish(request.table, request.token_ids, request.num_computed_tokens)
        self._passed(request)
        if request.strikes and request.num_computed_tokens >= request.strike_point:
            request.strikes = 0
            self._suspects.discard(request)
        return True

    def _append(
        self, request: Request, token_id: int, logprobs: TokenLogprobs | None
    ) -> TokenChunk:
        source = None
        if request.transfer_id is not None:
            source = self._finish_prefill(request, token_id, logprobs)
        request.token_ids.append(token_id)
        if self._observer is not None:
            self._observer.sampled(request)
        finish, stop_reason = self._finish_of(request)
        if finish is not None:
            self._end(request, finish)
        return TokenChunk(
            request.request_id,
            [token_id],
            finish,
            stop_reason,
            None if logprobs is None else [logprobs],
            request.num_cached_tokens or 0,
            kv_source=source,
            queue_time_s=_untold_queue_time(request),
        )

    def _finish_prefill(
        self, request: Request, token_id: int, logprobs: TokenLogprobs | None
    ) -> KVSource | None:
        """The request ends with this token, and its KV stays."""
        transfer_id, request.transfer_id = request.transfer_id, None
        if transfer_id is None or self._exporter is None:
            return None
        key = self.kv.sequence_key(request.table, request.token_ids)
        num_cached_tokens = request.num_cached_tokens or 0
        token = FirstToken(key, token_id, logprobs, num_cached_tokens)
        return self._exporter.finish(transfer_id, token)

    def _finish_of(self, request: Request) -> tuple[FinishReason | None, int | None]:
        """Whether the last output token ends the answer, and the stop token if one was asked for."""
        token_id = request.token_ids[-1]
        if request.num_output_tokens >= request.sampling.min_tokens:
            if token_id in request.eos_token_ids:
                return FinishReason.STOP, None
            if token_id in request.stop_token_ids:
                return FinishReason.STOP, token_id
        if len(request.token_ids) >= request.max_total_tokens:
            return FinishReason.LENGTH, None
        return None, None

    def _fail(self, request: Request, error: str) -> TokenChunk:
        self._end(request, FinishReason.ERROR)
        return TokenChunk(request.request_id, [], FinishReason.ERROR, error=error)

    def take_kv_news(self) -> list[TokenChunk]:
        """Lets requests go on that need not wait for KV any more; returns the ends of those that fail."""
        kv_waiting = self._kv_waiting
        if kv_waiting is None:
            return []
        chunks = []
        for request, failure in kv_waiting.take_arrivals():
            self._wait(request)
            self._blocked = None
            if failure is not None:
                chunks.append(self._fail(request, failure))
        news = kv_waiting.take_news()
        if news is not None:
            self._queue(news, kv_waiting)
            kv_waiting.prefetch_more()
        return chunks

    # ---- what another engine computed

    def take_first_token(self, request_id: str, token: FirstToken) -> list[TokenChunk]:
        """The token behind a request's prompt, which counts as if it had been sampled here.

        Unless the request has got further, or is being computed and will sample it, or asks for what the other
        engine did not say, or there is none.
        """
        request = self._requests.get(request_id)
        if request is None or request.slot is not None or request.num_pending_samples:
            return []
        if request.transfer_id is not None:  # whoever fetches from here wants its KV, too
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

    def fail(self, request_id: str, error: str) -> list[TokenChunk]:
        """Ends a request; `error` is a sentence."""
        request = self._requests.get(request_id)
        return [] if request is None else [self._fail(request, error)]

    # ---- when the worker is lost

    def recover(self) -> list[TokenChunk]:
        """The worker and all KV are gone: every request waits again, with the tokens it has.

        Requests of the steps that were under way get a strike, and lose it when they get further than they
        were. With `SOLO_STRIKES` a request is tried alone; only then can it get more, and with `MAX_STRIKES` it is
        failed and its chunk returned.
        """
        struck = {share.request for flight in self._in_flight for share in flight.shares}
        self._in_flight.clear()
        if self._exporter is not None:
            for request in self._requests.values():
                self._note_orphan(request)
            self._exporter.workers_lost()
        for request in struck:
            request.strike_point = max(request.strike_point, request.num_scheduled_tokens)
        for request in list(self._running):
            self._leave_slot(request)
            self.kv.free(request.table)
            self._wait_again(request)
        if self._kv_waiting is not None:
            self._kv_waiting.start_over(self._waiting)
            for request in self._kv_waiting.lose_workers():
                self._wait_again(request)
        for request in self._waiting:
            request.lose_workers()
            request.transfer_id = None
        self.kv.pool.clear_cache()
        self._freed_slots.clear()
        self._blocked = None
        return [
            self._fail(request, "The worker died whenever this request was computed.")
            for request in sorted(struck, key=_by_rank)
            if not request.finished and self._strike(request, alone=len(struck) == 1)
        ]

    def _wait_again(self, request: Request) -> None:
        """What the request had, or waited for, is lost."""
        insort(self._waiting, request, key=_by_rank)
        if self._observer is not None:
            self._observer.lost(request)

    def _strike(self, request: Request, *, alone: bool) -> bool:
        """Whether this was one strike too many."""
        request.strikes = request.strikes + 1 if alone else min(request.strikes + 1, SOLO_STRIKES)
        if request.strikes >= SOLO_STRIKES:
            self._suspects.add(request)
        return request.strikes >= MAX_STRIKES


class _Draft:
    """A plan in the making."""

    def __init__(
        self, step: int, limits: SchedulerLimits, decodes: bool | None, max_decodes: int
    ) -> None:
        self.step = step
        self.budget = limits.max_num_batched_tokens
        self.shares: list[_Share] = []
        self.starts: list[SlotStart] = []
        self.new_blocks: list[tuple[int, list[int]]] = []
        self.appended: list[tuple[int, int]] = []
        self.decodes_left = max_decodes
        self.decodes = False
        self._multiple = limits.batch_multiple
        self._kind = decodes
        """Whether the step holds single tokens only, or chunks only; None for both together."""

    @property
    def mixed(self) -> bool:
        return self._kind is None

    def share_of(self, request: Request, num_behind: int = 0) -> int:
        """How many tokens this step gives to the request; 0 if none."""
        available = request.num_schedulable_tokens
        if available <= 0 or self._kind not in (None, available == 1):
            return 0
        count = min(available, self.budget)
        if count > 1:
            count = min(count, max(self._multiple, self.budget - num_behind, self.budget // 2))
        if count < available:
            count -= count % self._multiple
        return count

    def add(self, request: Request, slot: int, count: int) -> None:
        available = request.num_schedulable_tokens
        samples = count == available
        request.num_scheduled_tokens += count
        request.num_pending_samples += samples
        self.shares.append(_Share(request, request.admission, slot, count, samples))
        self.budget -= count

    def plan(self, freed_slots: list[int]) -> StepPlan:
        return StepPlan(
            self.step,
            [share.slot for share in self.shares],
            [share.num_tokens for share in self.shares],
            self.starts,
            self.new_blocks,
            freed_slots,
            self.appended,
        )


def _untold_queue_time(request: Request) -> float | None:
    """It is told once."""
    queue_time_s, request.queue_time_s = request.queue_time_s, None
    return queue_time_s


def _remove(ordered: list[Request], request: Request) -> None:
    del ordered[bisect_left(ordered, request.rank, key=_by_rank)]
