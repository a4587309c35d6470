# SPDX-License-Identifier: Apache-2.0
"""Speculation in all that happens to a scheduler: arrivals, aborts, preemption, lost workers, grammars, stages."""

from __future__ import annotations

from collections.abc import Sequence

from harness import VOCAB_SIZE, expected_tokens
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from scheduler_rules import MAX_MODEL_LEN
from test_scheduler_machine import SchedulerMachine

from benchmarks.drafters import FunctionDrafter
from pagoda.engine.drafting.assembly import build_speculator
from pagoda.engine.drafting.speculator import Speculator
from pagoda.engine.drafting.step_costs import StepCosts
from pagoda.engine.request import Request
from pagoda.messages.speculation import SpeculativeConfig
from pagoda.messages.worker import StepPlan, most_sampled


class SomethingPays(StepCosts):
    """Any number of drafts is worth its time, a different one every time."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    def most_worthwhile(self, num_tokens: int, num_requests: int, gains: Sequence[float]) -> int:  # noqa: ARG002
        self._seed = (self._seed * 1103515245 + 12345) % 2**31
        return (self._seed >> 8) % (len(gains) + 1)

    most_worth_asking = most_worthwhile


class SpeculatingMachine(SchedulerMachine):
    @precondition(
        lambda self: hasattr(self, "scheduler") and self.scheduler.batcher.speculator is None
    )
    @rule(
        quality=st.sampled_from([0, 7, 9, 10, "ngram", "suffix", "worker"]),
        seed=st.integers(0, 2**20),
        most=st.integers(1, 9),
    )
    def choose_drafter(self, quality: int | str, seed: int, most: int) -> None:
        batcher = self.scheduler.batcher
        if isinstance(quality, str):
            method = "auto" if quality == "worker" else quality
            config = SpeculativeConfig(method=method, prompt_lookup_min=1)  # type: ignore[arg-type]
            batcher.speculator = build_speculator(config, max_proposals=most)
            assert batcher.speculator is not None
            batcher.speculator.costs = SomethingPays(seed)
            return
        num_right = quality

        def draft(request: Request) -> list[int]:
            answer = expected_tokens(self.requests[request.request_id], MAX_MODEL_LEN)
            return [
                token if (token + place) % 10 < num_right else (token + 1) % VOCAB_SIZE
                for place, token in enumerate([*answer[request.num_output_tokens :], 1, 2, 3])
            ]

        batcher.speculator = Speculator(FunctionDrafter(draft), most, SomethingPays(seed))

    def check_plan(self, plan: StepPlan) -> None:
        super().check_plan(plan)
        num_drafts = sum(len(token_ids) for _, token_ids in plan.drafts)
        assert len(plan.slots) + num_drafts <= most_sampled(self.scheduler.limits.max_num_seqs)

    @invariant()
    def nobody_runs_ahead_of_a_draft(self) -> None:
        for step in list(self.scheduler.in_flight)[:-1]:
            assert self.scheduler.limits.num_stages > 1 or not step.drafts

    @invariant()
    def all_is_counted(self) -> None:
        counters = self.scheduler.counters
        assert sum(counters.accepted_per_position) == counters.num_accepted_tokens
        assert counters.num_accepted_tokens <= counters.num_draft_tokens
        if not self.scheduler.in_flight:
            for request in self.scheduler.running:
                assert not request.is_drafted
                assert request.num_scheduled_tokens == request.num_computed_tokens


TestSpeculatingMachine = SpeculatingMachine.TestCase
