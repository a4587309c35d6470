# SPDX-License-Identifier: Apache-2.0
"""Fleets in virtual time: engines die, clients leave, queues fill up, and every request ends once and in full.

Every seed is a whole life of a fleet, with the real scheduler and KV cache in each replica. A failing seed is
reproduced by its number alone.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

import pytest
from msgspec.structs import replace
from virtual_fleet import (
    VOCAB_SIZE,
    Answer,
    ask,
    assert_caches_are_known,
    assert_nothing_left,
    engine_config,
    expected,
    lateness,
    request,
    run_seeds,
    start,
    start_fleet,
    virtual,
)

from pagoda.engine.reports import REPORT_INTERVAL_S
from pagoda.errors import EngineDeadError, InvalidRequestError, OverloadedError
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.fleet.endpoint import ReplicaState
from pagoda.fleet.policies import POLICIES
from pagoda.fleet.prefix_index import PrefixIndex, short_keys
from pagoda.kv.block_keys import prefix_keys
from pagoda.messages.frontend import FinishReason
from pagoda.messages.kv_groups import KVGroup, KVKind
from pagoda.messages.load import LoadReport, TierLoad
from pagoda.messages.spans import embedded_span
from pagoda.plugins.simulate.engine import SimEngine

NUM_SEEDS = 300
SEEDS_PER_TEST = 50


# ---- whole lives


async def live(seed: int) -> list[Answer]:
    rng = random.Random(seed)
    engines = [
        SimEngine(
            engine_config(
                base_s=rng.choice([0.005, 0.01, 0.1]),
                num_blocks=rng.choice([40, 64, 200]),
                max_num_seqs=rng.choice([1, 4, 8]),
                max_num_waiting=rng.choice([1, 4, 100]),
            ),
            check_kv=True,
        )
        for _ in range(rng.randint(1, 5))
    ]
    policy = rng.choice(list(POLICIES))
    dispatcher = await start_fleet(engines, policy)
    loop = asyncio.get_running_loop()
    asking: list[asyncio.Task[Answer]] = []
    aborted: set[str] = set()
    mortal = rng.choice([0.0, 0.05, 0.15])
    for index in range(rng.randint(1, 60)):
        shared = [rng.randrange(3)] * rng.choice([0, 8, 24])
        prompt = [*shared, *(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 30)))]
        asked = request(f"r{index}", prompt, rng.randint(1, 40))
        asked = replace(asked, session=rng.choice([None, "a", "b", "c"]))
        leave_after = rng.choice([None, None, None, 1, 5])
        asking.append(asyncio.create_task(ask(dispatcher, asked, leave_after=leave_after)))
        await asyncio.sleep(rng.expovariate(50))
        if rng.random() < 0.1:
            victim = f"r{rng.randint(0, index)}"
            aborted.add(victim)
            await dispatcher.abort(victim)
        if rng.random() < mortal:
            rng.choice(engines).kill(restart_s=rng.choice([0.05, 1.0, 5.0]))
        if rng.random() < mortal / 20:
            rng.choice(engines).give_up("It was broken.")
        if rng.random() < 0.05:
            with suppress(EngineDeadError):
                await dispatcher.load()
    answers = list(await asyncio.gather(*asking))
    await asyncio.sleep(1)
    assert loop.time() < 1000
    assert_nothing_left(dispatcher)
    if POLICIES[policy].uses_prefixes and len(engines) > 1:
        assert_caches_are_known(dispatcher)
    alive = any(engine.replica.state is not ReplicaState.FAILED for engine in engines)
    for answer in answers:
        whole = expected(answer.request)
        assert answer.tokens == whole[: len(answer.tokens)]
        if isinstance(answer.refusal, EngineDeadError):
            assert not alive
        elif isinstance(answer.refusal, OverloadedError):
            assert not answer.tokens
        elif answer.finish is FinishReason.ABORT:
            assert answer.request.request_id in aborted
        elif answer.finish is FinishReason.ERROR:
            assert mortal
            assert "engines in a row died" in (answer.error or "")
        elif not answer.left:
            assert answer.complete
    return answers


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_PER_TEST))
def test_seeds(first: int) -> None:
    run_seeds(live, range(first, first + SEEDS_PER_TEST))


def test_the_same_seed_is_the_same_life() -> None:
    first, second = (virtual(live)(17) for _ in range(2))
    assert [a.chunks for a in first] == [a.chunks for a in second]


# ---- single situations


@virtual
async def test_requests_of_a_replica_without_a_worker_go_elsewhere() -> None:
    dispatcher, engines = await start(3)
    asked = [request(f"r{i}", [i, 1], max_tokens=60) for i in range(12)]
    answers = [asyncio.create_task(ask(dispatcher, one)) for one in asked]
    await asyncio.sleep(0.1)
    lost = engines[1]
    assert dispatcher.num_requests(lost.replica) == 4
    lost.lose_worker(restart_s=1000)
    await asyncio.sleep(0.1)
    assert dispatcher.num_requests(lost.replica) == 0
    assert all(answer.complete for answer in await asyncio.gather(*answers))
    assert asyncio.get_running_loop().time() < 1000


@virtual
async def test_time_without_a_replica_is_time_in_the_queue() -> None:
    dispatcher, (engine,) = await start(1)
    engine.kill(restart_s=3.0)
    answer = asyncio.create_task(ask(dispatcher, request("r")))
    await asyncio.sleep(3.001)  # its prompt is being computed
    engine.kill(restart_s=2.0)
    chunks = (await answer).chunks
    told = [chunk.queue_time_s for chunk in chunks if chunk.queue_time_s is not None]
    assert told == [pytest.approx(5.001)]
    assert chunks[0].queue_time_s is not None


@virtual
async def test_lost_engines_are_counted_beyond_their_ends_and_closed_ones_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dispatcher, engines = await start(2)
    for _ in range(2):
        engines[1].kill(restart_s=0.1)
        lost = (await dispatcher.load()).replicas[1]
        assert (lost.state, lost.report) == ("starting", None)
        assert (await dispatcher.health()).ready
        await asyncio.sleep(0.2)
    report = await dispatcher.load()
    assert report.num_engine_restarts == 2
    caplog.clear()
    await dispatcher.close()
    assert [slot.num_losses for slot in dispatcher.slots] == [0, 2]
    assert "was lost" not in caplog.text


@virtual
async def test_counters_of_an_engine_that_dies_between_two_reports_are_not_lost() -> None:
    dispatcher, (engine,) = await start(1)

    async def generated() -> int:
        """Tokens counted until now, as the replica and the whole report them."""
        report = await dispatcher.load()
        [replica] = report.replicas
        own = replica.report
        assert own is None or own.num_generated_tokens == report.num_generated_tokens
        return report.num_generated_tokens

    await ask(dispatcher, request("r0", max_tokens=3))
    assert await generated() == 3
    await ask(dispatcher, request("r1", max_tokens=20))
    await asyncio.sleep(REPORT_INTERVAL_S)
    engine.kill(restart_s=0.1)
    # The next engine makes more steps than any report has said of the first.
    await ask(dispatcher, request("r2", max_tokens=30))
    assert await generated() == 3 + 20 + 30
    # What is lost is at most what was counted within the interval.
    await ask(dispatcher, request("r3", max_tokens=5))
    engine.kill(restart_s=0.1)
    assert await generated() == 53
    await asyncio.sleep(0.2)
    assert await generated() == 53


async def _lose_worker(engine: SimEngine) -> None:
    engine.lose_worker(restart_s=0.1)


async def _end_unasked(engine: SimEngine) -> None:
    await engine.replica.abort("r")


async def _drain(engine: SimEngine) -> None:
    """A host that ends aborts what it still has then."""
    await engine.replica.drain(0)


@pytest.mark.parametrize(
    ("count", "fault"), [(1, _lose_worker), (1, _end_unasked), (2, _end_unasked), (2, _drain)]
)
@virtual
async def test_what_a_replica_gives_up_goes_on_elsewhere_or_waits(
    count: int, fault: Callable[[SimEngine], Awaitable[None]]
) -> None:
    dispatcher, engines = await start(count)
    asking = asyncio.create_task(ask(dispatcher, request("r", max_tokens=60)))
    await asyncio.sleep(0.1)
    await fault(engines[0])
    assert not asking.done()
    assert (await asking).complete


@virtual
async def test_the_client_is_told_what_the_first_engine_had_cached() -> None:
    dispatcher, engines = await start(2, "round-robin")
    prompt = list(range(30))
    await ask(dispatcher, request("first", prompt))
    await ask(dispatcher, request("other", prompt[::-1]))
    asking = asyncio.create_task(ask(dispatcher, request("second", prompt)))
    await asyncio.sleep(0.1)
    engines[0].kill(restart_s=1)
    answer = await asking
    assert answer.complete
    assert {chunk.num_cached_tokens for chunk in answer.chunks} == {28}


@virtual
async def test_a_prefix_stays_at_one_replica_and_is_forgotten_with_its_engine() -> None:
    dispatcher, engines = await start(2, "prefix-affinity")
    for index in range(5):
        await ask(dispatcher, request(f"r{index}", list(range(60))))
    [home] = [slot for slot in dispatcher.slots if len(slot.prefixes)]
    engines[home.number].kill(restart_s=0.01)
    assert len(home.prefixes) == 0


@virtual
async def test_requests_with_the_same_embedded_span_go_to_one_replica() -> None:
    """Their tokens alone would not tell them apart."""
    dispatcher, _ = await start(2, "prefix-affinity")
    size, prompt = dispatcher.limits.block_size, [7] * 60
    spans = [(embedded_span(0, 48, bytes([index]) * 4 * 48),) for index in range(2)]
    for index in range(12):
        asked = request(f"r{index}", prompt, spans=spans[index % 2])
        assert (await ask(dispatcher, asked)).tokens == expected(asked)
    assert_caches_are_known(dispatcher)
    for own in spans:
        keys = short_keys(prefix_keys(prompt, size, None, 100, "", own))
        told = [slot.prefixes.num_told(keys) for slot in dispatcher.slots]
        assert sorted(told) == [0, len(keys)]


@virtual
async def test_a_prefix_of_a_model_that_has_windows_only_draws_requests_to_its_replica() -> None:
    window = KVGroup(layers=(0,), kind=KVKind.WINDOW, block_size=4, window=9)
    dispatcher, _ = await start(2, "prefix-affinity", kv_groups=(window,), num_blocks=24)
    prompts = [[number] * 60 for number in (1, 2, 3)]
    for turn in range(4):
        for number, prompt in enumerate(prompts):
            asked = request(f"{number}.{turn}", [*prompt, turn], max_tokens=1)
            answer = await ask(dispatcher, asked)
            assert {chunk.num_cached_tokens for chunk in answer.chunks} == {60 if turn else 0}
        for other in range(
            4
        ):  # news of these make replicas known by what they tell, not by what was sent
            await ask(dispatcher, request(f"o{turn}.{other}", [9, turn, other, 9, 9], max_tokens=1))
            await asyncio.sleep(1)


@virtual
async def test_who_comes_late_and_sees_many_replicas_as_one_knows_what_all_of_them_have() -> None:
    dispatcher, engines = await start(3, "round-robin")
    asked = [request(f"r{i}", [i] * 9) for i in range(6)]
    await asyncio.gather(*(ask(dispatcher, one) for one in asked))
    above = PrefixIndex(1000)
    unfollow = dispatcher.subscribe_cache(above.apply)
    await asyncio.sleep(0.1)
    assert above.told == cached_by(engines)
    await asyncio.gather(*(ask(dispatcher, request(f"s{i}", [i, 1] * 8)) for i in range(6)))
    engines[0].kill(restart_s=0.5)
    await asyncio.sleep(0.1)
    assert above.told == cached_by(engines)
    await asyncio.sleep(1)
    await asyncio.gather(*(ask(dispatcher, request(f"t{i}", [i, 2] * 8)) for i in range(6)))
    dispatcher.remove(engines[2].replica)
    await asyncio.sleep(0.1)
    assert above.told == cached_by(engines[:2])
    assert len(above) > 10
    unfollow()
    await asyncio.gather(*(ask(dispatcher, request(f"u{i}", [i, 3] * 8)) for i in range(6)))
    assert above.told != cached_by(engines[:2])
    await engines[2].close()


def cached_by(engines: Sequence[SimEngine]) -> set[int]:
    return set().union(*(engine.cached_keys() for engine in engines))


@virtual
async def test_an_idle_fleet_whose_caches_are_followed_has_nothing_to_do() -> None:
    dispatcher, engines = await start(2, "prefix-affinity")
    await asyncio.gather(*(ask(dispatcher, request(f"r{i}", [i] * 9)) for i in range(6)))
    await asyncio.sleep(REPORT_INTERVAL_S + 0.1)
    assert_caches_are_known(dispatcher)
    assert [engine.next_wakeup() for engine in engines] == [None] * 2


@virtual
async def test_tiers_of_replicas_add_up_and_their_directory_counts_once() -> None:
    async def answered(report: LoadReport) -> LoadReport:
        return report

    dispatcher, engines = await start(2)
    shared = TierLoad(name="disk", num_total_blocks=50, num_stored=3, is_shared=True)
    for index, engine in enumerate(engines):
        host = TierLoad(name="host", num_blocks=2, num_total_blocks=5, num_loaded=1)
        disk = replace(shared, num_blocks=7 + index, is_indexed=index == 0)
        report = replace(await engine.replica.load(), num_awaiting_kv=1, tiers=(host, disk))
        engine.replica.load = partial(answered, report)  # type: ignore[method-assign]
    load = await dispatcher.load()
    assert load.num_awaiting_kv == 2
    assert load.tiers == (
        TierLoad(name="host", num_blocks=4, num_total_blocks=10, num_loaded=2),
        replace(shared, num_blocks=8, num_stored=6, is_indexed=False),
    )


@virtual
async def test_a_degraded_replica_is_avoided_but_better_than_none() -> None:
    dispatcher, engines = await start(2)
    engines[0].lose_worker(restart_s=8)
    await asyncio.gather(*(ask(dispatcher, request(f"r{i}")) for i in range(6)))
    load = await dispatcher.load()
    assert [r.state for r in load.replicas] == ["degraded", "ready"]
    assert [r.report and r.report.num_prompt_tokens for r in load.replicas] == [0, 18]
    engines[1].kill(restart_s=100)
    assert (await ask(dispatcher, request("last"))).complete
    assert asyncio.get_running_loop().time() < 10


@virtual
async def test_requests_wait_for_the_first_replica_that_is_back() -> None:
    dispatcher, engines = await start(2)
    engines[0].kill(restart_s=30)
    engines[1].kill(restart_s=5)
    waiting = asyncio.create_task(ask(dispatcher, request("waits")))
    leaves = asyncio.create_task(ask(dispatcher, request("leaves")))
    await asyncio.sleep(1)
    assert (await dispatcher.load()).num_waiting == 2
    assert (await dispatcher.health()).reason == (
        "replica 0: the engine is restarting; replica 1: the engine is restarting"
    )
    await dispatcher.abort("leaves")
    assert (await leaves).finish is FinishReason.ABORT
    assert (await waiting).complete
    assert 5 <= asyncio.get_running_loop().time() < 6


@virtual
async def test_an_answer_counts_as_one_of_the_usual_length() -> None:
    dispatcher, _ = await start(1)
    for index in range(200):
        await ask(dispatcher, request(f"r{index}", max_tokens=3))
    asking = asyncio.create_task(ask(dispatcher, request("long", [1], max_tokens=100)))
    await asyncio.sleep(0)
    assert [slot.work.pending_tokens for slot in dispatcher.slots] == [1 + 3]
    assert (await asking).complete


@virtual
async def test_an_id_that_is_in_use_is_refused() -> None:
    dispatcher, _ = await start(1)
    first = asyncio.create_task(ask(dispatcher, request("same")))
    await asyncio.sleep(0)
    with pytest.raises(InvalidRequestError, match="same is already running"):
        await ask(dispatcher, request("same"))
    assert (await first).complete


@virtual
async def test_the_last_replica_that_is_given_up_ends_what_waits() -> None:
    dispatcher, engines = await start(2)
    engines[0].kill(restart_s=50)
    asking = asyncio.create_task(ask(dispatcher, request("r", max_tokens=100)))
    await asyncio.sleep(0.1)
    engines[1].give_up("It was broken.")
    await asyncio.sleep(0.1)
    engines[0].give_up("It was broken too.")
    refusal = (await asking).refusal
    assert isinstance(refusal, EngineDeadError)
    assert str(refusal) == "replica 0: It was broken too."


# ---- no replica comes


@virtual
async def test_a_request_is_refused_when_no_replica_comes_in_time() -> None:
    engine = SimEngine(engine_config())
    await engine.start()
    dispatcher = Dispatcher([], POLICIES["round-robin"], no_replica_timeout_s=30)
    dispatcher.add(engine.replica)
    begun = asyncio.create_task(ask(dispatcher, request("begun", max_tokens=100)))
    await asyncio.sleep(0.5)
    engine.kill(restart_s=20)
    early = asyncio.create_task(ask(dispatcher, request("early", max_tokens=100)))
    await asyncio.sleep(20.5)
    dispatcher.remove(engine.replica)
    await engine.close()
    late = asyncio.create_task(ask(dispatcher, request("late")))
    loop = asyncio.get_running_loop()
    for answer in (await begun, await early):
        assert answer.finish is FinishReason.ERROR
        assert answer.error == "No replica has taken requests for 30 s."
    refusal = (await late).refusal
    assert isinstance(refusal, OverloadedError)
    assert refusal.retry_after_s == 30
    assert loop.time() == pytest.approx(51, abs=0.1)


@partial(virtual, lateness_s=lateness(0))
async def test_a_thousand_replicas_share_the_work_and_lose_a_tenth_of_them() -> None:
    dispatcher, engines = await start(1000, "prefix-affinity")
    prompts = [[group] * 24 + [group, number] for group in range(40) for number in range(30)]
    asking = [
        asyncio.create_task(ask(dispatcher, request(f"r{i}", prompt, max_tokens=6)))
        for i, prompt in enumerate(prompts)
    ]
    await asyncio.sleep(0.03)
    for engine in engines[::10]:
        engine.kill(restart_s=0.2)
    assert all(answer.complete for answer in await asyncio.gather(*asking))
    assert sum(slot.num_losses for slot in dispatcher.slots) == 100
    await asyncio.sleep(0.5)
