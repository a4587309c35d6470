"""A step in the making, and steps in flight."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from pagoda.engine.limits import SchedulerLimits
from pagoda.engine.request import Request
from pagoda.messages.worker import SlotStart, StepPlan


class Scheduled(msgspec.Struct, frozen=True, gc=False):
    """One request's part of a step."""

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
        self.new_blocks: list[tuple[int, list[int]]] = []
        self.new_tokens: list[tuple[int, int]] = []
        self.decodes_left = max_decodes
        self.has_decodes = False
        self.is_mixed = decodes is None
        self._multiple = limits.batch_multiple
        self._decodes = decodes

    def count_for(self, available: int, num_behind: int = 0) -> int:
        """Tokens that this step gives to a request with `available` schedulable tokens; 0 if none.

        A chunk leaves one token of the budget to each of `num_behind` requests, but takes at least half of it.
        """
        if available <= 0 or (self._decodes is not None and self._decodes != (available == 1)):
            return 0
        if available == 1:
            return 1 if self.budget else 0
        count = min(available, self.budget)
        if count > 1:
            count = min(count, max(self._multiple, self.budget - num_behind, self.budget // 2))
        if count < available:
            count -= count % self._multiple
        return count

    def add(self, request: Request, slot: int, count: int, available: int) -> None:
        samples = count == available
        request.num_scheduled_tokens += count
        request.num_pending_samples += samples
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
        )
