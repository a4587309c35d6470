# SPDX-License-Identifier: Apache-2.0
"""Steps that give several tokens of a request: what the engine counts is what the worker has."""

from __future__ import annotations

import pytest
from harness import VOCAB_SIZE, make_request, make_scheduler
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from scheduler_rules import MAX_MODEL_LEN
from small_grammars import GRAMMARS, constraint_of
from test_scheduler_machine import SchedulerMachine

from pagoda.engine.scheduler import Scheduler
from pagoda.messages.frontend import FinishReason, TokenChunk, TokenLogprobs
from pagoda.messages.worker import StepPlan, StepResult


class SeveralTokensMachine(SchedulerMachine):
    """All that happens to a scheduler, with a worker that samples up to `most` tokens of a slot."""

    most = 1

    @initialize(most=st.integers(2, 5))
    def choose_most(self, most: int) -> None:
        self.most = most

    def start_the_worker(self) -> None:
        super().start_the_worker()
        execute = self.worker.execute

        def execute_and_go_on(plan: StepPlan, cost_s: float) -> StepResult:
            result = execute(plan, cost_s)
            for slot_id, token_ids in zip(result.slots, result.token_ids, strict=True):
                if slot_id in plan.masked_slots:
                    continue
                slot = self.worker.slots[slot_id]
                for _ in range((7 * plan.step + slot_id) % self.most):
                    token_id = slot.choose(VOCAB_SIZE, None)
                    slot.token_ids.append(token_id)
                    token_ids.append(token_id)
                    if slot_id in result.logprobs:
                        result.logprobs[slot_id].append(TokenLogprobs(-float(token_id), 1, [], []))
            return result

        self.worker.execute = execute_and_go_on  # type: ignore[method-assign]

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        max_tokens=st.integers(1, 30),
        stop=st.integers(0, VOCAB_SIZE - 1),
        min_tokens=st.sampled_from([0, 0, 5]),
    )
    def add_with_logprobs(
        self, prompt: list[int], max_tokens: int, stop: int, min_tokens: int
    ) -> None:
        self.arrive(
            prompt,
            max_tokens,
            0,
            logprobs=0,
            min_tokens=min(min_tokens, max_tokens),
            stop_token_ids=(stop,),
        )

    def take(self, chunks: list[TokenChunk]) -> None:
        for chunk in chunks:
            if (
                chunk.token_ids
                and self.requests[chunk.request_id].work.sampling.logprobs is not None
            ):
                assert chunk.logprobs is not None
                assert len(chunk.logprobs) == len(chunk.token_ids)
        super().take(chunks)

    @invariant()
    def tokens_are_counted(self) -> None:
        if self.scheduler.in_flight:
            return
        for request in self.scheduler.running:
            assert request.slot is not None
            slot = self.worker.slots[request.slot]
            assert request.num_overtaken == request.num_pending_samples == 0
            assert slot.num_computed_tokens == request.num_computed_tokens
            assert slot.token_ids == request.token_ids[: request.num_worker_tokens]


TestSeveralTokens = SeveralTokensMachine.TestCase


def _plan(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def _counts(plan: StepPlan) -> tuple[list[int], list[int]]:
    return plan.slots, plan.num_tokens


def test_steps_that_are_overtaken_compute_what_is_known() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=30))
    first, second, third = _plan(scheduler), _plan(scheduler), _plan(scheduler)
    scheduler.update(StepResult(first.step, [0], [[7, 8, 9, 10]]))
    # Tokens 7 and 8 are under way.
    fourth = _plan(scheduler)
    assert _counts(fourth) == ([0], [2])
    assert fourth.forced_tokens == []
    assert scheduler.update(StepResult(second.step, [], []))[0].token_ids == []
    scheduler.update(StepResult(third.step, [], []))
    (chunk,) = scheduler.update(StepResult(fourth.step, [0], [[11]]))
    assert chunk.token_ids == [11]
    assert scheduler.requests["a"].token_ids == [1, 2, 3, 7, 8, 9, 10, 11]
    assert scheduler.requests["a"].num_computed_tokens == 7


def test_a_step_that_is_overtaken_in_part_samples() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=30))
    first, second, third = _plan(scheduler), _plan(scheduler), _plan(scheduler)
    scheduler.update(StepResult(first.step, [0], [[7, 8]]))
    scheduler.update(StepResult(second.step, [], []))
    (chunk,) = scheduler.update(StepResult(third.step, [0], [[9]]))
    assert chunk.token_ids == [9]
    assert _counts(_plan(scheduler)) == ([0], [1])


@pytest.mark.parametrize(
    ("options", "expected", "reason"),
    [
        ({"max_tokens": 2}, [7, 8], FinishReason.LENGTH),
        ({"max_tokens": 9, "eos_token_ids": (8,)}, [7, 8], FinishReason.STOP),
    ],
)
def test_an_answer_that_ends_amid_a_step(
    options: dict[str, int], expected: list[int], reason: FinishReason
) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2, 3], **options))  # type: ignore[arg-type]
    first = _plan(scheduler)
    second = scheduler.schedule()
    reports = {0: [TokenLogprobs(-float(token), 1, [], []) for token in (7, 8, 9, 10)]}
    (chunk,) = scheduler.update(StepResult(first.step, [0], [[7, 8, 9, 10]], reports))
    assert (chunk.token_ids, chunk.finish_reason) == (expected, reason)
    assert chunk.logprobs == reports[0][:2]
    assert second is not None
    assert scheduler.update(StepResult(second.step, [], [])) == []
    assert scheduler.kv.pool.num_available == scheduler.kv.pool.num_blocks


def test_stages_are_told_all_tokens_of_a_step() -> None:
    scheduler = make_scheduler(num_stages=2)
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=30))
    scheduler.update(StepResult(_plan(scheduler).step, [0], [[7, 8, 9]]))
    plan = _plan(scheduler)
    assert plan.new_tokens == [(0, 7), (0, 8), (0, 9)]
    assert _counts(plan) == ([0], [3])
    assert plan.forced_tokens == []


def test_a_mask_is_for_one_token() -> None:
    scheduler = make_scheduler(max_model_len=MAX_MODEL_LEN)
    request = make_request("a", [1, 2, 3], grammar=GRAMMARS[0])
    scheduler.add(request, constraint_of(request))
    plan = _plan(scheduler)
    assert plan.masked_slots == [0]
    with pytest.raises(RuntimeError, match="several tokens of slot 0, but a mask is for one"):
        scheduler.update(StepResult(plan.step, [0], [[7, 8]]))
