# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: the batcher fills each step with tokens of running and waiting requests (chunked prefill),
within the token budget.

docs/architecture.md explains the one arithmetic of tokens and computed tokens, and how stages stay busy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pagoda.engine.candidates import Candidates
from pagoda.engine.drafting.planner import DraftPlanner, StepSize
from pagoda.engine.fair_shares import FairShares
from pagoda.engine.grammar_turns import GrammarTurns
from pagoda.engine.in_flight_prefixes import InFlightPrefixes
from pagoda.engine.kv_hooks import LoadStart
from pagoda.engine.plans import DemandBehind, InFlightStep, PlanBuilder
from pagoda.engine.precedence import Precedence
from pagoda.engine.request import Request, RequestState
from pagoda.engine.request_queue import Quarantine, RequestQueue
from pagoda.engine.streaming import Streams
from pagoda.ipc.clock import Clock
from pagoda.kv.block_table import PrefixHit
from pagoda.kv.manager import UNLIMITED_RUN, KVManager
from pagoda.messages.engine_config import EngineConfig
from pagoda.messages.kv_groups import KVKind
from pagoda.messages.worker import NewBlocks, StepPlan, WorkerReady, most_sampled


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
    hidden_size: int = 0
    """Numbers of an embedding that may be given in place of a token; 0 if none can be."""
    feature_bytes: int = 0
    """Bytes of the features of each request's audio; 0 of a model that is given text alone."""
    encodes_text: bool = False
    """Each request brings a text for the model's encoder, of tokens below `vocab_size`."""
    vocab_size: int = 0
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
            hidden_size=worker.hidden_size,
            feature_bytes=worker.feature_bytes,
            vocab_size=worker.vocab_size,
            encodes_text=worker.encodes_text,
            gives_logits=worker.gives_logits,
        )


@dataclass(slots=True)
class Counters:
    """Sums since the start, under the names of the fields of `LoadReport`."""

    num_steps: int = 0
    """Steps whose results were applied."""
    num_preemptions: int = 0
    num_cold_segments: int = 0
    """Segments of running requests, of one KV group each, that went below the device or were found there."""
    num_lost_segments: int = 0
    """Steps of requests whose cold segments could not be read."""
    num_streamed_bytes: int = 0
    num_prompt_tokens: int = 0
    """Tokens of the prompts of admitted requests, as clients count them."""
    num_prefix_hit_tokens: int = 0
    """Prompt tokens that were found in the cache."""
    num_generated_tokens: int = 0
    num_drafts: int = 0
    """Drafts of one request in one step that were computed."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Tokens of drafts that were right."""
    accepted_per_position: list[int] = field(default_factory=list)
    """The same by their places in drafts."""

    def figures(self) -> dict[str, Any]:
        """The sums by name, as they are now."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return values | {"accepted_per_position": list(self.accepted_per_position)}

    def count_draft(self, num_tokens: int, num_accepted: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += num_tokens
        self.num_accepted_tokens += num_accepted
        per_position = self.accepted_per_position
        per_position += [0] * (num_accepted - len(per_position))
        for place in range(num_accepted):
            per_position[place] += 1


class Batcher:
    """Makes plans from the requests that run and wait."""

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KVManager,
        clock: Clock,
        queue: RequestQueue,
        quarantine: Quarantine,
    ) -> None:
        self.counters = Counters()
        self.in_flight: deque[InFlightStep] = deque()
        self.unmasked: deque[InFlightStep] = deque()
        """Steps in flight that sample with grammars, and whose masks have not been sent."""
        self.on_begun: Callable[[Request], None] = lambda _: None
        """Listener for the first admission of a request."""
        self.in_flight_prefixes = InFlightPrefixes(kv)
        self.candidates = Candidates(kv, queue)
        self.streams = Streams(kv, queue)
        self.shares = FairShares()
        self._precedence = Precedence(
            limits.max_num_batched_tokens, kv.block_size, queue, self.candidates
        )
        self._limits = limits
        self._kv = kv
        self._clock = clock
        self._queue = queue
        self._running = queue.running
        self._quarantine = quarantine
        self.speculator: DraftPlanner | None = None
        self._last_was_decodes = False
        """The kind of the last step, where `mixed_steps` is off."""
        self._slow_masks_s = 0.0
        """`GrammarTurns.slow_masks_s` of the last plan."""

    @property
    def next_step(self) -> int:
        """Number of the step that is planned next."""
        return self.candidates.step

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is nothing that can be computed now."""
        if self.speculator is not None and self._is_held_back(self.speculator):
            return None
        plan, gave_way = self._next_plan(in_turn=True)
        if plan is None and gave_way and not self.in_flight:
            plan, _ = self._next_plan(in_turn=False)
        return plan

    def _is_held_back(self, speculator: DraftPlanner) -> bool:
        """True if the next step awaits the end of the one before, because drafts pay or are under way."""
        room, num_stages = self._draft_room(), self._limits.num_stages
        # Several stages have a part of the requests each.
        num_tokens = -(-self._queue.num_pending_tokens // num_stages)
        speculator.size = StepSize(
            min(self._limits.max_num_batched_tokens, num_tokens),
            -(-len(self._running) // num_stages),
        )
        if self.in_flight and num_stages == 1:
            are_drafted = any(step.drafts for step in self.in_flight)
            return are_drafted or speculator.holds_back(self._running, room)
        speculator.draft(self._running, room)
        return False

    def _next_plan(self, *, in_turn: bool) -> tuple[StepPlan | None, bool]:
        """The next step, if there is one, and whether slow grammars gave way, as they do `in_turn`."""
        gave_way = False
        for decodes in self._kinds():
            turns = GrammarTurns(self.next_step, self._slow_masks_s, in_turn=in_turn)
            plan = PlanBuilder(self.next_step, self._limits, decodes, self._max_decodes(), turns)
            alone = self._quarantine.first()
            if alone is not None:
                self._fill_alone(alone, plan)
            else:
                self._precedence.raise_the_overtaken()
                self._precedence.make_way(self.preempt)
                self._fill(plan)
                self._slow_masks_s = turns.slow_masks_s
            if plan.scheduled:
                if self._kv.num_ranks > 1:
                    plan.scheduled.sort(key=lambda part: part.request.table.rank)
                self._last_was_decodes = bool(decodes)
                self.candidates.step += 1
                if self.speculator is not None:
                    plan.proposals = self.speculator.ask(plan.scheduled)
                step = InFlightStep(
                    plan.step,
                    plan.scheduled,
                    plan.has_decodes,
                    plan.drafts,
                    plan.proposals,
                    plan.num_cold_blocks,
                )
                self.streams.planned(plan)
                begun = sum(len(start.cold) for start in plan.starts)
                self.counters.num_cold_segments += begun + len(plan.cold)
                self.in_flight.append(step)
                self._precedence.count_overtaking(plan)
                if plan.masked_slots:
                    self.unmasked.append(step)
                return plan.plan(self._queue.drain_freed_slots()), False
            gave_way |= turns.gave_way
        return None, gave_way

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

    # ---- what fills a step

    def _fill(self, plan: PlanBuilder) -> None:
        """Gives tokens in order of priority; among equals to running requests before waiting ones.

        No request is admitted once another was preempted, or behind one that does not fit.
        """
        self.in_flight_prefixes.begin_step()
        plan.first = self.candidates.first()
        for request in list(self._running):  # decode, or a further chunk of the prompt
            if plan.first is not None:
                self._admit_in_line(plan, above=request.order_key[0])
            if plan.budget == 0:
                return
            if request.slot is None:  # it was preempted for one in front of it
                continue
            available = request.num_schedulable_tokens
            behind = self._precedence.behind(request, plan) if available > 1 else None
            self._extend(request, plan, available, behind)
        self._admit_in_line(plan)  # the first chunk of the prompt

    def _admit_in_line(self, plan: PlanBuilder, above: int | None = None) -> None:
        """Admits requests in line, all or those of a higher priority than `above`, as long as they fit."""
        while plan.budget > 0 and (first := plan.first) is not None:
            if above is not None and first.order_key[0] >= above:
                return
            goes_on = self._admit_first(first, plan)
            plan.first = self.candidates.first(behind=first.order_key) if goes_on else None

    def _admit_first(self, first: Request, plan: PlanBuilder) -> bool:
        """Admits the first in line, or passes it over: it may not ask yet whether there is KV for it, or another
        one computes its blocks. False if it does not fit, so that nobody behind it is admitted; nor is anybody
        behind one whose audio or text is to be encoded."""
        if plan.encodes:
            return False
        if self.in_flight_prefixes.is_awaiting(first) or self.streams.awaits_turn(first, plan):
            return True
        if not self.streams.has_room_below(first, plan.step):
            return True
        hit = self.candidates.fitting_prefix(first)
        if hit is None:
            return False
        if self.in_flight_prefixes.should_wait(first, hit):
            return True
        start = self.candidates.hooks.start(first, hit)
        if start is LoadStart.READY:
            return self._admit(first, hit, plan)
        return start is LoadStart.LEFT_LINE

    def _fill_alone(self, request: Request, plan: PlanBuilder) -> None:
        if request.state is RequestState.RUNNING:
            self._extend(request, plan, request.num_schedulable_tokens)
            return
        hit = self.candidates.fitting_prefix(request)
        while hit is None and self._running:
            self.preempt(self._running[-1])
            hit = self.candidates.fitting_prefix(request)
        if hit is not None:
            self._admit(request, hit, plan)

    def _extend(
        self,
        request: Request,
        plan: PlanBuilder,
        available: int,
        behind: DemandBehind | None = None,
    ) -> None:
        """Gives a running request tokens, preempting requests behind it for blocks if need be."""
        slot = request.slot
        if slot is None or not self._make_room_below(request, slot, plan):
            return
        count = plan.count_for(available, behind, self._most(request))
        num_cold_blocks = request.table.num_cold_blocks
        if count == 0 or not self.streams.may_stream(request, num_cold_blocks, count, plan):
            return
        if plan.turns.gives_way(request):
            return
        if available == 1:
            if plan.decodes_left == 0:
                return
            plan.decodes_left -= 1
            plan.has_decodes = True
        num_tokens = request.num_scheduled_tokens + count
        drafts = self._drafts(request, count, plan) if request.drafts and count == available else []
        num_wanted = num_tokens + len(drafts) if drafts else num_tokens
        may_ask = count == available and request.is_decoding
        if may_ask and self.speculator is not None and self.speculator.num_ahead:
            num_ahead = min(self.speculator.num_ahead, request.max_total_tokens - num_wanted)
            num_ahead = min(num_ahead, self._most(request) - (num_wanted - num_tokens + count))
            num_wanted += max(0, num_ahead)
        if not self._kv.has_room_for(request.table, num_wanted):
            new_blocks = self._kv.grow(request.table, num_wanted)
            if new_blocks is None and num_wanted > num_tokens:  # nobody makes way for drafts
                drafts, new_blocks = [], self._kv.grow(request.table, num_tokens)
            while new_blocks is None:
                if self.streams.makes_room(request):
                    plan.turns.gave_way = True
                    return
                if not self.candidates.hooks.make_room():
                    victim = self._precedence.victim_for(request)
                    self.preempt(victim)
                    plan.first = plan.demand = None
                    if victim is request:
                        return
                new_blocks = self._kv.grow(request.table, num_tokens)
            plan.new_blocks += [NewBlocks(slot, *blocks) for blocks in new_blocks]
            self._queue.update(request)
        if self._limits.num_stages > 1:
            new_tokens = request.token_ids[request.num_sent_tokens : request.num_worker_tokens]
            plan.new_tokens += [(slot, token_id) for token_id in new_tokens]
            request.num_sent_tokens = request.num_tokens
        num_expected = request.num_tokens + request.num_pending_samples
        if num_expected > request.num_worker_tokens:
            forced = request.token_ids[request.num_worker_tokens - num_expected :]
            plan.forced_tokens.append((slot, forced))
            request.num_worker_tokens = num_expected
        plan.add(request, slot, count, available)
        if drafts:
            plan.add_drafts(request, slot, drafts)

    def _make_room_below(self, request: Request, slot: int, plan: PlanBuilder) -> bool:
        """Lets segments of a running request go to the storeys below; False if the request was preempted, or stays
        as it is, because no storey has room for one."""
        if self.streams.advance(request, slot, plan) or self.streams.room(request):
            return True
        victim = self.streams.victim_for(request)
        if victim is None:
            if self.streams.awaits_room:
                plan.turns.gave_way = True
            else:
                self.streams.stuck.append(request)
            return False
        self.preempt(victim)
        plan.first = plan.demand = None
        plan.turns.gave_way = True
        return False

    def _drafts(self, request: Request, count: int, plan: PlanBuilder) -> list[int]:
        """Drafts behind the `count` tokens of a request for which there is room besides the tokens of all others
        that run or are in line."""
        rows = self._draft_room() - plan.num_drafts
        budget = plan.budget - count - len(self._running) + 1
        most = min(rows, budget, self._most(request) - count)
        return request.take_drafts(most if plan.is_mixed else 0)

    def _draft_room(self) -> int:
        """Drafts that a step may sample behind, besides the tokens of all that run or are in line."""
        num_running, most_seqs = len(self._running), self._limits.max_num_seqs
        num_coming = min(len(self._queue.waiting), most_seqs - num_running)
        return most_sampled(most_seqs) - num_running - num_coming

    def _most(self, request: Request) -> int:
        """The most tokens that the next step may compute of the request, where windows free blocks behind them.

        Two chunks may be under way, so that the worker never waits for a plan.
        """
        run_tokens = self._kv.run_tokens
        left = run_tokens - (request.num_scheduled_tokens - request.num_computed_tokens)
        most = min(left, max(self._limits.batch_multiple, run_tokens // 2))
        most = min(most, self.streams.room(request))
        return most if self._kv.num_ranks == 1 else min(most, self._even_share(request))

    def _even_share(self, request: Request) -> int:
        """The most tokens of the request's prompt in a step, so that all ranks have equally many where others
        could have some: prompts of other ranks, or those in line."""
        if request.num_schedulable_tokens <= 1:
            return UNLIMITED_RUN
        rank, is_waiting = request.table.rank, request.state is RequestState.WAITING
        if len(self._queue.waiting) > is_waiting or any(
            other.table.rank != rank and other.num_schedulable_tokens > 1 for other in self._running
        ):
            share = self._limits.max_num_batched_tokens // self._kv.num_ranks
            return max(self._limits.batch_multiple, share)
        return UNLIMITED_RUN

    def preempt(self, request: Request) -> None:
        """Takes slot and blocks away; the request keeps its tokens and will compute them again."""
        request.drafts = []
        self.candidates.hooks.on_preempted(request)
        self.in_flight_prefixes.leave(request)
        self.free_blocks(request)
        request.num_preempted_tokens = max(
            request.num_preempted_tokens, request.num_computed_tokens
        )
        self._queue.forget_computed(request)
        self._queue.enter(request, RequestState.WAITING)
        self.counters.num_preemptions += 1

    def free_blocks(self, request: Request) -> None:
        """Steps in flight may still use the blocks: what a preempted request samples in them counts."""
        is_confirmed = request.num_computed_tokens == request.num_scheduled_tokens
        self._kv.free(request.table, last_step=-1 if is_confirmed else self.next_step - 1)

    def _admit(self, request: Request, hit: PrefixHit, plan: PlanBuilder) -> bool:
        """Moves a waiting request into a slot with its first chunk; False if the step has no room for it."""
        num_hit_tokens = hit.num_blocks * self._kv.block_size
        available = request.num_tokens - num_hit_tokens
        room = self.streams.room_behind(request, hit)
        count = plan.count_for(available, most=min(self._most(request), room))
        if count == 0 or not plan.turns.may_start(request):
            return False
        if not self.streams.may_stream(request, self._kv.num_cold_blocks(hit), count, plan):
            return True
        self._kv.adopt(request.table, hit)
        if self._kv.grow(request.table, num_hit_tokens + count) is None:
            raise RuntimeError("A request was admitted that does not fit.")
        request.num_scheduled_tokens = num_hit_tokens
        request.num_repeated_tokens = max(0, request.num_preempted_tokens - num_hit_tokens)
        self._queue.count_computed(request, num_hit_tokens)
        self._queue.enter(request, RequestState.RUNNING)
        slot = request.slot
        if slot is None:
            raise RuntimeError("A running request has no slot.")
        request.admission += 1
        request.num_sent_tokens = request.num_worker_tokens = request.num_tokens
        if request.num_cached_tokens is None:
            self._note_first_admission(request, hit.num_blocks)
            self.shares.admitted(request.charge)
            self.on_begun(request)
        start = request.slot_start(slot)
        if request.table.cold:
            start = msgspec.structs.replace(start, cold=self.streams.cold_parts(request, slot))
        plan.starts.append(start)
        self.in_flight_prefixes.advance(request)
        self.candidates.hooks.on_admitted(request)
        plan.add(request, slot, count, available)
        return True

    def _note_first_admission(self, request: Request, num_hits: int) -> None:
        request.queue_time_s = self._clock.now() - request.added_at
        num_fetched = max(0, min(num_hits, request.fetched.stop) - request.fetched.start)
        num_cached_tokens = (num_hits - num_fetched) * self._kv.block_size
        request.num_cached_tokens = min(num_cached_tokens, request.num_prompt_tokens)
        self.counters.num_prefix_hit_tokens += request.num_cached_tokens
        self.counters.num_prompt_tokens += request.message.num_prompt_tokens
