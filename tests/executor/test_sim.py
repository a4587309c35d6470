from __future__ import annotations

import pytest

from pagoda.engine.messages import SamplingParams, SimConfig, SlotStart, StepPlan, StepResult
from pagoda.executor.sim import SimExecutor, SimWorker
from pagoda.ipc.clock import VirtualClock


def start(slot: int, tokens: list[int], blocks: list[int], computed: int = 0) -> SlotStart:
    return SlotStart(
        slot, tokens, len(tokens), computed, blocks, SamplingParams(seed=3, logprobs=1)
    )


def test_steps_take_the_time_of_the_cost_model_one_after_another() -> None:
    clock = VirtualClock()
    executor = SimExecutor(SimConfig(base_s=1.0, per_token_s=0.5), clock=clock)
    executor.start()
    executor.poll()
    executor.submit(StepPlan(0, [0], [4], [start(0, [1, 2, 3, 4], [0])]))
    executor.submit(StepPlan(1, [0], [1]))
    assert executor.next_event_at() == 3.0
    clock.advance_to(2.9)
    assert executor.poll() == []
    clock.advance_to(3.0)
    (first,) = executor.poll()
    clock.advance_to(4.5)
    (second,) = executor.poll()
    assert isinstance(first, StepResult)
    assert isinstance(second, StepResult)
    assert (first.step_time_s, second.step_time_s) == (3.0, 1.5)
    assert first.logprobs[0].top_token_ids == first.token_ids


def test_stages_work_one_behind_the_other() -> None:
    clock = VirtualClock()
    executor = SimExecutor(SimConfig(base_s=2.0), clock=clock, num_stages=2)
    executor.start()
    executor.poll()
    executor.submit(StepPlan(0, [0], [2], [start(0, [1, 2], [0])]))
    executor.submit(StepPlan(1, [1], [2], [start(1, [1, 2], [1])]))
    clock.advance_to(2.0)
    assert len(executor.poll()) == 1
    assert executor.next_event_at() == 3.0
    assert executor.max_in_flight == 3


def test_stages_that_do_not_sample_must_be_told() -> None:
    worker = SimWorker(SimConfig(), check_kv=True, num_stages=2)
    first = worker.execute(StepPlan(0, [0], [2], [start(0, [1, 2], [0])]), 0.0)
    with pytest.raises(ValueError, match="that the first stage does not know"):
        worker.execute(StepPlan(1, [0], [1]), 0.0)
    with pytest.raises(ValueError, match="was not what the last stage sampled"):
        worker.execute(StepPlan(1, [0], [1], appended=[(0, first.token_ids[0] + 1)]), 0.0)
    worker.execute(StepPlan(1, [0], [1], appended=[(0, first.token_ids[0])]), 0.0)


def test_reading_another_sequences_kv_is_noticed() -> None:
    worker = SimWorker(SimConfig(block_size=4), check_kv=True)
    worker.execute(StepPlan(0, [0], [4], [start(0, [1, 2, 3, 4], [5])]), 0.0)
    with pytest.raises(ValueError, match="another sequence's KV at position 1"):
        worker.execute(StepPlan(1, [1], [1], [start(1, [1, 9, 9, 9, 9], [5, 6], computed=4)]), 0.0)


def test_a_slot_in_use_cannot_be_started() -> None:
    worker = SimWorker(SimConfig(), check_kv=False)
    worker.execute(StepPlan(0, [0], [1], [start(0, [1], [5])]), 0.0)
    with pytest.raises(ValueError, match="in use"):
        worker.execute(StepPlan(1, [0], [1], [start(0, [1], [5])]), 0.0)
