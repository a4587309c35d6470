# SPDX-License-Identifier: Apache-2.0
"""Drafts of whatever quality: they change no token, only the number of steps."""

from __future__ import annotations

import pytest
from harness import VOCAB_SIZE, expected_tokens, make_request, make_scheduler
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant
from scheduler_rules import MAX_MODEL_LEN
from test_scheduler_machine import SchedulerMachine

from pagoda.engine.scheduler import Scheduler
from pagoda.messages.worker import StepPlan, StepResult, most_sampled


class DraftingMachine(SchedulerMachine):
    """All that happens to a scheduler, with a drafter that is right in so many of ten tokens."""

    num_right = 0

    @initialize(num_right=st.sampled_from([0, 7, 9, 10]))
    def choose_quality(self, num_right: int) -> None:
        self.num_right = num_right

    def turn(self) -> None:
        for request in self.scheduler.running:
            if request.num_pending_samples:
                request.drafts = [1, 2]  # of no use, and harmless
                continue
            request.runs_ahead = False
            answer = expected_tokens(self.requests[request.request_id], MAX_MODEL_LEN)
            draft = [*answer[request.num_output_tokens :], 1, 2, 3][: request.num_tokens % 6]
            request.drafts = [
                token if (token + place) % 10 < self.num_right else (token + 1) % VOCAB_SIZE
                for place, token in enumerate(draft)
            ]

    def check_plan(self, plan: StepPlan) -> None:
        super().check_plan(plan)
        num_drafts = sum(len(token_ids) for _, token_ids in plan.drafts)
        assert len(plan.slots) + num_drafts <= most_sampled(self.scheduler.limits.max_num_seqs)

    @invariant()
    def tokens_are_counted(self) -> None:
        if self.scheduler.in_flight:
            return
        for request in self.scheduler.running:
            assert request.slot is not None
            slot = self.worker.slots[request.slot]
            assert request.num_pending_samples == 0
            assert request.num_scheduled_tokens == request.num_computed_tokens
            assert slot.num_computed_tokens == request.num_computed_tokens
            assert slot.token_ids == request.token_ids[: request.num_worker_tokens]


TestDrafting = DraftingMachine.TestCase


def _plan(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def _begun(**limits: object) -> Scheduler:
    """A scheduler whose request "a" has said token 7 behind its prompt."""
    scheduler = make_scheduler(**limits)  # type: ignore[arg-type]
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=30))
    scheduler.requests["a"].runs_ahead = False
    scheduler.update(StepResult(_plan(scheduler).step, [0], [[7]]))
    return scheduler


@pytest.mark.parametrize("num_stages", [1, 2])
def test_what_is_right_of_a_draft_is_kept_and_computed(num_stages: int) -> None:
    scheduler = _begun(num_stages=num_stages)
    request = scheduler.requests["a"]
    request.drafts, request.runs_ahead = [8, 9, 10], False
    plan = _plan(scheduler)
    assert (plan.num_tokens, plan.drafts) == ([4], [(0, [8, 9, 10])])
    assert scheduler.schedule() is None  # nobody knows where the request goes on
    (chunk,) = scheduler.update(StepResult(plan.step, [0], [[8, 9, 11]]))
    assert chunk.token_ids == [8, 9, 11]
    assert request.num_computed_tokens == request.num_scheduled_tokens == 6
    assert (
        scheduler.kv.pool.num_cached == 1
    )  # of blocks of four tokens: one was wrong of the second
    plan = _plan(scheduler)
    assert (plan.num_tokens, plan.drafts) == ([1], [])
    assert plan.new_tokens == ([(0, 8), (0, 9), (0, 11)] if num_stages > 1 else [])


def test_drafts_end_where_the_answer_must_and_leave_room_for_others() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    for name in "ab":
        scheduler.add(make_request(name, [1, 2, 3], max_tokens=4))
    scheduler.update(StepResult(_plan(scheduler).step, [0, 1], [[7], [7]]))
    for request in scheduler.running:
        request.drafts, request.runs_ahead = [8] * 20, False
    plan = _plan(scheduler)
    assert (plan.num_tokens, plan.drafts) == ([3, 3], [(0, [8, 8]), (1, [8, 8])])
    scheduler.update(StepResult(plan.step, [0, 1], [[8, 8, 8], [5]]))
    assert list(scheduler.requests) == ["b"]


def test_nobody_makes_way_for_drafts() -> None:
    scheduler = _begun()
    pool = scheduler.kv.pool
    pool.allocate(pool.num_available)
    scheduler.requests["a"].drafts = [8, 9]
    plan = _plan(scheduler)
    assert (plan.num_tokens, plan.drafts) == ([1], [])
    assert scheduler.counters.num_preemptions == 0


def test_a_result_that_leaves_its_draft_is_of_a_worker_that_lies() -> None:
    scheduler = _begun()
    scheduler.requests["a"].drafts = [8, 9]
    plan = _plan(scheduler)
    for tokens in ([5, 6], [8, 9, 10, 11], [8, 5, 6]):
        problem = scheduler.problem_with(StepResult(plan.step, [0], [tokens]), VOCAB_SIZE)
        assert problem == f"the result of step {plan.step} leaves the drafts of slot 0"
    none = scheduler.problem_with(StepResult(plan.step, [0], [[]]), VOCAB_SIZE)
    assert none == f"the result of step {plan.step} is not of its requests"
    for tokens in ([5], [8, 5], [8, 9, 5]):
        assert scheduler.problem_with(StepResult(plan.step, [0], [tokens]), VOCAB_SIZE) is None
