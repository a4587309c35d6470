"""Totals and statistics of steps: subscribers learn of each step, at a bounded rate."""

from __future__ import annotations

import asyncio
import os
import signal
from bisect import bisect_left

import pytest
from harness import Harness, make_request

from pagoda.engine.config import EngineConfig, SimConfig
from pagoda.engine.step_statistics import (
    BIN_S,
    INTERVAL_S,
    MAX_BINS,
    REPORT_INTERVAL_S,
    LoadReportSchedule,
    StepRecorder,
)
from pagoda.frontend.engine_client import EngineClient
from pagoda.frontend.fleet import Fleet
from pagoda.ipc.clock import VirtualClock
from pagoda.messages.frontend import GenerateRequest, StepBin, StepStatistics
from pagoda.messages.load import STEP_SEQUENCE_BOUNDS, STEP_TOKEN_BOUNDS, StepTotals
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import StepPlan, StepResult
from pagoda.messages.worker_config import WorkerConfig
from pagoda.parallel.config import ParallelConfig


def recorder() -> tuple[VirtualClock, StepRecorder]:
    clock = VirtualClock()
    clock.advance_to(100)
    return clock, StepRecorder(clock)


def begin(steps: StepRecorder, *num_tokens: int) -> None:
    steps.submitted(StepPlan(0, list(range(len(num_tokens))), list(num_tokens)), 0.0, 0.0)


def run(
    clock: VirtualClock,
    steps: StepRecorder,
    step: int,
    num_tokens: list[int],
    step_time_s: float = 0.001,
) -> None:
    begin(steps, *num_tokens)
    steps.finished(StepResult(step, [], [], step_time_s=step_time_s), clock.now())


def test_the_time_of_a_step_is_divided_among_its_phases() -> None:
    clock, steps = recorder()
    assert steps.totals() == StepTotals()
    clock.advance_to(103.0)
    steps.submitted(StepPlan(0, [0, 1, 2], [5, 1, 1]), began=101.0, planned=102.5)
    clock.advance_to(106.5)
    times = {"prepare_time_s": 0.25, "forward_time_s": 0.5, "sample_time_s": 0.125}
    steps.finished(StepResult(0, [], [], step_time_s=1.0, **times), taken=106.0)
    totals = steps.totals()
    assert (totals.schedule_s, totals.submit_s) == (1.5, 0.5)
    assert (totals.wait_s, totals.update_s) == (2.0, 0.5)
    assert (totals.prepare_s, totals.forward_s, totals.sample_s) == (0.25, 0.5, 0.125)
    assert (totals.num_tokens, totals.num_sequences) == (7, 3)


def test_steps_are_counted_by_the_bounds_that_they_keep() -> None:
    clock, steps = recorder()
    for sizes in ([1], [8], [4, 5], [16384], [16385]):
        run(clock, steps, 0, sizes)
    *by_tokens, above = steps.totals().by_tokens
    counted = {STEP_TOKEN_BOUNDS[i]: count for i, count in enumerate(by_tokens) if count}
    assert (counted, above) == ({1: 1, 8: 1, 16: 1, 16384: 1}, 1)
    assert steps.totals().by_sequences == [4, 1] + [0] * (len(STEP_SEQUENCE_BOUNDS) - 1)


def test_a_step_that_was_lost_is_not_mistaken_for_the_next_one() -> None:
    clock, steps = recorder()
    steps.follow(b"f")
    begin(steps, 100)
    begin(steps, 1)
    steps.lost()
    run(clock, steps, 2, [6])
    assert steps.totals().num_tokens == 6
    [(_, news)] = steps.drain()
    assert news.bins == [StepBin(0.0, 2, 1, 0.001, 6, 0, 1)]


def test_without_a_follower_nothing_is_kept() -> None:
    clock, steps = recorder()
    run(clock, steps, 0, [1, 5])
    assert steps.next_event_at() is None
    steps.follow(b"f")
    run(clock, steps, 1, [1])
    steps.unfollow(b"f")
    run(clock, steps, 2, [1])
    assert (steps.next_event_at(), steps.drain()) == (None, [])


def test_each_step_is_told_with_its_age_and_what_was_in_it() -> None:
    clock, steps = recorder()
    steps.follow(b"f")
    steps.follow(b"g")
    run(clock, steps, 4, [1, 7, 1], 0.02)
    news = StepStatistics([StepBin(0.0, 4, 1, 0.02, 7, 2, 3)])
    assert sorted(steps.drain()) == [(b"f", news), (b"g", news)]
    clock.advance_to(100.25)
    run(clock, steps, 5, [1], 0.03)
    assert steps.drain() == []
    assert steps.next_event_at() == 100 + INTERVAL_S
    clock.advance_to(100 + INTERVAL_S)
    [(_, later), _] = steps.drain()
    assert later.bins == [StepBin(0.25, 5, 1, 0.03, 0, 1, 1)]
    assert steps.next_event_at() is None


def test_steps_that_end_close_together_are_one() -> None:
    clock, steps = recorder()
    steps.follow(b"f")
    for step, time_s in enumerate((0.001, 0.004, 0.002)):
        run(clock, steps, step, [1] * (step + 1) + [10], time_s)
    [(_, news)] = steps.drain()
    assert news.bins == [StepBin(0.0, 2, 3, 0.004, 30, 6, 4)]


@pytest.mark.parametrize("every_s", [BIN_S / 50, BIN_S, 3 * BIN_S])
def test_news_are_few_and_small_and_lose_no_step(every_s: float) -> None:
    clock, steps = recorder()
    steps.follow(b"f")
    num_steps, all_news = 3000, []
    for step in range(num_steps):
        run(clock, steps, step, [1])
        all_news += steps.drain()
        clock.advance_to(clock.now() + every_s)
    clock.advance_to(clock.now() + INTERVAL_S)
    all_news += steps.drain()
    assert sum(one.num_steps for _, news in all_news for one in news.bins) == num_steps
    assert max(len(news.bins) for _, news in all_news) <= MAX_BINS
    assert len(all_news) <= (clock.now() - 100) / INTERVAL_S + 1


def test_what_nobody_takes_is_bounded_too() -> None:
    clock, steps = recorder()
    steps.follow(b"f")
    for step in range(5 * MAX_BINS):
        run(clock, steps, step, [1])
        clock.advance_to(clock.now() + BIN_S)
    [(_, news)] = steps.drain()
    assert len(news.bins) == MAX_BINS
    assert news.bins[-1].step == 5 * MAX_BINS - 1


def test_steps_are_reported_once_within_the_interval() -> None:
    clock = VirtualClock()
    schedule = LoadReportSchedule(clock)
    assert schedule.next_event_at() is None
    assert not schedule.is_due(1, is_worker_ready=True)
    assert schedule.next_event_at() == REPORT_INTERVAL_S
    clock.advance_to(REPORT_INTERVAL_S / 2)
    assert not schedule.is_due(2, is_worker_ready=True)
    clock.advance_to(REPORT_INTERVAL_S)
    assert schedule.is_due(3, is_worker_ready=True)
    # An engine that has reported all of its steps need not wake up.
    assert not schedule.is_due(3, is_worker_ready=True)
    assert schedule.next_event_at() is None


def test_a_lost_worker_is_reported_at_once() -> None:
    schedule = LoadReportSchedule(VirtualClock())
    assert schedule.is_due(1, is_worker_ready=False)
    assert not schedule.is_due(1, is_worker_ready=False)
    assert schedule.is_due(1, is_worker_ready=True)


def test_an_engine_tells_of_all_tokens_that_it_computes() -> None:
    it = Harness()
    it.core.steps.follow(b"f")
    it.core.add(make_request("a", list(range(20)), max_tokens=5))
    it.core.step()
    news: list[StepStatistics] = []
    while (wakeup := it.core.next_wakeup()) is not None:
        it.clock.advance_to(max(wakeup, it.clock.now()))
        it.core.step()
        news += [one for _, one in it.core.drain_updates() if isinstance(one, StepStatistics)]
    bins = [one for piece in news for one in piece.bins]
    assert sum(one.num_prefill_tokens for one in bins) == 20
    assert sum(one.num_decode_tokens for one in bins) == 4
    assert sum(one.num_steps for one in bins) == it.core.load().num_steps
    totals = it.core.load().steps
    assert (totals.num_tokens, sum(totals.by_tokens), sum(totals.by_sequences)) == (24, 5, 5)
    assert totals.by_tokens[bisect_left(STEP_TOKEN_BOUNDS, 20)] == 1


async def test_news_come_from_all_replicas_and_from_engines_started_again() -> None:
    config = EngineConfig(
        worker=WorkerConfig(model="sim", parallel=ParallelConfig(data_parallel_size=2)),
        executor="sim",
        sim=SimConfig(num_blocks=64, block_size=4, max_model_len=64, vocab_size=50),
    )
    dispatcher = Fleet.of_engines(config, "round-robin").dispatcher
    await dispatcher.start()
    heard: dict[str, asyncio.Event] = {"0": asyncio.Event(), "1": asyncio.Event()}
    unfollow = dispatcher.subscribe_steps(lambda news: heard[news.replica].set())

    async def ask(name: str) -> None:
        sampling = SamplingParams(seed=1, max_tokens=3)
        request = GenerateRequest(request_id=name, prompt_token_ids=[1, 2, 3], sampling=sampling)
        async for _ in dispatcher.generate(request):
            pass

    try:
        async with asyncio.timeout(20):
            await asyncio.gather(ask("a"), ask("b"))
            await asyncio.gather(*(event.wait() for event in heard.values()))
            first = dispatcher.replicas[0]
            assert isinstance(first.transport, EngineClient)
            again = asyncio.Event()
            first.watch(lambda: again.set() if first.state == "ready" else None)
            assert first.transport.engine_pid is not None
            os.kill(first.transport.engine_pid, signal.SIGKILL)
            await again.wait()
            heard["0"].clear()
            await asyncio.gather(ask("c"), ask("d"))
            await heard["0"].wait()
        unfollow()
        assert first.num_subscribers == 0
    finally:
        await dispatcher.close()
