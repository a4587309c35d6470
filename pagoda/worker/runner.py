"""Executes step plans on a loaded model."""

from __future__ import annotations

import logging
import time
from typing import Protocol

import torch
from torch import Tensor

from pagoda.backend.base import TokenBatch
from pagoda.engine.messages import StepPlan, StepResult
from pagoda.worker.input_batch import InputBatch
from pagoda.worker.sampler import Sampled, Sampler, joined, take_likeliest

BROKE_A_STEP = "this request broke a step; the server's log says why"

_log = logging.getLogger(__name__)


class Model(Protocol):
    def forward(self, batch: TokenBatch) -> Tensor:
        """Hidden states [n, hidden] of the batch's tokens; K and V go to the model's caches."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[m, hidden] to [m, vocab] float32."""
        ...

    def greedy(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[m, hidden] to the index of the highest logit [m], and whether all are finite [m] bool."""
        ...


class Runner:
    """One model with its KV cache and the requests in its slots."""

    def __init__(self, model: Model, batch: InputBatch, sampler: Sampler) -> None:
        self._model = model
        self._batch = batch
        self._sampler = sampler
        self._failed: dict[int, str] = {}
        """Slots whose request has failed, until the engine frees them."""
        self._request_ids: dict[int, str] = {}
        """By slot; for the log."""

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult:
        """Executes a plan. A request that cannot be computed fails alone.

        Raises:
            ValueError: the plan does not fit what the worker knows; engine and worker disagree.
        """
        began = time.perf_counter()
        self._apply(plan)
        counts = dict(zip(plan.slots, plan.num_tokens, strict=True))
        errors = {slot: self._failed[slot] for slot in counts if slot in self._failed}
        sampled = self._compute_isolated({s: n for s, n in counts.items() if s not in errors})
        for slot, error in sampled.errors.items():
            _log.error("failed in step %d: %s", plan.step, error, extra=self._of(slot))
        self._failed |= sampled.errors
        self._advance({s: n for s, n in counts.items() if s not in self._failed}, sampled)
        drawn = [slot for slot in plan.slots if slot in sampled.token_ids]
        return StepResult(
            step=plan.step,
            slots=drawn,
            token_ids=[sampled.token_ids[slot] for slot in drawn],
            logprobs=sampled.logprobs,
            errors=errors | sampled.errors,
            step_time_s=time.perf_counter() - began,
        )

    def _apply(self, plan: StepPlan) -> None:
        for slot in plan.freed_slots:
            self._batch.free(slot)
            self._sampler.free(slot)
            self._failed.pop(slot, None)
            del self._request_ids[slot]
        for start in plan.starts:
            self._batch.start(start)
            self._request_ids[start.slot] = start.request_id
            try:
                self._sampler.start(start)
            except Exception:
                _log.exception("cannot be started", extra=self._of(start.slot))
                self._failed[start.slot] = BROKE_A_STEP
        for slot, block_ids in plan.new_blocks:
            self._batch.add_blocks(slot, block_ids)

    def _compute_isolated(self, counts: dict[int, int]) -> Sampled:
        """Computes all slots together, or one by one if that raises, to find out whose fault it is.

        Computing tokens a second time writes the same K and V to the same places and draws the same tokens:
        nothing is remembered until the whole step is done.
        """
        if not counts:
            return Sampled()
        try:
            return self._compute(counts)
        except Exception:
            if len(counts) == 1:
                (slot,) = counts
                _log.exception("computing this request raised", extra=self._of(slot))
                return Sampled(errors={slot: BROKE_A_STEP})
            _log.exception("computing %d requests together raised", len(counts))
        parts = [self._compute_isolated({slot: count}) for slot, count in counts.items()]
        return joined(parts)

    def _compute(self, counts: dict[int, int]) -> Sampled:
        slots, num_tokens = list(counts), list(counts.values())
        batch = self._batch.prepare(slots, num_tokens)
        hidden = self._model.forward(batch)
        sampling = [self._batch.will_sample(slot, count) for slot, count in counts.items()]
        return self._sample(batch, hidden, slots, sampling)

    def _sample(
        self, batch: TokenBatch, hidden: Tensor, slots: list[int], sampling: list[bool]
    ) -> Sampled:
        last_tokens = (batch.query_lens.cumsum(0) - 1).tolist()
        rows = {
            slot: last
            for slot, last, samples in zip(slots, last_tokens, sampling, strict=True)
            if samples
        }
        greedy = {slot: row for slot, row in rows.items() if not self._sampler.needs_logits(slot)}
        other = {slot: row for slot, row in rows.items() if slot not in greedy}
        sampled = Sampled()
        if greedy:
            tokens, sound = self._model.greedy(hidden[list(greedy.values())])
            sampled = take_likeliest(list(greedy), tokens, sound)
        if other:
            logits = self._model.logits(hidden[list(other.values())])
            sampled = joined([sampled, self._sampler.sample(logits, list(other))])
        return sampled

    def _advance(self, counts: dict[int, int], sampled: Sampled) -> None:
        """Remembers what the step computed and drew."""
        for slot, count in counts.items():
            self._batch.advance(slot, count)
        for slot, token_id in sampled.token_ids.items():
            self._batch.append(slot, token_id)
            self._sampler.append(slot, token_id)

    def _of(self, slot: int) -> dict[str, str]:
        """What a log line about a slot's request carries."""
        return {"request_id": self._request_ids.get(slot, "-")}
