# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from random import Random

import msgspec
import pytest
from harness import Harness, assert_complete, make_request
from mortal_executor import POISON, MortalExecutor, SpeakingExecutor, speaking

from pagoda.engine.canary import LOSSES_BEFORE
from pagoda.engine.core import MAX_IDLE_LOSSES, STABLE_S, EngineCore, WorkerRestarts
from pagoda.errors import ConfigError, EngineDeadError
from pagoda.executor.base import ExecutorEvent, WorkerLost
from pagoda.ipc.clock import VirtualClock
from pagoda.messages.engine_config import EngineConfig, SimConfig
from pagoda.messages.frontend import FinishReason, PrefixCacheUpdate, RequestRefused
from pagoda.messages.worker import StepResult
from pagoda.messages.worker_config import WorkerConfig
from pagoda.parallel.config import ParallelConfig
from pagoda.plugins.sim.executor import SimExecutor


def core_of(**fields: object) -> tuple[EngineCore, SpeakingExecutor, VirtualClock]:
    """An engine whose worker is about to start."""
    clock = VirtualClock()
    config = EngineConfig(worker=WorkerConfig(model="sim"), **fields)  # type: ignore[arg-type]
    executor = SpeakingExecutor(SimExecutor(SimConfig(base_s=1.0), clock=clock), clock)
    return EngineCore(config, executor, clock), executor, clock


def test_a_lost_worker_costs_a_pause_and_no_token() -> None:
    harness, executor = speaking()
    requests = [make_request(f"r{i}", [i, i + 1], max_tokens=20) for i in range(6)]
    for request in requests:
        harness.add(request)
    for _ in range(5):
        harness.ticks(4)
        executor.say(WorkerLost("the worker was killed by SIGKILL"))
        harness.step()
    harness.run()
    assert_complete(harness, requests)
    assert harness.core.load().num_worker_restarts == 5


def test_a_new_worker_gets_a_cache_of_the_same_size() -> None:
    harness, executor = speaking(num_blocks=33)
    executor.say(WorkerLost("gone"))
    harness.step()
    assert executor.starts == [None, 33]


def test_losses_in_a_row_are_retried_later_and_later_then_given_up() -> None:
    harness, executor = speaking()

    def lose() -> float:
        executor.say(WorkerLost("gone"))
        before = harness.clock.now()
        harness.step()
        while not harness.core.load().is_worker_ready:
            harness.tick()
        return harness.clock.now() - before

    pauses = [lose() for _ in range(MAX_IDLE_LOSSES)]
    with pytest.raises(EngineDeadError, match="lost in a row; last: gone"):
        lose()
    assert pauses[0] == 0
    assert pauses[1:] == sorted(pauses[1:])
    assert max(pauses) == 2


def test_a_machine_on_which_nothing_can_be_computed_ends_the_engine_and_blames_no_request() -> None:
    harness, executor = speaking()
    harness.add(make_request("a", [1, 2, 3]))

    def lose_steps() -> None:
        for _ in range(100):
            while not harness.scheduler.in_flight:
                harness.tick()
            executor.say(WorkerLost("the device is broken"))
            harness.step()

    with pytest.raises(EngineDeadError, match=f"{MAX_IDLE_LOSSES + 1} workers were lost in a row"):
        lose_steps()
    assert harness.finished == {}
    assert len(executor.starts) == LOSSES_BEFORE + MAX_IDLE_LOSSES + 1


def test_requests_that_crash_the_worker_one_after_the_other_do_not_end_the_engine() -> None:
    harness = Harness(wrap=lambda inner, clock: MortalExecutor(inner, clock, Random(1), 0.0))
    for index in range(10):
        harness.add(make_request(f"poison{index}", [POISON]))
        harness.run()
        assert harness.finished[f"poison{index}"].finish_reason is FinishReason.ERROR
    good = make_request("good", [1, 2, 3])
    harness.add(good)
    harness.run()
    assert_complete(harness, [good])


def test_workers_may_be_lost_during_steps_any_number_of_times() -> None:
    clock = VirtualClock()
    restarts = WorkerRestarts(clock)
    for _ in range(2000):
        restarts.on_ready()
        restarts.on_loss("gone", is_idle=False)
    assert restarts.next_event_at() == clock.now() + 10
    restarts.on_ready()
    clock.advance_to(clock.now() + STABLE_S)
    restarts.on_loss("gone", is_idle=False)
    assert restarts.next_event_at() == clock.now()


@pytest.mark.parametrize(
    ("is_user_error", "error"), [(True, ConfigError), (False, EngineDeadError)]
)
def test_a_worker_that_cannot_start_ends_the_engine(
    is_user_error: bool, error: type[Exception]
) -> None:
    core, executor, _ = core_of()
    executor.say(WorkerLost("No such model.", is_user_error))
    with pytest.raises(error, match="No such model"):
        core.step()


def test_stable_workers_lost_while_idle_are_never_given_up() -> None:
    harness, executor = speaking()
    for _ in range(3 * MAX_IDLE_LOSSES):
        harness.clock.advance_to(harness.clock.now() + STABLE_S)
        executor.say(WorkerLost("gone"))
        harness.step()
        harness.step()
        assert harness.core.load().is_worker_ready


def test_a_full_queue_refuses_new_requests_but_not_returning_ones() -> None:
    core, _, _ = core_of(max_num_seqs=1, max_num_waiting=1)
    core.step()
    assert core.add(make_request("a", [1])) == []
    assert core.add(make_request("b", [1])) == []
    assert isinstance(core.add(make_request("c", [1])), RequestRefused)
    assert core.add(make_request("d", [1], returns=True)) == []


def test_an_engine_whose_worker_still_starts_refuses_requests_and_answers_queries() -> None:
    core, _, _ = core_of()
    assert core.ready is None
    assert not core.load().is_worker_ready
    assert isinstance(core.add(make_request("a", [1])), RequestRefused)
    core.follow_cache()
    core.step()
    assert core.ready is not None
    assert core.load().is_worker_ready
    assert core.drain_updates() == [PrefixCacheUpdate(b"", b"", starts_anew=True)]


def test_stalling_is_measured_from_the_last_finished_step() -> None:
    harness = Harness()
    assert harness.core.load().stalled_for_s == 0
    harness.clock.advance_to(100)
    harness.add(make_request("a", [1, 2, 3]))
    harness.clock.advance_to(107)
    assert harness.core.load().stalled_for_s == 7
    harness.step()
    assert harness.core.load().stalled_for_s == 0


class ExpertExecutor(SpeakingExecutor):
    """Says of every step that it gave 2 tokens to the first of five experts and 1 to the last."""

    def poll(self) -> list[ExecutorEvent]:
        return [
            msgspec.structs.replace(event, expert_tokens=[2, 0, 0, 0, 1])
            if isinstance(event, StepResult)
            else event
            for event in super().poll()
        ]


@pytest.mark.parametrize("expert_parallel", [True, False])
def test_tokens_of_experts_add_up(expert_parallel: bool) -> None:
    clock, sim = VirtualClock(), SimConfig()
    parallel = ParallelConfig(tensor_parallel_size=2, expert_parallel=expert_parallel)
    worker = WorkerConfig(model="sim", parallel=parallel)
    executor = ExpertExecutor(SimExecutor(sim, clock=clock), clock)
    core = EngineCore(EngineConfig(worker=worker), executor, clock)
    core.step()
    assert core.load().expert_tokens == []
    core.add(make_request("r", [1, 2, 3], max_tokens=5))
    while core.load().num_running or core.load().num_waiting:
        core.step()
        clock.advance_to(clock.now() + 1.0)
    load = core.load()
    assert load.num_steps >= 5
    assert load.expert_tokens == [2 * load.num_steps, 0, 0, 0, load.num_steps]
    ranks = [2 * load.num_steps, load.num_steps] if expert_parallel else []
    assert load.expert_rank_tokens == ranks
