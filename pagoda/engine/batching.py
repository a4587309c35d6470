# SPDX-License-Identifier: Apache-2.0
"""Plans of steps: the requests that compute in the next step, and their numbers of tokens.

docs/architecture.md explains the one arithmetic of tokens and computed tokens, and how stages stay busy.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, islice, takewhile
from typing import NamedTuple

import msgspec

from pagoda.engine.fair_shares import FairShares
from pagoda.engine.kv_hooks import KVHooks, LoadStart
from pagoda.engine.leaders import Leaders
from pagoda.engine.places import Places, Quarantine
from pagoda.engine.plans import Behind, InFlightStep, PlanBuilder, Wishes
from pagoda.engine.request import OrderKey, Request, RequestState
from pagoda.ipc.clock import Clock
from pagoda.kv.manager import UNLIMITED_RUN, KVManager, PrefixHit
from pagoda.messages.engine_config import EngineConfig
from pagoda.messages.kv_groups import KVKind
from pagoda.messages.worker import NewBlocks, StepPlan, WorkerReady

_BLOCKED_STEPS = 16
"""Steps after which a request that did not fit is looked at again, when nothing became free."""

_MAX_LED = 32
"""Requests that a step passes over because others compute their blocks."""

DEAR_S = 0.001
"""Processor time of a token from which on the grammar of a request is dear."""

STEP_MASKS_S = 0.008
"""Processor time that the masks of dear grammars take of a step, as far as more than one request has one."""

AGEING_STEPS = 8
"""Full steps, for every so many of whose tokens that go to higher priorities one waiting request of a lower one,
the first to have come, is raised to the front of all that wait."""

_MAX_OTHERS = 16
"""Requests in line of whose tokens a long prompt of another tenant takes account."""

_NO_KEY: OrderKey = (-(2**63), -math.inf, -1)
"""A key that sorts in front of every order key."""


class SchedulerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits that every step obeys."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_chunk_tokens: int = UNLIMITED_RUN
    """Tokens of one prompt in a step."""
    batch_multiple: int = 1
    mixed_steps: bool = True
    num_stages: int = 1
    whole_prompts: bool = False
    """A prompt is computed in one step, and nothing goes on from it (encoders)."""
    gives_hidden: bool = True
    """Hidden states leave the device, of which embeddings are made."""
    embeds_spans: bool = False
    """Tokens may have embeddings that are given."""
    gives_logits: bool = True
    """The model can be asked for tokens, not for vectors or scores alone."""

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
            max_chunk_tokens=max(multiple, config.long_prefill_token_threshold or UNLIMITED_RUN),
            batch_multiple=multiple,
            mixed_steps=capabilities.mixed_steps,
            num_stages=config.worker.parallel.pipeline_parallel_size,
            whole_prompts=whole_prompts,
            gives_hidden=not capabilities.whole_models,
            embeds_spans=capabilities.embeds_spans,
            gives_logits=worker.gives_logits,
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
        self.on_begun: Callable[[Request], None] = lambda _: None
        """Listener for the first admission of a request."""
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
        self.shares = FairShares()
        self._num_overtaking_tokens = 0
        """Tokens given to requests of higher priorities since an overtaken request was last raised."""

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
                self._raise_the_overtaken()
                self._make_way()
                self._fill(plan)
                self._dear_s = plan.dear_s
            if plan.scheduled:
                self._last_was_decodes = bool(decodes)
                self.next_step += 1
                step = InFlightStep(plan.step, plan.scheduled, plan.has_decodes)
                self.in_flight.append(step)
                self._count_overtaking(plan)
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

    # ---- who goes first

    def _count_overtaking(self, plan: PlanBuilder) -> None:
        """Counts the tokens of the plan that went to higher priorities than that of a request without any."""
        lowest = self._lowest_without_tokens(plan)
        if lowest is None or lowest == self._top_priority():
            self._num_overtaking_tokens = 0
            return
        self._num_overtaking_tokens += sum(
            part.num_tokens for part in plan.scheduled if part.request.order_key[0] < lowest
        )

    def _lowest_without_tokens(self, plan: PlanBuilder) -> int | None:
        """The lowest priority in line, or of the last running request if it could have had tokens of the plan and
        has none; None if all have some."""
        lasts = [] if self._waiting.last is None else [self._waiting.last]
        lasts += [
            last
            for last in self._running[-1:]
            if last.num_schedulable_tokens
            and all(part.request is not last for part in plan.scheduled)
        ]
        return max((last.order_key[0] for last in lasts), default=None)

    def _top_priority(self) -> int:
        """The highest priority of all requests in line and running, of which there are some."""
        firsts = [*self._running[:1], *islice(self._waiting, 1)]
        return min(request.order_key[0] for request in firsts)

    def _raise_the_overtaken(self) -> None:
        """Ageing: of the requests with lower priorities that wait, or run and could have tokens, puts the first to
        have come before all others."""
        most = AGEING_STEPS * self._limits.max_num_batched_tokens
        if self._num_overtaking_tokens < most or not (self._waiting or self._running):
            return
        self._num_overtaking_tokens = 0
        top = self._top_priority()
        able = (request for request in self._running if request.num_schedulable_tokens)
        overtaken = [it for it in chain(self._waiting, able) if it.order_key[0] > top]
        if overtaken:
            chosen = min(overtaken, key=lambda request: request.order_key[2])
            self._places.reorder(chosen, (top, -math.inf, chosen.order_key[2]))

    def _make_way(self) -> None:
        """Makes room for the first waiting request: running requests of lower priorities give way, and the newest
        of a tenant that has more than its share while the first one's tenant has less, in sequences if these are
        all taken, else in tokens."""
        counts = not self._places.has_slot or self._places.is_full
        while self._running and (first := self._next_in_line(_NO_KEY)) is not None:
            if self._fitting_prefix(first) is not None:
                return
            last, victim = self._running[-1], None
            if not first.num_pending_samples:  # else it can only wait for these
                if first.order_key[0] < last.order_key[0]:
                    self.preempt(last)
                    continue
                victim = self._over_served(first, counts=counts)
            if victim is None:
                other = self._first_of_others(first)
                victim = None if other is None else self._over_served(other, counts=counts)
                if other is None or victim is None:
                    return
                priority, start, _ = first.order_key
                before = math.nextafter(start, -math.inf)
                self._places.reorder(other, (priority, before, other.order_key[2]))
                first = other
            self.preempt(victim)
            priority, start, arrival = victim.order_key
            behind = max(start, math.nextafter(first.order_key[1], math.inf))
            self._places.reorder(victim, (priority, behind, arrival))

    def _first_of_others(self, first: Request) -> Request | None:
        """The first in line behind `first` that is of its priority and of another tenant. Its tenant may have less
        than its share of what runs although it has had its share of tokens, for slots become free in bursts."""
        priority, start, _ = first.order_key
        if start == -math.inf or not self._waiting.has_others(first.tenant):
            return None
        others = self._waiting.others_after(first.order_key, first.tenant)
        equals = takewhile(lambda request: request.order_key[0] == priority, others)
        return self.hooks.first_ready(one for one in equals if not one.num_pending_samples)

    def _over_served(self, first: Request, *, counts: bool) -> Request | None:
        """The newest running request of the tenant that has most beside its weight, in sequences (`counts`) or
        tokens; None unless it has no less than the tenant of `first` when the two have changed places. A request
        that was preempted before gets on by as much as it computed again first, lest two tenants preempt each
        other again and again."""
        if not self._places.has_tenants:
            return None
        priority = first.order_key[0]
        sizes: dict[str, float] = {}
        newest: dict[str, Request] = {}
        for request in self._running:
            if request.order_key[0] == priority:
                size = _size(request, counts=counts)
                sizes[request.tenant] = sizes.get(request.tenant, 0.0) + size
                if request.has_made_up:
                    newest[request.tenant] = request
        if not sizes:
            return None
        heaviest = max(sizes, key=sizes.__getitem__)
        victim = newest.get(heaviest)
        if victim is None:
            return None
        rest = sizes[heaviest] - _size(victim, counts=counts)
        own = sizes.get(first.tenant, 0.0) + _size(first, counts=counts)
        return victim if heaviest != first.tenant and rest >= own else None

    def _victim_behind(self, request: Request) -> Request:
        """The request to preempt for blocks that `request` needs: one of the lowest priority, of several tenants
        the one with the most tokens beside its weight, the last in line; `request` itself if none is behind it.
        Requests of others that have not made up for their last preemption go last."""
        last = self._running[-1]
        if last is request or not self._places.has_tenants:
            return last
        priority = last.order_key[0]
        sizes: dict[str, float] = {}
        for other in self._running:
            sizes[other.tenant] = sizes.get(other.tenant, 0.0) + _size(other, counts=False)
        behind = self._running[self._places.index_of(request) + 1 :]
        candidates = (other for other in reversed(behind) if other.order_key[0] == priority)
        return max(
            candidates, key=lambda other: (self._may_lose(other, request), sizes[other.tenant])
        )

    @staticmethod
    def _may_lose(other: Request, request: Request) -> bool:
        return other.tenant == request.tenant or other.has_made_up

    # ---- the plan

    def _fill(self, plan: PlanBuilder) -> None:
        """Gives tokens in order of priority; among equals to running requests before waiting ones.

        No request is admitted once another was preempted, or behind one that does not fit. Requests that may not
        ask yet whether there is KV for them are passed over, and so are requests whose blocks another computes.
        """
        preemptions = self.counters.num_preemptions
        index = num_led = 0
        first = self._next_in_line(_NO_KEY)
        wishes: Wishes | None = None
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
                behind = None
                if available > 1:
                    wishes = wishes or Wishes(self._running)
                    place = len(self._running) - 1 - index
                    behind = self._behind(request, place, wishes, first, plan)
                self._extend(request, plan, available, behind)
                if self.counters.num_preemptions != preemptions:
                    preemptions = self.counters.num_preemptions
                    first = wishes = None
                index += 1
            else:
                return

    def _next_in_line(self, key: OrderKey) -> Request | None:
        """The first waiting request behind `key` that may go on, if there is room for it."""
        return self.hooks.first_ready(self._waiting.after(key)) if self._waiting else None

    def _behind(
        self, request: Request, place: int, wishes: Wishes, first: Request | None, plan: PlanBuilder
    ) -> Behind:
        """Wishes of requests behind this running one, which is so many places in front of the last, and of its
        priority: a token for each that decodes, and for prompts of other tenants a share by their weights."""
        priority, tenant, weight = request.order_key[0], request.tenant, request.charge.weight
        num_decodes, num_tokens, others = wishes.behind(place)
        has_others = num_tokens > 0
        if plan.is_mixed:
            num_tokens += min(num_decodes, plan.decodes_left)
        if first is not None and first.tenant != tenant and first.order_key[0] == priority:
            hit = self._fitting_prefix(first)
            if hit is not None:
                waiting = [first]
                num_tokens += first.num_tokens - hit.num_blocks * self._kv.block_size
                for other in islice(self._waiting.after(first.order_key), _MAX_OTHERS):
                    if other.tenant != tenant and other.order_key[0] == priority:
                        num_tokens += other.num_tokens
                        waiting.append(other)
                new = {one.tenant: one.charge.weight for one in waiting}
                others += sum(
                    its_weight
                    for name, its_weight in new.items()
                    if not wishes.has_prompt_behind(place, priority, name)
                )
                has_others = True
        share = weight / (weight + others) if has_others else 0.5
        return Behind(num_tokens, min(0.5, share))

    def _extend(
        self, request: Request, plan: PlanBuilder, available: int, behind: Behind | None = None
    ) -> None:
        """Gives a running request tokens, preempting requests behind it for blocks if need be."""
        slot, count = request.slot, plan.count_for(available, behind, self._most(request))
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
                    victim = self._victim_behind(request)
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
        request.num_preempted_tokens = max(
            request.num_preempted_tokens, request.num_computed_tokens
        )
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
        request.num_repeated_tokens = max(0, request.num_preempted_tokens - num_hit_tokens)
        self._places.count_computed(request, num_hit_tokens)
        self._places.enter(request, RequestState.RUNNING)
        slot = request.slot
        if slot is None:
            raise RuntimeError("A running request has no slot.")
        request.admission += 1
        request.num_sent_tokens = request.num_worker_tokens = request.num_tokens
        if request.num_cached_tokens is None:
            self._note_first_admission(request, hit.num_blocks)
            self.shares.admitted(request.charge)
            self.on_begun(request)
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


def _size(request: Request, *, counts: bool) -> float:
    """Sequences (`counts`) or tokens of the request over the weight of its tenant."""
    return (1 if counts else request.num_tokens) / request.charge.weight
