# SPDX-License-Identifier: Apache-2.0
"""Schedulers of models with several KV groups: how much they hold, and that they never stop."""

from __future__ import annotations

from collections import deque

import pytest
from group_models import GEMMA_LIKE, grouped, state
from harness import Harness, make_request

from pagoda.engine.batching import SchedulerLimits
from pagoda.engine.scheduler import Scheduler
from pagoda.ipc.clock import VirtualClock
from pagoda.kv.manager import KVManager
from pagoda.messages.engine_config import SimConfig
from pagoda.messages.kv_groups import KVGroup, full_group, layer_groups
from pagoda.messages.worker import StepResult
from pagoda.plugins.sim.executor import SimWorker


def most_held(groups: tuple[KVGroup, ...], num_tokens: int, budget: int = 2048) -> int:
    """The most blocks that a request holds whose prompt and answer are `num_tokens` together."""
    limits = SchedulerLimits(
        max_num_seqs=1, max_num_batched_tokens=budget, max_model_len=num_tokens
    )
    kv = KVManager(20_000, 16, groups=groups, run_tokens=budget)
    scheduler = Scheduler(limits, kv, VirtualClock())
    worker = SimWorker(SimConfig(kv_groups=groups), check_kv=False)
    scheduler.add(make_request("r", [1] * (num_tokens - 40), max_tokens=40))
    results: deque[StepResult] = deque()
    most = 0
    while scheduler.requests:
        plan = scheduler.schedule() if len(results) < 2 else None
        if plan is not None:
            results.append(worker.execute(plan, 0.0))
            most = max(most, kv.pool.num_blocks - kv.pool.num_available)
        else:
            scheduler.update(results.popleft())
    assert kv.pool.num_available == kv.pool.num_blocks
    return most


def test_a_model_with_windows_in_five_of_six_layers_holds_a_quarter() -> None:
    """Blocks of all groups are equally large, so blocks are bytes."""
    groups = layer_groups(GEMMA_LIKE * 5, 16, 64)
    assert len(groups) == 6
    length = 32 * 1024
    full = len(groups) * length // 16
    assert most_held(groups, length, budget=512) <= 0.21 * full
    assert most_held(groups, length) <= 0.25 * full


@pytest.mark.parametrize("name", ["window", "mixed", "chunk", "state", "all"])
def test_long_prompts_pass_through_a_pool_that_holds_little_more_than_windows(name: str) -> None:
    groups = grouped(name, 4)
    least = sum(group.most_blocks(0, 64, 1) for group in groups)
    harness = Harness(num_blocks=least, kv_groups=groups, max_num_batched_tokens=64)
    requests = [
        make_request(f"r{index}", [(index + i) % 50 for i in range(50)], max_tokens=14)
        for index in range(4)
    ]
    harness.serve(*requests)


def test_a_request_goes_on_from_a_snapshot_of_its_states() -> None:
    harness = Harness(kv_groups=(full_group(1, 4), state(8)))
    prompt = list(range(22))
    harness.serve(make_request("first", prompt, max_tokens=3))
    harness.serve(make_request("again", [*prompt, 9], max_tokens=3))
    assert harness.scheduler.counters.num_prefix_hit_tokens == 16


@pytest.mark.parametrize("budget", [8, 12, 16, 512])
@pytest.mark.parametrize("name", ["window", "mixed", "state", "all"])
def test_equal_prompts_that_arrive_together_are_computed_once(name: str, budget: int) -> None:
    """A chunk may end between two snapshots of states: those that wait go on waiting for the next one."""
    harness = Harness(
        num_blocks=1000, kv_groups=grouped(name, 4), max_num_batched_tokens=budget, max_num_seqs=8
    )
    harness.serve(*(make_request(f"n{i}", [*range(57)], max_tokens=1) for i in range(4)))
    assert harness.core.load().steps.num_tokens == 57 + 3


def test_a_request_waits_for_no_blocks_that_end_between_snapshots() -> None:
    groups = (full_group(1, 4), state(32))
    kv = KVManager(100, 4, groups=groups)
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)
    scheduler = Scheduler(limits, kv, VirtualClock())
    for name in "ab":
        scheduler.add(make_request(name, [0] * 30))
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.num_tokens == [30, 30]
