# SPDX-License-Identifier: Apache-2.0
"""Prompts of encoders are computed whole, in one step each, and nothing of them is kept."""

from __future__ import annotations

from typing import Any

import pytest
from harness import VOCAB_SIZE, Harness
from hypothesis import given
from hypothesis import strategies as st

from pagoda.ipc.clock import VirtualClock
from pagoda.messages.frontend import FinishReason, GenerateRequest, Pooling, Work
from pagoda.messages.kv_groups import KVGroup, KVKind
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import StepPlan
from pagoda.plugins.sim.executor import SimExecutor
from pagoda.plugins.sim.model import sim_embedding

GROUPS = (KVGroup(layers=(0, 1, 2), kind=KVKind.STEP, block_size=4),)
PROMPTS = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=64)


class _Watched:
    """An executor whose plans are kept."""

    def __init__(self, inner: SimExecutor, _: VirtualClock) -> None:
        self._inner = inner
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self._inner.submit(plan)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _request(name: str, prompt: list[int], priority: int) -> GenerateRequest:
    sampling = SamplingParams(temperature=0, seed=0, max_tokens=0)
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=prompt,
        work=Work(sampling, pooling=Pooling.FIRST),
        priority=priority,
    )


@given(
    prompts=st.lists(st.tuples(PROMPTS, st.integers(-1, 1)), min_size=1, max_size=12),
    num_blocks=st.integers(16, 40),
    budget=st.integers(1, 128),
    num_stages=st.integers(1, 2),
)
def test_prompts_are_never_cut(
    prompts: list[tuple[list[int], int]], num_blocks: int, budget: int, num_stages: int
) -> None:
    watched: list[_Watched] = []

    def wrap(inner: SimExecutor, clock: VirtualClock) -> Any:
        watched.append(_Watched(inner, clock))
        return watched[-1]

    harness = Harness(
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        num_stages=num_stages,
        kv_groups=GROUPS,
        wrap=wrap,
    )
    for index, (prompt, priority) in enumerate(prompts):
        harness.add(_request(str(index), prompt, priority), steps=index % 2 == 0)
    harness.run()
    for index, (prompt, _) in enumerate(prompts):
        chunk = harness.finished[str(index)]
        assert (chunk.finish_reason, chunk.num_cached_tokens) == (FinishReason.LENGTH, 0)
        assert chunk.embedding == sim_embedding(prompt)
    computed = 0
    for plan in watched[0].plans:
        lengths = {start.slot: start.num_prompt_tokens for start in plan.starts}
        assert [lengths[slot] for slot in plan.slots] == plan.num_tokens
        assert sum(plan.num_tokens) <= max(budget, 64)
        computed += len(plan.slots)
    assert computed == len(prompts)
    load = harness.core.load()
    assert load.num_free_blocks == num_blocks


@pytest.mark.parametrize("budget", [1, 200])
def test_a_step_has_room_for_the_longest_prompt(budget: int) -> None:
    limits = Harness(max_num_batched_tokens=budget, kv_groups=GROUPS).scheduler.limits
    assert (limits.whole_prompts, limits.max_num_batched_tokens) == (True, max(budget, 64))
