# SPDX-License-Identifier: Apache-2.0
"""Reports to frontends: totals and statistics of steps, and the prefix cache, at a bounded rate."""

from __future__ import annotations

import asyncio
import os
import signal
from bisect import bisect_left
from itertools import chain

import pytest
from harness import Harness, make_request
from hypothesis import given
from hypothesis import strategies as st
from mortal_executor import speaking

from pagoda.engine import reports
from pagoda.engine.reports import (
    BIN_S,
    CACHE_INTERVAL_S,
    MAX_BINS,
    MAX_KEYS,
    REPORT_INTERVAL_S,
    STATISTICS_INTERVAL_S,
    CacheReporter,
    StepRecorder,
)
from pagoda.executor.base import WorkerLost
from pagoda.fleet.engine_client import EngineClient
from pagoda.fleet.fleet import Fleet
from pagoda.ipc.clock import VirtualClock
from pagoda.kv.block_keys import SHORT_KEY_BYTES
from pagoda.kv.block_pool import BlockPool
from pagoda.kv.events import CacheRecorder
from pagoda.messages.engine_config import EngineConfig, SimConfig
from pagoda.messages.frontend import (
    GenerateRequest,
    PrefixCacheUpdate,
    StepBin,
    StepStatistics,
    Work,
)
from pagoda.messages.load import STEP_SEQUENCE_BOUNDS, STEP_TOKEN_BOUNDS, StepTotals
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import StepPlan, StepResult
from pagoda.messages.worker_config import WorkerConfig
from pagoda.parallel.config import ParallelConfig


def recorder() -> tuple[VirtualClock, StepRecorder]:
    clock = VirtualClock()
    clock.advance_to(100)
    return clock, StepRecorder(clock)


def begin(steps: StepRecorder, *num_tokens: int, step: int = 0) -> None:
    steps.submitted(StepPlan(step, list(range(len(num_tokens))), list(num_tokens)), 0.0, 0.0)


def run(
    clock: VirtualClock,
    steps: StepRecorder,
    step: int,
    num_tokens: list[int],
    step_time_s: float = 0.001,
) -> None:
    begin(steps, *num_tokens, step=step)
    steps.finished(StepResult(step, [], [], step_time_s=step_time_s), clock.now())


def test_the_time_of_a_step_is_divided_among_its_phases() -> None:
    clock, steps = recorder()
    assert steps.totals() == StepTotals()
    clock.advance_to(103.0)
    steps.submitted(StepPlan(0, [0, 1, 2], [5, 1, 1]), began=101.0, planned=102.5)
    clock.advance_to(106.5)
    times = {
        "prepare_time_s": 0.25,
        "forward_time_s": 0.5,
        "sample_time_s": 0.125,
        "idle_time_s": 2.5,
    }
    steps.finished(StepResult(0, [], [], step_time_s=1.0, **times), taken=106.0)
    totals = steps.totals()
    assert (totals.schedule_s, totals.submit_s) == (1.5, 0.5)
    assert (totals.wait_s, totals.update_s) == (2.0, 0.5)
    assert (totals.prepare_s, totals.forward_s, totals.sample_s) == (0.25, 0.5, 0.125)
    assert totals.idle_s == 2.5
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
    steps.follow()
    begin(steps, 100)
    begin(steps, 1)
    steps.lost()
    run(clock, steps, 2, [6])
    assert steps.totals().num_tokens == 6
    assert steps.drain() == StepStatistics([StepBin(0.0, 2, 1, 0.001, 6, 0, 1)])


def test_without_a_follower_nothing_is_kept() -> None:
    clock, steps = recorder()
    run(clock, steps, 0, [1, 5])
    assert steps.next_event_at() is None
    steps.follow()
    run(clock, steps, 1, [1])
    steps.unfollow()
    run(clock, steps, 2, [1])
    assert (steps.next_event_at(), steps.drain()) == (None, None)


def test_each_step_is_told_with_its_age_and_what_was_in_it() -> None:
    clock, steps = recorder()
    steps.follow()
    run(clock, steps, 4, [1, 7, 1], 0.02)
    assert steps.drain() == StepStatistics([StepBin(0.0, 4, 1, 0.02, 7, 2, 3)])
    clock.advance_to(100.25)
    run(clock, steps, 5, [1], 0.03)
    assert steps.drain() is None
    assert steps.next_event_at() == 100 + STATISTICS_INTERVAL_S
    clock.advance_to(100 + STATISTICS_INTERVAL_S)
    assert steps.drain() == StepStatistics([StepBin(0.25, 5, 1, 0.03, 0, 1, 1)])


def test_steps_that_end_close_together_are_one() -> None:
    clock, steps = recorder()
    steps.follow()
    for step, time_s in enumerate((0.001, 0.004, 0.002)):
        run(clock, steps, step, [1] * (step + 1) + [10], time_s)
    assert steps.drain() == StepStatistics([StepBin(0.0, 2, 3, 0.004, 30, 6, 4)])


@pytest.mark.parametrize("every_s", [BIN_S / 50, BIN_S, 3 * BIN_S])
def test_news_are_few_and_small_and_lose_no_step(every_s: float) -> None:
    clock, steps = recorder()
    steps.follow()
    num_steps, drained = 3000, []
    for step in range(num_steps):
        run(clock, steps, step, [1])
        drained.append(steps.drain())
        clock.advance_to(clock.now() + every_s)
    clock.advance_to(clock.now() + STATISTICS_INTERVAL_S)
    drained.append(steps.drain())
    all_news = [news for news in drained if news is not None]
    assert sum(one.num_steps for news in all_news for one in news.bins) == num_steps
    assert max(len(news.bins) for news in all_news) <= MAX_BINS
    assert len(all_news) <= (clock.now() - 100) / STATISTICS_INTERVAL_S + 1


def test_what_nobody_takes_is_bounded_too() -> None:
    clock, steps = recorder()
    steps.follow()
    for step in range(5 * MAX_BINS):
        run(clock, steps, step, [1])
        clock.advance_to(clock.now() + BIN_S)
    news = steps.drain()
    assert news is not None
    assert len(news.bins) == MAX_BINS
    assert news.bins[-1].step == 5 * MAX_BINS - 1


def test_steps_are_reported_once_within_the_interval() -> None:
    clock, steps = recorder()
    assert steps.next_event_at() is None
    run(clock, steps, 0, [1])
    assert not steps.is_report_due()
    assert steps.next_event_at() == 100 + REPORT_INTERVAL_S
    clock.advance_to(100 + REPORT_INTERVAL_S / 2)
    run(clock, steps, 1, [1])
    assert not steps.is_report_due()
    clock.advance_to(100 + REPORT_INTERVAL_S)
    assert steps.is_report_due()
    steps.reported()
    # An engine that has reported all of its steps need not wake up.
    assert not steps.is_report_due()
    assert steps.next_event_at() is None


def test_a_lost_worker_is_reported_at_once() -> None:
    harness, executor = speaking()
    core = harness.core
    assert core.drain_load_report() is None
    for _ in range(2):  # the second start is delayed
        executor.say(WorkerLost("gone"))
        harness.step()
    reports = [core.drain_load_report() for _ in range(2)]
    assert [report and report.is_worker_ready for report in reports] == [False, None]
    while not core.is_worker_ready:
        harness.tick()
    report = core.drain_load_report()
    assert report is not None
    assert report.is_worker_ready


# ---- the prefix cache

A, B, C, *_ = KEYS = [bytes([index]) * 32 for index in range(12)]


def reporter(*sizes: int) -> tuple[VirtualClock, CacheReporter, list[BlockPool]]:
    """A reporter on pools of these sizes."""
    clock, recorder = VirtualClock(), CacheRecorder(keeps_events=False)
    clock.advance_to(100)
    pools = [BlockPool(size, recorder) for size in sizes]
    return clock, CacheReporter(pools, recorder, clock), pools


def update(told: CacheReporter) -> PrefixCacheUpdate:
    drained = told.drain()
    assert drained is not None
    return drained


def store(pool: BlockPool, *keys: bytes) -> None:
    """Tokens in blocks that may be evicted at once."""
    blocks = pool.allocate(len(keys))
    for block, key in zip(blocks, keys, strict=True):
        pool.publish(block, key)
    pool.release(blocks)


def split(packed: bytes) -> set[bytes]:
    size = SHORT_KEY_BYTES
    return {packed[start : start + size] for start in range(0, len(packed), size)}


class Frontend:
    def __init__(self) -> None:
        self.known = {b"believed before"}

    def hear(self, news: PrefixCacheUpdate) -> None:
        stored, removed = split(news.stored), split(news.removed)
        assert not stored & removed
        if news.starts_anew:
            self.known = set()
        self.known = (self.known | stored) - removed


@pytest.mark.parametrize("max_keys", [1, 3, 100])
@given(st.data())
def test_every_frontend_ends_up_knowing_what_is_cached(max_keys: int, data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reports, "MAX_KEYS", max_keys)
        clock, told, pools = reporter(5, 7)
        frontends: list[Frontend] = []
        for _ in range(data.draw(st.integers(0, 30))):
            action = data.draw(st.sampled_from(["store", "discard", "lose", "follow", "hear"]))
            pool = data.draw(st.sampled_from(pools))
            key = data.draw(st.sampled_from(KEYS))
            if action == "store":
                store(pool, key)
            elif action == "discard":
                pool.discard(key)
            elif action == "lose":
                pool.clear_cache()
            elif action == "follow":
                told.follow()
                frontends.append(Frontend())
            else:
                clock.advance_to(clock.now() + data.draw(st.sampled_from([0.0, CACHE_INTERVAL_S])))
                if (news := told.drain()) is not None:
                    for frontend in frontends:
                        frontend.hear(news)
        while (instant := told.next_event_at()) is not None:
            clock.advance_to(max(clock.now(), instant))
            news = update(told)
            for frontend in frontends:
                frontend.hear(news)
        keys = chain.from_iterable(pool.keys() for pool in pools)
        cached = {key[:SHORT_KEY_BYTES] for key in keys}
        assert all(frontend.known == cached for frontend in frontends)
        assert told.drain() is None


def test_without_a_follower_no_change_is_kept() -> None:
    _, told, [pool] = reporter(4)
    store(pool, A)
    assert told.next_event_at() is None
    assert told.drain() is None


def test_the_first_news_come_at_once_and_the_next_after_the_interval() -> None:
    clock, told, [pool] = reporter(4)
    store(pool, A)
    told.follow()
    assert update(told) == PrefixCacheUpdate(A[:8], b"", starts_anew=True)
    assert told.next_event_at() is None
    store(pool, B)
    assert told.drain() is None
    assert told.next_event_at() == 100 + CACHE_INTERVAL_S
    clock.advance_to(100 + CACHE_INTERVAL_S)
    store(pool, C)
    assert update(told) == PrefixCacheUpdate(B[:8] + C[:8], b"")
    clock.advance_to(200)
    assert told.drain() is None
    pool.discard(B)
    assert update(told) == PrefixCacheUpdate(b"", B[:8])


def test_all_is_told_anew_once_another_follows() -> None:
    clock, told, [pool] = reporter(4)
    told.follow()
    store(pool, A)
    told.drain()
    store(pool, B)
    told.follow()
    clock.advance_to(101)
    news = update(told)
    assert (split(news.stored), news.starts_anew) == ({A[:8], B[:8]}, True)


def test_news_are_of_bounded_size() -> None:
    clock, told, [pool] = reporter(MAX_KEYS + 10)
    store(pool, *(index.to_bytes(32, "little") for index in range(MAX_KEYS + 10)))
    told.follow()
    first = update(told)
    clock.advance_to(101)
    second = update(told)
    assert len(first.stored) == MAX_KEYS * SHORT_KEY_BYTES
    assert len(second.stored) == 10 * SHORT_KEY_BYTES
    assert (first.starts_anew, second.starts_anew) == (True, False)
    assert told.next_event_at() is None


def test_a_block_that_is_still_in_host_memory_is_not_removed() -> None:
    clock, told, [device, host] = reporter(4, 4)
    told.follow()
    store(device, A)
    store(host, A)
    told.drain()
    device.discard(A)
    clock.advance_to(101)
    assert update(told) == PrefixCacheUpdate(A[:8], b"")
    host.discard(A)
    clock.advance_to(102)
    assert update(told) == PrefixCacheUpdate(b"", A[:8])


def test_what_is_on_disk_alone_is_not_told() -> None:
    recorder = CacheRecorder()
    told = CacheReporter([BlockPool(4, recorder)], recorder, VirtualClock())
    told.follow()
    told.drain()
    recorder.store(A, None, [1], "DISK")
    assert told.next_event_at() is None


# ---- engines


def test_an_engine_tells_of_all_tokens_that_it_computes() -> None:
    it = Harness()
    it.core.steps.follow()
    it.core.add(make_request("a", list(range(20)), max_tokens=5))
    it.core.step()
    news: list[StepStatistics] = []
    while (wakeup := it.core.next_wakeup()) is not None:
        it.clock.advance_to(max(wakeup, it.clock.now()))
        it.core.step()
        news += [one for one in it.core.drain_updates() if isinstance(one, StepStatistics)]
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
        request = GenerateRequest(request_id=name, prompt_token_ids=[1, 2, 3], work=Work(sampling))
        async for _ in dispatcher.generate(request):
            pass

    try:
        async with asyncio.timeout(60):
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


def test_who_has_enough_of_the_cache_costs_nothing_more() -> None:
    clock, recorder = VirtualClock(), CacheRecorder(keeps_events=False)
    pool = BlockPool(4)
    told = CacheReporter([pool], recorder, clock)
    told.follow()
    assert told.drain() is not None
    told.unfollow()
    recorder.store(b"k" * 32, None, [1])
    assert recorder.changed is None
    clock.advance_to(10.0)
    assert told.drain() is None
    assert told.next_event_at() is None
