# SPDX-License-Identifier: Apache-2.0
"""Executes step plans on a loaded model, or on one rank's part of it.

`submit` prepares a step, and `Ticket.result` computes it: the next step may be submitted before this one is
computed. What is counted (`InputBatch`) moves on when a step is submitted; what is remembered of requests (what
they said, prompts, failures) when it is computed. Steps are computed in the order in which they came. One thread
does all of it.

A device that computes by itself is given a step by `Ticket.launch`, and `Ticket.result` reads what it has found.
So the next step may be launched before this one is read: it takes tokens from the device that nobody knows yet.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, compress
from operator import add
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from pagoda.backend.base import DeviceLostError, FutureTokens
from pagoda.backend.kv_store import DeviceEvent
from pagoda.faults.injector import Faults
from pagoda.messages.worker import LostSegments, StepPlan, StepResult
from pagoda.model.decoder import LAST_HIDDEN, Decoder, PlannedBatch
from pagoda.telemetry.tracer import Tracer
from pagoda.worker.drafting.drafter import Drafter, SlotText
from pagoda.worker.faults import spoil_rows
from pagoda.worker.group_sampler import BROKE_A_STEP, GroupSampler
from pagoda.worker.input_batch import InputBatch, StepTokens
from pagoda.worker.kv.segments import computing, joined_losses
from pagoda.worker.pending_sample import PendingSample, joined
from pagoda.worker.prompt_outputs import PromptOutputs, PromptReader
from pagoda.worker.sampler import BLAMED_FIELDS, NOT_FINITE, Right, Sampled
from pagoda.worker.stages import StageState
from pagoda.worker.step_clock import StepClock, StepTimes
from pagoda.worker.steps_under_way import StepsUnderWay

T = TypeVar("T")
OutputT = TypeVar("OutputT", StepResult, StageState)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Launched:
    """A step that is computed, or that a device computes."""

    ready: _Ready
    tokens: StepTokens
    """The tokens of slots that have not failed before."""
    pending: PendingSample
    done: DeviceEvent
    """The device has computed all of it."""
    before: StageState | None
    clock: StepClock
    freed: set[int] = field(default_factory=set)
    """Slots that were freed since, which may have other requests."""


@dataclass(frozen=True)
class _Ready:
    """A step as far as it can be prepared while others run."""

    plan: StepPlan
    tokens: StepTokens
    planned: PlannedBatch[Any] | None
    """None where there are no tokens, or where it could not be made: running it finds out whose fault that is."""
    times: StepTimes
    errors: dict[int, str] = field(default_factory=dict)
    """Errors of slots that are left out."""


class Ticket(Generic[OutputT]):
    """A step that was submitted."""

    def __init__(
        self,
        plan: StepPlan,
        tokens: StepTokens,
        compute: Callable[[StageState | None], OutputT],
        launch: Callable[[], DeviceEvent | None] = lambda: None,
    ) -> None:
        self.plan = plan
        self._tokens = tokens
        self._compute: Callable[[StageState | None], OutputT] = compute
        self._launch = launch

    @property
    def num_context_tokens(self) -> int:
        """Tokens of the step's slots that have K and V behind it."""
        return self._tokens.num_context_tokens

    def launch(self) -> DeviceEvent | None:
        """Gives the step to the device, behind all that were launched before it; the event is that of its result.

        None where it cannot be launched yet, or steps are computed by whoever asks for their result."""
        return self._launch()

    def result(self, before: StageState | None = None) -> OutputT:
        """Computes the step behind all that were submitted before it; `before` comes from the stage before this
        one, if there is one. Raises RuntimeError: it is not the next one."""
        output: OutputT = self._compute(before)
        return output


class StageRunner:
    """A stage before the last: tokens or hidden states in, hidden states out."""

    def __init__(self, model: Decoder[Any, Any], batch: InputBatch, tracer: Tracer) -> None:
        self.model = model
        self.batch = batch
        self._steps = StepsUnderWay()
        self._clock = StepClock(tracer)
        self._tracer = tracer

    def submit(self, plan: StepPlan) -> Ticket[StageState]:
        """Prepares a step for the next stage. Raises ValueError: the plan does not fit the slots."""
        self._steps.check_room(plan.step)
        began = self._tracer.clock_ns()
        batch = self.batch
        batch.apply(plan)
        for slot, token_id in plan.new_tokens:
            batch.append(slot, [token_id])
        for slot, _ in plan.new_tokens:
            batch.settle(slot)
        batch.append_forced(plan)
        drafts = dict(plan.drafts)
        tokens = batch.prepare(plan.slots, plan.num_tokens, samples=False, drafts=drafts)
        planned = self.model.plan(tokens.batch)
        times = _prepared(self._tracer, began)
        self._steps.submitted(plan.step)
        return Ticket(plan, tokens, partial(self._result, plan.step, tokens, planned, times))

    @torch.inference_mode()
    def _result(
        self,
        step: int,
        tokens: StepTokens,
        planned: PlannedBatch[Any],
        prepared: StepTimes,
        before: StageState | None,
    ) -> StageState:
        self._steps.begin(step)
        self._clock.start()
        self.batch.read(tokens)
        self._clock.ended("prepare")
        hidden = None if before is None else before.hidden
        with computing(tokens.segments) as streamed:
            computed = self.model.forward(planned, hidden).cpu()
        lost = {tokens.slots[at]: lost for at, lost in streamed.lost.items()}
        expert_tokens = self.model.take_expert_tokens()()
        self._clock.ended("forward")
        self._steps.end()
        times = self._clock.times.behind(prepared)
        if before is None:
            return StageState(computed, expert_tokens, times, lost)
        counts = _sum(before.expert_tokens, expert_tokens)
        return StageState(
            computed, counts, times.behind(before.times), joined_losses(before.lost, lost)
        )


def _prepared(tracer: Tracer, began: int) -> StepTimes:
    """Times of a step that was prepared since `began`, on the tracer's clock."""
    now = tracer.clock_ns()
    if tracer.e2e():
        tracer.span("prepare", began, ended=now)
    return StepTimes(prepare=(now - began) / 1e9)


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
        has_states: bool = False,
        drafter: Drafter | None = None,
        faults: Faults | None = None,
    ) -> None:
        """`alone`: no other rank takes part in a step, so that it may be launched ahead, and tried again in parts.
        Layers that keep states (`has_states`) move them on as they compute: their steps are tried once. `faults`
        are those of this process."""
        point = None if faults is None else faults.point("worker.logits")
        self._spoil = None if point is None else partial(spoil_rows, point)
        self.model = model
        self.batch = batch
        self._sampler = sampler
        self._prompts = prompts
        self._steps = StepsUnderWay()
        self._clock = StepClock(tracer)
        self._tracer = tracer
        self._alone = alone
        self._has_states = has_states
        self._drafter = drafter
        self._launched: deque[_Launched] = deque()
        """Steps whose results have not been read."""
        self._request_ids: dict[int, str] = {}
        self.failed: dict[int, str] = {}
        """Slots whose request has failed, until the engine frees them, as of the last step that was computed."""
        self._lost: dict[int, LostSegments] = {}
        """Failed slots of which a cold segment could not be read."""

    def submit(self, plan: StepPlan) -> Ticket[StepResult]:
        """Prepares a step. Alone, a slot that does not fit its part of the plan fails alone.

        Raises ValueError: the plan does not fit the slots.
        """
        self._steps.check_room(plan.step)
        began = self._tracer.clock_ns()
        self.batch.apply(plan)
        self.batch.append_forced(plan)
        errors: dict[int, str] = {}
        drafts = dict(plan.drafts)
        try:
            tokens = self.batch.prepare(
                plan.slots, plan.num_tokens, drafts=drafts, ahead=_ahead(plan)
            )
        except ValueError:
            if not self._alone:
                raise
            _log.exception("step %d does not fit its slots", plan.step)
            parts = list(zip(plan.slots, plan.num_tokens, strict=True))
            unfit = {
                slot for slot, n in parts if self.batch.misfit(slot, n, len(drafts.get(slot, ())))
            }
            errors = dict.fromkeys(unfit, BROKE_A_STEP)
            fitting = {slot: n for slot, n in parts if slot not in errors}
            drafts = {slot: drafts[slot] for slot in fitting.keys() & drafts.keys()}
            tokens = self.batch.prepare(
                list(fitting), list(fitting.values()), drafts=drafts, ahead=_ahead(plan)
            )
        planned = None
        try:
            planned = self.model.plan(tokens.batch) if tokens.slots else None
        except Exception:
            if not self._alone:
                raise
            _log.exception("step %d could not be prepared", plan.step)
        times = _prepared(self._tracer, began)
        self._steps.submitted(plan.step)
        ready = _Ready(plan, tokens, planned, times, errors)
        compute, launch = partial(self._result, ready), partial(self._launch_ahead, ready)
        return Ticket(plan, tokens, compute, launch)

    def _launch_ahead(self, ready: _Ready) -> DeviceEvent | None:
        if not self._may_launch(ready):
            return None
        launched = self._launch(ready, None)
        self._launched.append(launched)
        return launched.done

    def _may_launch(self, ready: _Ready) -> bool:
        """True if the step needs nothing of steps before it that only their results say."""
        plan = ready.plan
        if not (self._alone and self._sampler.overlaps):
            return False
        if not self._steps.is_next(plan.step, len(self._launched)):
            return False
        if not self._launched:
            return True
        return (
            ready.planned is not None
            and not ready.errors
            and not plan.forced_tokens
            and self.failed.keys().isdisjoint(plan.slots)
            and self._sampler.may_run_ahead(plan)
            and not self._prompts.has_prompts
        )

    def _result(self, ready: _Ready, before: StageState | None) -> StepResult:
        """Reads the step, which is launched now if it has not been."""
        self._steps.begin(ready.plan.step)
        launched = self._launched.popleft() if self._launched else self._launch(ready, before)
        result = self._collect(launched)
        self._steps.end()
        for later in self._launched:
            later.clock.start()  # until now the device had another step
        return result

    @torch.inference_mode()
    def _launch(self, ready: _Ready, before: StageState | None) -> _Launched:
        """Alone, a request that cannot be computed fails alone. One rank of several cannot know how far the others
        got, nor can states be moved on twice: there, what goes wrong ends the worker, and the engine finds out
        whose fault it is."""
        plan, tokens = ready.plan, ready.tokens
        self._clock = StepClock(self._tracer)
        self._clock.start()
        self._apply(plan)
        self._sampler.begin(plan)
        self.batch.read(tokens)
        self.failed |= ready.errors
        errors = {slot: self.failed[slot] for slot in plan.slots if slot in self.failed}
        hidden, planned = None if before is None else before.hidden, ready.planned
        if not errors.keys().isdisjoint(tokens.slots):
            chosen = [slot not in errors for slot in tokens.slots]
            if hidden is not None:
                hidden = hidden[torch.tensor(chosen).repeat_interleave(torch.tensor(tokens.counts))]
            tokens, planned = tokens.of(chosen), None
        compute = self._compute_isolated if self._alone else self._compute
        pending = compute(tokens, planned, hidden)
        if ready.tokens.segments is not None:
            earlier = {} if before is None else before.lost
            lost = joined_losses(earlier, pending.lost)
            pending.lost = self._sampler.lost_anywhere(plan.slots, lost)
        places = dict(zip(tokens.slots, tokens.ends, strict=True))
        samples = self._prompts.samples
        sampling = [slot for slot in compress(tokens.slots, tokens.samples) if samples(slot)]
        self._sampler.advance(sampling)
        if self._sampler.overlaps:
            # The next step may begin before these are known; the device puts its tokens in their place.
            self.batch.write([places[slot] for slot in sampling], [0] * len(sampling))
        done = self._sampler.launched()
        return _Launched(ready, tokens, pending, done, before, self._clock)

    @torch.inference_mode()
    def _collect(self, launched: _Launched) -> StepResult:
        """Reads what a step has drawn, and remembers it of requests that are still there."""
        ready, before, plan = launched.ready, launched.before, launched.ready.plan
        launched.done.wait()  # also where nothing was drawn: networks may read its KV once this is answered
        sampled = launched.pending.read()
        expert_tokens = launched.pending.expert_tokens(self.model.num_experts)
        self._lose(launched, sampled)
        errors = {slot: self.failed[slot] for slot in plan.slots if slot in self.failed}
        further = sampled.take_right(launched.tokens.drafts)
        for slot in errors.keys() & sampled.token_ids.keys():  # failed while this was computed
            further.pop(slot, None)
            del sampled.token_ids[slot]
            sampled.logprobs.pop(slot, None)
        for slot, error in sampled.errors.items():
            _log.error("failed in step %d: %s", plan.step, error, extra=self._log_fields(slot))
        here = {slot: error for slot, error in sampled.errors.items() if slot not in launched.freed}
        self.failed |= here
        self._remember(launched, sampled, further)
        began = self._tracer.clock_ns()
        proposals = self._propose(launched, sampled, further)
        propose_time_s = (self._tracer.clock_ns() - began) / 1e9
        drawn = [slot for slot in plan.slots if slot in sampled.token_ids]
        launched.clock.ended("forward" if self._sampler.overlaps else "sample")
        times = launched.clock.times.behind(ready.times)
        if before is not None:
            expert_tokens = _sum(before.expert_tokens, expert_tokens)
            times = times.behind(before.times)
        errors |= sampled.errors | _errors(sampled.prompts)
        lost = {slot: lost for slot, lost in self._lost.items() if slot in errors}
        for slot in lost:
            del errors[slot]
        token_ids = {slot: [sampled.token_ids[slot]] for slot in drawn}
        logprobs = {slot: [one] for slot, one in sampled.logprobs.items()}
        for slot, right in further.items():
            token_ids[slot] += right.token_ids
            if slot in logprobs:
                logprobs[slot] += right.logprobs
        return StepResult(
            step=plan.step,
            slots=drawn,
            token_ids=list(token_ids.values()),
            logprobs=logprobs,
            proposals=proposals,
            propose_time_s=propose_time_s if plan.proposals else 0.0,
            prompt_logprobs=_finite(sampled.prompts.logprobs),
            embeddings=_finite(sampled.prompts.embeddings),
            errors=errors,
            lost_segments=lost,
            streamed_bytes=launched.pending.streamed_bytes,
            stream_time_s=launched.pending.stream_time_s,
            blamed_fields={
                slot: BLAMED_FIELDS[error]
                for slot, error in errors.items()
                if error in BLAMED_FIELDS
            },
            step_time_s=times.total,
            prepare_time_s=times.prepare,
            forward_time_s=times.forward,
            sample_time_s=times.sample,
            expert_tokens=expert_tokens,
        )

    def _apply(self, plan: StepPlan) -> None:
        for launched in self._launched:
            launched.freed.update(plan.freed_slots)
        for slot in plan.freed_slots:
            self._sampler.free(slot)
            self._prompts.free(slot)
            self.failed.pop(slot, None)
            self._lost.pop(slot, None)
            if self._drafter is not None:
                self._drafter.free(slot)
        for start in plan.starts:
            self._request_ids[start.slot] = start.request_id
            self._sampler.start(start)
            self._prompts.start(start)
            if self._drafter is not None:
                self._drafter.start(start.slot, start.num_computed_tokens)
        for slot, token_ids in plan.forced_tokens:
            for token_id in token_ids:
                self._sampler.append({slot: token_id})

    def _lose(self, launched: _Launched, sampled: Sampled) -> None:
        """Forgets what was found of slots of which a segment could not be read."""
        for slot, lost in launched.pending.lost.items():
            sampled.errors.pop(slot, None)
            sampled.prompts.forget(slot)
            if slot not in launched.freed:
                _log.warning("KV could not be read: %s", lost.reason, extra=self._log_fields(slot))
                self.failed[slot] = lost.reason
                self._lost[slot] = lost

    def _log_fields(self, slot: int) -> dict[str, str]:
        """Extra fields of a log line about a slot's request."""
        return {"request_id": self._request_ids.get(slot, "-")}

    def _compute_isolated(
        self, tokens: StepTokens, planned: PlannedBatch[Any] | None, hidden: Tensor | None
    ) -> PendingSample:
        """Computes all slots together, or one by one if that raises, to find out whose fault it is.

        Raises DeviceLostError: none of theirs; of several slots with states, what computing them raises.
        Computing tokens a second time writes the same K and V to the same places and draws the same tokens:
        nothing is remembered until the whole step is done.
        """
        try:
            return self._compute(tokens, planned, hidden)
        except DeviceLostError:
            raise
        except Exception:
            self.model.take_expert_tokens()  # those of an attempt that raised do not count
            if len(tokens.slots) == 1:
                (slot,) = tokens.slots
                _log.exception("computing this request raised", extra=self._log_fields(slot))
                return PendingSample.of(Sampled(errors={slot: BROKE_A_STEP}))
            if self._has_states:
                raise
            _log.exception("computing %d requests together raised", len(tokens.slots))
        single = [tokens.of([slot == one for slot in tokens.slots]) for one in tokens.slots]
        return joined([self._compute_isolated(part, None, hidden) for part in single])

    def _compute(
        self, tokens: StepTokens, planned: PlannedBatch[Any] | None, hidden: Tensor | None
    ) -> PendingSample:
        """Computes the slots together."""
        if not tokens.slots:
            self._clock.ended("prepare")
            return PendingSample.of(Sampled())
        if planned is None:
            planned = self.model.plan(tokens.batch)
        ends = list(accumulate(tokens.counts))
        samples = self._prompts.samples
        last = {
            slot: end - 1
            for slot, end, is_last in zip(tokens.slots, ends, tokens.samples, strict=True)
            if is_last and samples(slot)
        }
        if tokens.drafts:
            last = self._sampler.with_drafts(last, tokens.drafts)
        last = {slot: last[slot] for slot in self._sampler.grouped(last)}
        chunks = self._prompts.chunks(tokens.rows()) if self._prompts.has_prompts else []
        wanted = [*last.values()]
        if chunks:
            wanted += {row for chunk in chunks for row in chunk.rows()}.difference(wanted)
        self._clock.ended("prepare")
        future = self._future_tokens(tokens, ends)
        names = self._prompts.needs(self.model, chunks) if chunks else []
        with computing(tokens.segments) as streamed:
            if names:  # of models that no drafter goes with
                results = [LAST_HIDDEN, *names]
                hidden, *found = self.model.compute(planned, hidden, wanted, future, results)
                states = dict[int, Tensor]()
            else:
                hidden, states = self._forward(tokens, planned, hidden, wanted, future)
                found = []
        if not wanted:
            self._sampler.meet()
        self._clock.ended("forward")
        rows = {slot: row for row, slot in enumerate(last)}
        if self._spoil is not None:
            own = rows.keys() & self._request_ids.keys()
            self._spoil(hidden, {self._request_ids[slot]: rows[slot] for slot in own})
        pending = PendingSample()
        if rows:
            pending = self._sampler.sample(self.model, hidden, rows)
        pending.hidden = states
        pending.note(streamed, tokens.slots)
        if chunks:
            places = {row: place for place, row in enumerate(wanted)}
            needed = dict(zip(names, found, strict=True))
            prompts = self._prompts.read(self.model, hidden, places, chunks, needed)
            pending.add(Sampled(prompts=prompts))
        pending.counts.append(self.model.take_expert_tokens())
        return pending

    def _forward(
        self,
        tokens: StepTokens,
        planned: PlannedBatch[Any],
        hidden: Tensor | None,
        wanted: list[int],
        future: Sequence[FutureTokens],
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Hidden states of the rows that are wanted, and those of each slot's rows for a head that drafts."""
        drafter, model = self._drafter, self.model
        if drafter is None or not drafter.needs:
            return model.forward(planned, hidden, wanted, future), {}
        rows = None if LAST_HIDDEN in drafter.needs else wanted
        results = list(dict.fromkeys([LAST_HIDDEN, *drafter.needs]))
        computed = model.compute(planned, hidden, rows, future, results)
        found = dict(zip(results, computed, strict=True))
        states = drafter.states([found[name] for name in drafter.needs])
        last = found[LAST_HIDDEN]
        if rows is None and wanted != [*range(len(last))]:
            last = last[torch.tensor(wanted, dtype=torch.int64, device=last.device)]
        each = states.split_with_sizes(tokens.counts)
        return last, dict(zip(tokens.slots, each, strict=True))

    def _future_tokens(self, tokens: StepTokens, ends: Sequence[int]) -> Sequence[FutureTokens]:
        """Tokens of the step that only the device knows."""
        if not self._launched:
            return ()
        (launched,) = self._launched
        begins = zip(tokens.slots, tokens.counts, ends, strict=True)
        rows = {slot: end - n for slot, n, end in begins if slot not in launched.freed}
        return launched.pending.future_tokens(rows)

    def _remember(
        self, launched: _Launched, sampled: Sampled, further: Mapping[int, Right]
    ) -> None:
        """Remembers what a step computed and drew."""
        self._prompts.advance(sampled.prompts)
        tokens, drawn = launched.tokens, sampled.token_ids
        if launched.freed:
            drawn = {slot: token for slot, token in drawn.items() if slot not in launched.freed}
        places = dict(zip(tokens.slots, tokens.ends, strict=True))
        self.batch.write([places[slot] for slot in drawn], list(drawn.values()))
        self._sampler.remember(drawn)
        for slot, right in further.items():
            if slot in drawn:
                self.batch.settle(slot, tokens.drafts[slot], len(right.token_ids))
                for place, token_id in enumerate(right.token_ids, start=places[slot] + 1):
                    self.batch.write([place], [token_id])
                    self._sampler.append({slot: token_id})

    def _propose(
        self, launched: _Launched, sampled: Sampled, further: Mapping[int, Right]
    ) -> dict[int, list[int]]:
        """Tokens that the drafter proposes behind a step, by slot."""
        if self._drafter is None:
            return {}
        tokens, texts = launched.tokens, list[SlotText]()
        for place, (slot, first, count) in enumerate(
            zip(tokens.slots, tokens.firsts, tokens.counts, strict=True)
        ):
            if slot in launched.freed or slot in self.failed:
                continue
            num_right = len(further[slot].token_ids) if slot in further else 0
            draft = tokens.drafts.get(slot)
            end = first + count - (0 if draft is None else len(draft.token_ids) - num_right)
            texts.append(SlotText(slot, place, first, end, end + (slot in sampled.token_ids)))
        wanted, hidden = dict(launched.ready.plan.proposals), launched.pending.hidden
        return self._drafter.propose(tokens, texts, wanted, hidden)


def _ahead(plan: StepPlan) -> int:
    """Tokens behind those of a step that the drafter may compute."""
    return max((count for _, count in plan.proposals), default=0)


def _finite(values: Mapping[int, T | None]) -> dict[int, T]:
    return {slot: value for slot, value in values.items() if value is not None}


def _errors(prompts: PromptOutputs) -> dict[int, str]:
    """The engine ends these requests; until then all ranks go on alike."""
    both = (*prompts.logprobs.items(), *prompts.embeddings.items())
    return {slot: NOT_FINITE for slot, value in both if value is None}
