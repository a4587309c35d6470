"""Plans of steps: the requests that compute in the next step, and their numbers of tokens.

docs/architecture.md explains the one arithmetic of tokens and computed tokens, and how stages stay busy.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from pagoda.engine.config import EngineConfig
from pagoda.engine.kv_hooks import KVHooks, LoadStart
from pagoda.engine.leaders import Leaders
from pagoda.engine.places import Places, Quarantine
from pagoda.engine.request import OrderKey, Request, RequestState
from pagoda.ipc.clock import Clock
from pagoda.kv.manager import UNLIMITED_RUN, KVManager, PrefixHit
from pagoda.messages.kv_groups import KVKind
from pagoda.messages.worker import NewBlocks, SlotStart, StepPlan, WorkerReady

_BLOCKED_STEPS = 16
"""Steps after which a request that did not fit is looked at again, when nothing became free."""

_MAX_LED = 32
"""Requests that a step passes over because others compute their blocks."""

DEAR_S = 0.001
"""Processor time of a token from which on the grammar of a request is dear."""

STEP_MASKS_S = 0.008
"""Processor time that the masks of dear grammars take of a step, as far as more than one request has one."""

_NO_KEY: OrderKey = (-(2**63), -1)
"""A key that sorts in front of every order key."""


class SchedulerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits that every step obeys."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    batch_multiple: int = 1
    mixed_steps: bool = True
    num_stages: int = 1
    whole_prompts: bool = False
    """A prompt is computed in one step, and nothing goes on from it (encoders)."""

    @classmethod
    def within(cls, config: EngineConfig, worker: WorkerReady) -> SchedulerLimits:
        """The limits asked for, cut to what the backend can do."""
        capabilities, multiple = worker.capabilities, worker.capabilities.batch_multiple
        budget = min(config.max_num_batched_tokens, capabilities.max_batch_tokens)
        budget = max(multiple, budget - budget % multiple)
        max_model_len = min(worker.max_model_len, capabilities.max_model_len)
        whole_prompts = any(group.kind is KVKind.STEP for group in worker.kv_groups)
        if whole_prompts:
            max_model_len = min(max_model_len, capabilities.max_batch_tokens)
            budget = max(budget, max_model_len)
        return cls(
            max_num_seqs=min(config.max_num_seqs, capabilities.max_batch_seqs),
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            batch_multiple=multiple,
            mixed_steps=capabilities.mixed_steps,
            num_stages=config.worker.parallel.pipeline_parallel_size,
            whole_prompts=whole_prompts,
        )


class Scheduled(msgspec.Struct, frozen=True, gc=False):
    """Part of one request in a step."""

    request: Request
    admission: int
    slot: int
    num_tokens: int
    samples: bool


class InFlightStep(NamedTuple):
    """A step that the worker has not answered yet."""

    step: int
    scheduled: list[Scheduled]
    has_decodes: bool
    """True if the step computes single tokens of decoding requests."""


class PlanBuilder:
    """Collects the parts of one step within the token budget."""

    def __init__(
        self, step: int, limits: SchedulerLimits, decodes: bool | None, max_decodes: int
    ) -> None:
        """`decodes` is True for single tokens only, False for chunks only, None for both together."""
        self.step = step
        self.budget = limits.max_num_batched_tokens
        self.scheduled: list[Scheduled] = []
        self.starts: list[SlotStart] = []
        self.new_blocks: list[NewBlocks] = []
        self.new_tokens: list[tuple[int, int]] = []
        self.forced_tokens: list[tuple[int, list[int]]] = []
        self.masked_slots: list[int] = []
        self.dear_s = 0.0
        """Processor time of the masks of all running requests with dear grammars."""
        self.masks_s = 0.0
        """The part of it that the step takes."""
        self.gives_way = False
        """True if a request has given way because of its grammar."""
        self.starts_dear = False
        """True if a request with a dear grammar begins in the step."""
        self.decodes_left = max_decodes
        self.has_decodes = False
        self.is_mixed = decodes is None
        self._multiple = limits.batch_multiple
        self._decodes = decodes
        self._whole_prompts = limits.whole_prompts

    def count_for(self, available: int, num_behind: int = 0, most: int = UNLIMITED_RUN) -> int:
        """Tokens that this step gives to a request with `available` schedulable tokens; 0 if none.

        A chunk leaves one token of the budget to each of `num_behind` requests, but takes at least half of it.
        No chunk is longer than `most`.
        """
        if min(available, most) <= 0 or (
            self._decodes is not None and self._decodes != (available == 1)
        ):
            return 0
        if self._whole_prompts:
            return available if available <= self.budget else 0
        if available == 1:
            return 1 if self.budget else 0
        count = min(available, self.budget, most)
        if count > 1:
            count = min(count, max(self._multiple, self.budget - num_behind, self.budget // 2))
        if count < available:
            count -= count % self._multiple
        return count

    def add(self, request: Request, slot: int, count: int, available: int) -> None:
        samples = count == available
        request.num_scheduled_tokens += count
        if samples:
            request.num_pending_samples += 1
            request.num_worker_tokens += 1
            if request.constraint is not None:
                self.masked_slots.append(slot)
        self.scheduled.append(Scheduled(request, request.admission, slot, count, samples))
        self.budget -= count

    def plan(self, freed_slots: list[int]) -> StepPlan:
        return StepPlan(
            self.step,
            [part.slot for part in self.scheduled],
            [part.num_tokens for part in self.scheduled],
            self.starts,
            self.new_blocks,
            freed_slots,
            self.new_tokens,
            self.forced_tokens,
            self.masked_slots,
        )


class _Blocked(NamedTuple):
    """A waiting request that did not fit, and what was there at the time."""

    request: Request
    step: int
    num_unreserved: int
    num_running: int


@dataclass(slots=True)
class Counters:
    """Sums since the start, under the names of the fields of `LoadReport`."""

    num_steps: int = 0
    """Steps whose results were applied."""
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens of admitted requests."""
    num_prefix_hit_tokens: int = 0
    """Prompt tokens that were found in the cache."""
    num_generated_tokens: int = 0


class Batcher:
    """Makes plans from the requests that run and wait."""

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KVManager,
        clock: Clock,
        places: Places,
        quarantine: Quarantine,
    ) -> None:
        self.counters = Counters()
        self.in_flight: deque[InFlightStep] = deque()
        self.unmasked: deque[InFlightStep] = deque()
        """Steps in flight that sample with grammars, and whose masks have not been sent."""
        self.next_step = 0
        self.hooks = KVHooks()
        self.leaders = Leaders(kv)
        self._limits = limits
        self._kv = kv
        self._clock = clock
        self._places = places
        self._running, self._waiting = places.running, places.waiting
        self._quarantine = quarantine
        self._blocked: _Blocked | None = None
        self._last_was_decodes = False
        """The kind of the last step, where `mixed_steps` is off."""
        self._in_turn = True
        """Requests with dear grammars take turns in the plan that is being made."""
        self._dear_s = 0.0
        """Processor time of the masks of all requests with dear grammars, in the last plan."""

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is nothing that can be computed now."""
        plan, gave_way = self._next_plan(in_turn=True)
        if plan is None and gave_way and not self.in_flight:
            plan, _ = self._next_plan(in_turn=False)
        return plan

    def _next_plan(self, *, in_turn: bool) -> tuple[StepPlan | None, bool]:
        """The next step, if there is one, and whether dear grammars gave way, as they do `in_turn`."""
        gave_way = False
        for decodes in self._kinds():
            plan = PlanBuilder(self.next_step, self._limits, decodes, self._max_decodes())
            self._in_turn = in_turn
            alone = self._quarantine.first()
            if alone is not None:
                self._schedule_alone(alone, plan)
            else:
                self._yield_to_higher_priority()
                self._fill(plan)
                self._dear_s = plan.dear_s
            if plan.scheduled:
                self._last_was_decodes = bool(decodes)
                self.next_step += 1
                step = InFlightStep(plan.step, plan.scheduled, plan.has_decodes)
                self.in_flight.append(step)
                if plan.masked_slots:
                    self.unmasked.append(step)
                return plan.plan(self._places.drain_freed_slots()), False
            gave_way |= plan.gives_way
        return None, gave_way

    def _gives_way(self, request: Request, plan: PlanBuilder) -> bool:
        """True if the grammar of a running request is so dear that the others of the step, who would wait for its
        mask, go first. A request whose turn was in a step gives way until all others can have had theirs."""
        if request.constraint is None or (cost := request.constraint.cost_s) <= DEAR_S:
            return False
        plan.dear_s += cost
        is_full = plan.masks_s > 0 and plan.masks_s + cost > STEP_MASKS_S
        if is_full or (self._in_turn and plan.step < request.mask_turn):
            plan.gives_way = True
            return True
        plan.masks_s += cost
        # A step that has no room for requests like this one is as full as that, and half full at least.
        request.mask_turn = plan.step + math.ceil(
            self._dear_s / max(STEP_MASKS_S - cost, STEP_MASKS_S / 2)
        )
        return False

    def _kinds(self) -> tuple[bool | None, ...]:
        """Kinds to try for the step: None for any tokens; else single tokens (True) and chunks (False) in turn."""
        if self._limits.mixed_steps:
            return (None,)
        return (not self._last_was_decodes, self._last_was_decodes)

    def _max_decodes(self) -> int:
        """The most decoding requests in the step, so that every stage gets an equal part of them.

        0 while as many parts are in flight as there are stages: requests left over join a part that comes back,
        since a step costs much that does not depend on its size.
        """
        num_stages = self._limits.num_stages
        if num_stages == 1:
            return self._limits.max_num_seqs
        if sum(step.has_decodes for step in self.in_flight) >= num_stages:
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
        hit = self._fitting_prefix(request)
        while hit is None and self._running:
            self.preempt(self._running[-1])
            hit = self._fitting_prefix(request)
        if hit is not None:
            self._admit(request, hit, plan)

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
        ask yet whether there is KV for them are passed over, and so are requests whose blocks another computes.
        """
        preemptions = self.counters.num_preemptions
        index = num_led = 0
        first = self._next_in_line(_NO_KEY)
        while plan.budget > 0:
            request = self._running[index] if index < len(self._running) else None
            if first is not None and (request is None or first.order_key[0] < request.order_key[0]):
                hit = None
                is_led = num_led < _MAX_LED and self.leaders.is_awaiting(first)
                if not is_led:
                    hit = self._fitting_prefix(first)
                    is_led = (
                        hit is not None and num_led < _MAX_LED and self.leaders.is_led(first, hit)
                    )
                if is_led:
                    num_led += 1
                    first = self._next_in_line(first.order_key)
                    continue
                start = LoadStart.READY if hit is None else self.hooks.start(first, hit)
                if start is LoadStart.READY:
                    if hit is None or not self._admit(first, hit, plan):
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
                if self.counters.num_preemptions != preemptions:
                    first = None
                index += 1
            else:
                return

    def _next_in_line(self, key: OrderKey) -> Request | None:
        """The first waiting request behind `key` that may go on, if there is room for it."""
        return self.hooks.first_ready(self._waiting.after(key)) if self._waiting else None

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
        slot, count = request.slot, plan.count_for(available, num_behind, self._most(request))
        if count == 0 or slot is None or self._gives_way(request, plan):
            return
        if available == 1:
            if plan.decodes_left == 0:
                return
            plan.decodes_left -= 1
            plan.has_decodes = True
        num_tokens = request.num_scheduled_tokens + count
        if not self._kv.has_room_for(request.table, num_tokens):
            new_blocks = self._kv.grow(request.table, num_tokens)
            while new_blocks is None:
                if not self.hooks.make_room():
                    victim = self._running[-1]
                    self.preempt(victim)
                    if victim is request:
                        return
                new_blocks = self._kv.grow(request.table, num_tokens)
            plan.new_blocks += [NewBlocks(slot, *blocks) for blocks in new_blocks]
            self._places.update(request)
        if not request.runs_ahead:
            new_tokens = request.token_ids[request.num_sent_tokens : request.num_worker_tokens]
            plan.new_tokens += [(slot, token_id) for token_id in new_tokens]
            request.num_sent_tokens = request.num_tokens
        num_expected = request.num_tokens + request.num_pending_samples
        if num_expected > request.num_worker_tokens:
            forced = request.token_ids[request.num_worker_tokens - num_expected :]
            plan.forced_tokens.append((slot, forced))
            request.num_worker_tokens = num_expected
        plan.add(request, slot, count, available)

    def _most(self, request: Request) -> int:
        """The most tokens that the next step may compute of the request, where windows free blocks behind them.

        Two chunks may be under way, so that the worker never waits for a plan.
        """
        run_tokens = self._kv.run_tokens
        left = run_tokens - (request.num_scheduled_tokens - request.num_computed_tokens)
        return min(left, max(self._limits.batch_multiple, run_tokens // 2))

    def preempt(self, request: Request) -> None:
        """Takes slot and blocks away; the request keeps its tokens and will compute them again."""
        self.hooks.on_preempted(request)
        self.leaders.leave(request)
        self.free_blocks(request)
        self._places.forget_computed(request)
        self._places.enter(request, RequestState.WAITING)
        self.counters.num_preemptions += 1

    def free_blocks(self, request: Request) -> None:
        """Steps in flight may still use the blocks: what a preempted request samples in them counts."""
        is_confirmed = request.num_computed_tokens == request.num_scheduled_tokens
        self._kv.free(request.table, last_step=-1 if is_confirmed else self.next_step - 1)

    def _fitting_prefix(self, request: Request) -> PrefixHit | None:
        """The request's cached prefix if it can be admitted now, else None.

        A request whose last sample is still pending waits for it.
        """
        can_run = self._places.has_slot and not request.num_pending_samples
        if not can_run or self._is_still_blocked(request):
            return None
        hit = self._kv.find_prefix(request.table, request.token_ids)
        while not self._places.has_room(request, hit, in_turn=False):
            if self._places.is_full or not self.hooks.make_room():
                num_running = len(self._running)
                self._blocked = _Blocked(
                    request, self.next_step, self._places.num_unreserved, num_running
                )
                return None
        return hit

    def _is_still_blocked(self, request: Request) -> bool:
        """True if nothing became free since the request last did not fit: looking at a long prompt costs time."""
        blocked = self._blocked
        return (
            blocked is not None
            and blocked.request is request
            and self.next_step < blocked.step + _BLOCKED_STEPS
            and self._places.num_unreserved <= blocked.num_unreserved
            and len(self._running) == blocked.num_running > 0
        )

    def _admit(self, request: Request, hit: PrefixHit, plan: PlanBuilder) -> bool:
        """Moves a waiting request into a slot with its first chunk; False if the step has no room for it."""
        num_hit_tokens = hit.num_blocks * self._kv.block_size
        available = request.num_tokens - num_hit_tokens
        count = plan.count_for(available, most=self._most(request))
        is_dear = request.constraint is not None and request.constraint.cost_s > DEAR_S
        if count == 0 or (is_dear and plan.starts_dear):
            return False
        plan.starts_dear |= is_dear
        self._kv.adopt(request.table, hit)
        if self._kv.grow(request.table, num_hit_tokens + count) is None:
            raise RuntimeError("A request was admitted that does not fit.")
        request.num_scheduled_tokens = num_hit_tokens
        self._places.count_computed(request, num_hit_tokens)
        self._places.enter(request, RequestState.RUNNING)
        slot = request.slot
        if slot is None:
            raise RuntimeError("A running request has no slot.")
        request.admission += 1
        request.num_sent_tokens = request.num_worker_tokens = request.num_tokens
        if request.num_cached_tokens is None:
            self._note_first_admission(request, hit.num_blocks)
        plan.starts.append(request.slot_start(slot))
        self.leaders.advance(request)
        self.hooks.on_admitted(request)
        plan.add(request, slot, count, available)
        return True

    def _note_first_admission(self, request: Request, num_hits: int) -> None:
        request.queue_time_s = self._clock.now() - request.added_at
        num_fetched = max(0, min(num_hits, request.fetched.stop) - request.fetched.start)
        num_cached_tokens = (num_hits - num_fetched) * self._kv.block_size
        request.num_cached_tokens = min(num_cached_tokens, request.num_prompt_tokens)
        self.counters.num_prefix_hit_tokens += request.num_cached_tokens
        self.counters.num_prompt_tokens += request.num_prompt_tokens

    def forget_blocked(self) -> None:
        """Something may have become free that `_is_still_blocked` does not see."""
        self._blocked = None
