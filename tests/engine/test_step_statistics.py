"""Statistics of steps: a subscriber learns how long each took and what was in it, at a bounded rate."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from harness import Harness, make_request

from pagoda.engine.config import EngineConfig, SimConfig
from pagoda.engine.step_statistics import BIN_S, INTERVAL_S, MAX_BINS, StepReporter
from pagoda.frontend.engine_client import EngineClient
from pagoda.frontend.fleet import Fleet
from pagoda.ipc.clock import VirtualClock
from pagoda.messages.frontend import GenerateRequest, StepBin, StepStatistics
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import StepPlan, StepResult
from pagoda.messages.worker_config import WorkerConfig
from pagoda.parallel.config import ParallelConfig


def reporter() -> tuple[VirtualClock, StepReporter]:
    clock = VirtualClock()
    clock.advance_to(100)
    return clock, StepReporter(clock)


def run(told: StepReporter, step: int, num_tokens: list[int], step_time_s: float = 0.001) -> None:
    told.begin(StepPlan(step, list(range(len(num_tokens))), num_tokens))
    told.end(StepResult(step, [], [], step_time_s=step_time_s))


def test_without_a_follower_nothing_is_kept() -> None:
    clock, told = reporter()
    run(told, 0, [1, 5])
    assert told.next_event_at() is None
    told.follow(b"f")
    clock.advance_to(101)
    assert told.drain() == []
    told.begin(StepPlan(1, [0], [1]))
    told.unfollow(b"f")
    told.end(StepResult(1, [], []))
    assert (told.next_event_at(), told.drain()) == (None, [])


def test_each_step_is_told_with_its_age_and_what_was_in_it() -> None:
    clock, told = reporter()
    told.follow(b"f")
    told.follow(b"g")
    run(told, 4, [1, 7, 1], 0.02)
    news = StepStatistics([StepBin(0.0, 4, 1, 0.02, 7, 2, 3)])
    assert sorted(told.drain()) == [(b"f", news), (b"g", news)]
    clock.advance_to(100.25)
    run(told, 5, [1], 0.03)
    assert told.drain() == []
    assert told.next_event_at() == 100 + INTERVAL_S
    clock.advance_to(100 + INTERVAL_S)
    [(_, later), _] = told.drain()
    assert later.bins == [StepBin(0.25, 5, 1, 0.03, 0, 1, 1)]
    assert told.next_event_at() is None


def test_steps_that_end_close_together_are_one() -> None:
    _, told = reporter()
    told.follow(b"f")
    for step, time_s in enumerate((0.001, 0.004, 0.002)):
        run(told, step, [1] * (step + 1) + [10], time_s)
    [(_, news)] = told.drain()
    assert news.bins == [StepBin(0.0, 2, 3, 0.004, 30, 6, 4)]


@pytest.mark.parametrize("every_s", [BIN_S / 50, BIN_S, 3 * BIN_S])
def test_news_are_few_and_small_and_lose_no_step(every_s: float) -> None:
    clock, told = reporter()
    told.follow(b"f")
    num_steps, all_news = 3000, []
    for step in range(num_steps):
        run(told, step, [1])
        all_news += told.drain()
        clock.advance_to(clock.now() + every_s)
    clock.advance_to(clock.now() + INTERVAL_S)
    all_news += told.drain()
    assert sum(one.num_steps for _, news in all_news for one in news.bins) == num_steps
    assert max(len(news.bins) for _, news in all_news) <= MAX_BINS
    assert len(all_news) <= (clock.now() - 100) / INTERVAL_S + 1


def test_what_nobody_takes_is_bounded_too() -> None:
    clock, told = reporter()
    told.follow(b"f")
    for step in range(5 * MAX_BINS):
        run(told, step, [1])
        clock.advance_to(clock.now() + BIN_S)
    [(_, news)] = told.drain()
    assert len(news.bins) == MAX_BINS
    assert news.bins[-1].step == 5 * MAX_BINS - 1


def test_steps_of_a_lost_worker_are_forgotten() -> None:
    _, told = reporter()
    told.follow(b"f")
    told.begin(StepPlan(0, [0], [1]))
    told.begin(StepPlan(1, [0], [1]))
    run(told, 2, [6])
    [(_, news)] = told.drain()
    assert news.bins == [StepBin(0.0, 2, 1, 0.001, 6, 0, 1)]
    assert told.in_flight == {}


def test_an_engine_tells_of_all_tokens_that_it_computes() -> None:
    it = Harness()
    it.core.subscribe_steps(b"f")
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
            assert isinstance(first, EngineClient)
            again = asyncio.Event()
            first.watch(lambda: again.set() if first.state == "ready" else None)
            assert first.engine_pid is not None
            _kill(first.engine_pid)
            await again.wait()
            heard["0"].clear()
            await asyncio.gather(ask("c"), ask("d"))
            await heard["0"].wait()
        unfollow()
        assert first.connection.num_subscribers == 0
    finally:
        await dispatcher.close()


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
