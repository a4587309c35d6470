"""Executes step plans on a loaded model, or on one rank's part of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from functools import reduce
from itertools import accumulate
from operator import add
from typing import Any, TypeVar

import torch
from torch import Tensor

from pagoda.messages.worker import StepPlan, StepResult
from pagoda.model.decoder import Decoder
from pagoda.telemetry.tracer import Tracer
from pagoda.worker.group_sampler import BROKE_A_STEP, GroupSampler
from pagoda.worker.input_batch import InputBatch
from pagoda.worker.prompt_outputs import PromptOutputs, PromptReader
from pagoda.worker.sampler import NOT_FINITE, Sampled, merged
from pagoda.worker.stages import StageState
from pagoda.worker.step_clock import StepClock

T = TypeVar("T")

_log = logging.getLogger(__name__)


class StageRunner:
    """A stage before the last: tokens or hidden states in, hidden states out."""

    def __init__(self, model: Decoder[Any, Any], batch: InputBatch, tracer: Tracer) -> None:
        self.model = model
        self.batch = batch
        self._clock = StepClock(tracer)

    @torch.inference_mode()
    def step(self, plan: StepPlan, before: StageState | None = None) -> StageState:
        """Executes a plan for the next stage; `before` comes from the stage before, if there is one."""
        self._clock.start()
        batch = self.batch
        batch.apply(plan)
        for slot, token_id in plan.new_tokens:
            batch.append(slot, token_id)
        batch.append_forced(plan)
        tokens = batch.prepare(plan.slots, plan.num_tokens)
        self._clock.ended("prepare")
        computed = self.model.forward(tokens, None if before is None else before.hidden)
        for slot, count in zip(plan.slots, plan.num_tokens, strict=True):
            batch.advance(slot, count)
        expert_tokens = self.model.take_expert_tokens()
        self._clock.ended("forward")
        times = self._clock.times
        if before is None:
            return StageState(computed, expert_tokens, times)
        return StageState(
            computed, _sum(before.expert_tokens, expert_tokens), times.behind(before.times)
        )


def _sum(one: list[int], other: list[int]) -> list[int]:
    return list(map(add, one, other))


class Runner:
    """The last stage, or the only one, which samples."""

    def __init__(
        self,
        model: Decoder[Any, Any],
        batch: InputBatch,
        sampler: GroupSampler,
        prompts: PromptReader,
        tracer: Tracer,
        *,
        alone: bool = True,
    ) -> None:
        """`alone`: no other rank takes part in a step, so that it can be tried again in parts."""
        self.model = model
        self.batch = batch
        self._sampler = sampler
        self._prompts = prompts
        self._clock = StepClock(tracer)
        self._alone = alone
        self.failed: dict[int, str] = {}
        """Slots whose request has failed, until the engine frees them."""

    @torch.inference_mode()
    def step(self, plan: StepPlan, before: StageState | None = None) -> StepResult:
        """Executes a plan; `before` comes from the stage before this one, if there is one.

        Alone, a request that cannot be computed fails alone. One rank of several cannot know how far the others
        got: there, what goes wrong ends the worker, and the engine finds out whose fault it is.
        """
        self._clock.start()
        self._apply(plan)
        self._sampler.begin(plan)
        counts = dict(zip(plan.slots, plan.num_tokens, strict=True))
        errors = {slot: self.failed[slot] for slot in counts if slot in self.failed}
        hidden = None if before is None else _without(errors.keys(), plan, before.hidden)
        counts = {slot: count for slot, count in counts.items() if slot not in errors}
        compute = self._compute_isolated if self._alone else self._compute
        sampled, expert_tokens = compute(counts, hidden)
        for slot, error in sampled.errors.items():
            _log.error("failed in step %d: %s", plan.step, error, extra=self.batch.log_fields(slot))
        self.failed |= sampled.errors
        self._advance({s: n for s, n in counts.items() if s not in self.failed}, sampled)
        drawn = [slot for slot in plan.slots if slot in sampled.token_ids]
        self._clock.ended("sample")
        times = self._clock.times
        if before is not None:
            expert_tokens = _sum(before.expert_tokens, expert_tokens)
            times = times.behind(before.times)
        return StepResult(
            step=plan.step,
            slots=drawn,
            token_ids=[sampled.token_ids[slot] for slot in drawn],
            logprobs=sampled.logprobs,
            prompt_logprobs=_finite(sampled.prompts.logprobs),
            embeddings=_finite(sampled.prompts.embeddings),
            errors=errors | sampled.errors | _errors(sampled.prompts),
            step_time_s=times.total,
            prepare_time_s=times.prepare,
            forward_time_s=times.forward,
            sample_time_s=times.sample,
            expert_tokens=expert_tokens,
        )

    def _apply(self, plan: StepPlan) -> None:
        self.batch.apply(plan)
        for slot in plan.freed_slots:
            self._sampler.free(slot)
            self._prompts.free(slot)
            self.failed.pop(slot, None)
        for start in plan.starts:
            self._sampler.start(start)
            self._prompts.start(start)
        self.batch.append_forced(plan)
        for slot, token_ids in plan.forced_tokens:
            for token_id in token_ids:
                self._sampler.append(slot, token_id)

    def _compute_isolated(
        self, counts: dict[int, int], hidden: Tensor | None
    ) -> tuple[Sampled, list[int]]:
        """Computes all slots together, or one by one if that raises, to find out whose fault it is.

        Computing tokens a second time writes the same K and V to the same places and draws the same tokens:
        nothing is remembered until the whole step is done.
        """
        try:
            return self._compute(counts, hidden)
        except Exception:
            # What the attempt gave to experts before it raised does not count.
            none = [0] * len(self.model.take_expert_tokens())
            if len(counts) == 1:
                (slot,) = counts
                _log.exception("computing this request raised", extra=self.batch.log_fields(slot))
                return Sampled(errors={slot: BROKE_A_STEP}), none
            _log.exception("computing %d requests together raised", len(counts))
        parts = [self._compute_isolated({slot: count}, hidden) for slot, count in counts.items()]
        return merged(sampled for sampled, _ in parts), reduce(
            _sum, (tokens for _, tokens in parts)
        )

    def _compute(self, counts: dict[int, int], hidden: Tensor | None) -> tuple[Sampled, list[int]]:
        """Computes the slots together; returns their results and the tokens that went to each expert."""
        if not counts:
            self._clock.ended("prepare")
            return Sampled(), self.model.take_expert_tokens()
        batch = self.batch
        tokens = batch.prepare(list(counts), list(counts.values()))
        self._clock.ended("prepare")
        ends = accumulate(counts.values())
        parts = [(*part, end) for part, end in zip(counts.items(), ends, strict=True)]
        samples = self._prompts.samples
        last = {
            slot: end - 1 for slot, n, end in parts if batch.will_sample(slot, n) and samples(slot)
        }
        chunks = self._prompts.chunks(
            (slot, batch.num_computed_tokens([slot]), n, end - n) for slot, n, end in parts
        )
        wanted = [*last.values()]
        if chunks:
            wanted += {row for chunk in chunks for row in chunk.rows()}.difference(wanted)
        hidden = self.model.forward(tokens, hidden, wanted)
        self._clock.ended("forward")
        rows = {slot: row for row, slot in enumerate(last)}
        sampled = self._sampler.sample(self.model, hidden, rows) if rows else Sampled()
        if chunks:
            places = {row: place for place, row in enumerate(wanted)}
            sampled.prompts.update(self._prompts.read(self.model, hidden, places, chunks))
        return sampled, self.model.take_expert_tokens()

    def _advance(self, counts: dict[int, int], sampled: Sampled) -> None:
        """Remembers what the step computed and drew."""
        self._prompts.advance(sampled.prompts)
        for slot, count in counts.items():
            self.batch.advance(slot, count)
        for slot, token_id in sampled.token_ids.items():
            self.batch.append(slot, token_id)
            self._sampler.append(slot, token_id)


def _finite(values: Mapping[int, T | None]) -> dict[int, T]:
    return {slot: value for slot, value in values.items() if value is not None}


def _errors(prompts: PromptOutputs) -> dict[int, str]:
    """The engine ends these requests; until then all ranks go on alike."""
    both = (*prompts.logprobs.items(), *prompts.embeddings.items())
    return {slot: NOT_FINITE for slot, value in both if value is None}


def _without(slots: Set[int], plan: StepPlan, hidden: Tensor) -> Tensor:
    """The rows of the plan's other slots."""
    if not slots:
        return hidden
    kept = torch.tensor([slot not in slots for slot in plan.slots])
    return hidden[kept.repeat_interleave(torch.tensor(plan.num_tokens))]
