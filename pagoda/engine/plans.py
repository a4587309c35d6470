# SPDX-License-Identifier: Apache-2.0
"""Step plans: the plan builder collects the parts of one step within its token budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import add
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pagoda.engine.grammar_turns import GrammarTurns
from pagoda.engine.request import Request
from pagoda.kv.manager import UNLIMITED_RUN
from pagoda.messages.segments import ColdSegment
from pagoda.messages.worker import NewBlocks, SlotStart, StepPlan

if TYPE_CHECKING:
    from pagoda.engine.batching import SchedulerLimits


class Scheduled(msgspec.Struct, frozen=True, gc=False):
    """Part of one request in a step."""

    request: Request
    admission: int
    slot: int
    num_tokens: int
    samples: bool
    num_cold: int
    """Cold segments of the request that the step reads."""


class InFlightStep(NamedTuple):
    """A step that the worker has not answered yet."""

    step: int
    scheduled: list[Scheduled]
    has_decodes: bool
    """True if the step computes single tokens of decoding requests."""
    drafts: dict[int, list[int]]
    """Tokens by slot that the step computes besides, and behind each of which the slot samples too."""
    proposals: dict[int, int]
    """The most tokens by slot that the worker may propose."""
    num_cold_blocks: int = 0
    """Cold blocks that the step reads."""


class DemandBehind(NamedTuple):
    """Demand of requests behind a chunk of a prompt."""

    num_tokens: int
    share: float
    """Part of the budget that the chunk takes in any case."""


class Demand:
    """Tokens that running requests want of a step, summed over those behind each one that are of its priority.

    All are looked at once; the sums hold until a request behind the one that is asked for has changed or gone.
    """

    def __init__(self, running: Sequence[Request]) -> None:
        self._demand_behind: list[tuple[int, int, float]] = []
        """Results of `behind`, by place."""
        self._lasts: dict[tuple[int, str], tuple[int, float]] = {}
        """Place of the last prompt of each priority and tenant, and the tenant's weight."""
        priority: int | None = None
        own_tokens: Counter[str] = Counter()
        for place, request in enumerate(reversed(running)):
            key = request.order_key[0], request.tenant
            if key[0] != priority:
                priority, num_decodes, num_tokens, weight = key[0], 0, 0, 0.0
                own_tokens.clear()
            own_weight = self._lasts[key][1] if key in self._lasts else 0.0
            others = num_tokens - own_tokens[request.tenant]
            self._demand_behind.append(
                (num_decodes, others, weight - own_weight if others else 0.0)
            )
            wanted = request.num_schedulable_tokens
            if wanted == 1:
                num_decodes += 1
            elif wanted:
                num_tokens += wanted
                own_tokens[request.tenant] += wanted
                if key not in self._lasts:
                    self._lasts[key] = place, request.charge.weight
                    weight += request.charge.weight

    def behind(self, place: int) -> tuple[int, int, float]:
        """Requests that decode behind the one that is so many places in front of the last, the tokens of other
        tenants' prompts there, and the weights of these tenants, added up."""
        return self._demand_behind[place]

    def has_prompt_behind(self, place: int, priority: int, tenant: str) -> bool:
        last = self._lasts.get((priority, tenant))
        return last is not None and last[0] < place


class PlanBuilder:
    """Collects the parts of one step within the token budget."""

    def __init__(
        self,
        step: int,
        limits: SchedulerLimits,
        decodes: bool | None,
        max_decodes: int,
        turns: GrammarTurns,
    ) -> None:
        """`decodes` is True for single tokens only, False for chunks only, None for both together."""
        self.step = step
        self.budget = limits.max_num_batched_tokens
        self.scheduled: list[Scheduled] = []
        self.starts: list[SlotStart] = []
        self.new_blocks: list[NewBlocks] = []
        self.new_tokens: list[tuple[int, int]] = []
        self.forced_tokens: list[tuple[int, list[int]]] = []
        self.drafts: dict[int, list[int]] = {}
        self.num_drafts = 0
        """Tokens of these."""
        self.proposals: dict[int, int] = {}
        self.masked_slots: list[int] = []
        self.cold: list[ColdSegment] = []
        self.num_cold_blocks = 0
        """Cold blocks that the step reads."""
        self.turns = turns
        self.first: Request | None = None
        """The first in line of those that the step has not looked at; None once nobody may be admitted."""
        self.demand: Demand | None = None
        """Tokens that running requests want of the step, once that was asked for."""
        self.decodes_left = max_decodes
        self.has_decodes = False
        self.is_mixed = decodes is None
        self._multiple = limits.batch_multiple
        self._decodes = decodes
        self._whole_prompts = limits.whole_prompts
        self._max_chunk_tokens = limits.max_chunk_tokens

    @property
    def encodes(self) -> bool:
        """True if audio or text of a request that begins is encoded before the step, which may take as long as
        many steps."""
        return bool(self.starts) and self.starts[-1].work.encoder_input is not None

    def count_for(
        self, available: int, behind: DemandBehind | None = None, most: int = UNLIMITED_RUN
    ) -> int:
        """Tokens that this step gives to a request with `available` schedulable tokens; 0 if none.

        A chunk leaves the tokens of the budget that those `behind` want, but takes its share of it. No chunk is
        longer than `most`.
        """
        if min(available, most) <= 0 or (
            self._decodes is not None and self._decodes != (available == 1)
        ):
            return 0
        if self._whole_prompts:
            return available if available <= self.budget else 0
        if available == 1:
            return 1 if self.budget else 0
        count = min(available, self.budget, most, self._max_chunk_tokens)
        if count > 1 and behind is not None:
            share = int(self.budget * behind.share)
            count = min(count, max(self._multiple, self.budget - behind.num_tokens, share))
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
        part = Scheduled(request, request.admission, slot, count, samples, len(request.table.cold))
        self.scheduled.append(part)
        self.num_cold_blocks += request.table.num_cold_blocks
        self.budget -= count

    def add_drafts(self, request: Request, slot: int, drafts: list[int]) -> None:
        """Adds drafts of a request, all of whose tokens are in the plan."""
        request.num_scheduled_tokens += len(drafts)
        request.is_drafted = True
        self.num_drafts += len(drafts)
        self.budget -= len(drafts)
        self.drafts[slot] = drafts

    def plan(self, freed_slots: list[int]) -> StepPlan:
        num_tokens = [part.num_tokens for part in self.scheduled]
        if self.drafts:
            more = (len(self.drafts.get(part.slot, ())) for part in self.scheduled)
            num_tokens = list(map(add, num_tokens, more))
        return StepPlan(
            self.step,
            [part.slot for part in self.scheduled],
            num_tokens,
            self.starts,
            self.new_blocks,
            freed_slots,
            self.new_tokens,
            self.forced_tokens,
            list(self.drafts.items()),
            list(self.proposals.items()),
            self.masked_slots,
            self.cold,
        )
