# SPDX-License-Identifier: Apache-2.0
"""Requests that kill engines or workers, in virtual time: they fail alone, and those that wait do not pay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from virtual_fleet import (
    POISON,
    Answer,
    ask,
    engine_config,
    engine_of,
    poisoned,
    request,
    start,
    start_fleet,
    virtual,
    worker_breaking,
)

from pagoda.fleet.placement import LONE_CRASHES
from pagoda.messages.frontend import FinishReason
from pagoda.plugins.simulate.engine import SimEngine


@virtual
async def test_a_request_that_is_moved_often_kills_no_engines() -> None:
    dispatcher, engines = await start(2)
    for engine in engines:
        engine.hang(10)
    asking = asyncio.create_task(ask(dispatcher, request("r", max_tokens=60)))
    for _ in range(5):
        await asyncio.sleep(1.1)
        [busy] = [slot.replica for slot in dispatcher.slots if slot.requests]
        await busy.abort("r")
    assert (await asking).complete


@pytest.mark.parametrize(
    ("num_replicas", "kills", "num_good", "num_before"),
    [
        (3, poisoned, 12, 12),
        (3, worker_breaking, 12, 12),
        *((1, poisoned, 60, num_before) for num_before in (0, 5, 40)),
    ],
)
@virtual
async def test_a_request_that_kills_engines_or_workers_fails_alone(
    num_replicas: int, kills: Callable[[SimEngine], SimEngine], num_good: int, num_before: int
) -> None:
    config = engine_config(max_num_waiting=1000)
    engines = [kills(SimEngine(config, check_kv=True)) for _ in range(num_replicas)]
    dispatcher = await start_fleet(engines, "round-robin")
    good = [request(f"g{i}", [i % 90, 1], max_tokens=60) for i in range(num_good)]
    asked = [*good[:num_before], request("bad", [POISON]), *good[num_before:]]
    answers = await asyncio.gather(*(ask(dispatcher, one) for one in asked))
    [failed] = [answer for answer in answers if not answer.complete]
    assert failed.request.request_id == "bad"
    assert (failed.finish, failed.tokens) == (FinishReason.ERROR, [])
    assert failed.error == "4 engines in a row died while this request was running."


@virtual
async def test_two_that_kill_the_only_engine_fail_and_the_others_complete() -> None:
    dispatcher, _ = await start(1)
    good = [request(f"g{i}", [i, 1], max_tokens=60) for i in range(5)]
    bad = [request("bad1", [POISON]), request("bad2", [POISON])]
    answers = await asyncio.gather(*(ask(dispatcher, r) for r in [*bad, *good]))
    assert [answer.finish for answer in answers[:2]] == [FinishReason.ERROR] * 2
    assert all(answer.complete for answer in answers[2:])


@virtual
async def test_the_innocent_do_not_fail_for_one_that_comes_while_they_are_tried() -> None:
    """One poisoned request after another arrives while suspects of the ones before are tried."""
    dispatcher, _ = await start(1)
    good = [request(f"g{i}", [i, 1], max_tokens=60) for i in range(8)]
    asking = [asyncio.create_task(ask(dispatcher, r)) for r in good]
    bad = []
    for i in range(12):
        bad.append(asyncio.create_task(ask(dispatcher, request(f"bad{i}", [POISON]))))
        await asyncio.sleep(0.3)
    assert all(answer.complete for answer in await asyncio.gather(*asking))
    assert [(await one).finish for one in bad] == [FinishReason.ERROR] * 12


@virtual
async def test_a_suspect_that_dies_beside_others_is_tried_at_an_empty_replica() -> None:
    dispatcher, _ = await start(1)
    bad = asyncio.create_task(ask(dispatcher, request("bad", [POISON])))
    others = []
    while not bad.done():
        others.append(asyncio.create_task(ask(dispatcher, request(f"g{len(others)}"))))
        await asyncio.sleep(0.05)
        [slot] = dispatcher.slots
        if slot.quarantined_for is not None:
            assert slot.quarantined_for.request_id == "bad"
            assert set(slot.requests) <= {slot.quarantined_for}
            assert dispatcher.requests["bad"].crash_count == LONE_CRASHES
    assert (await bad).finish is FinishReason.ERROR
    assert all(answer.complete for answer in await asyncio.gather(*others))


@virtual
async def test_a_replica_that_fails_for_good_is_not_kept_for_a_suspect() -> None:
    dispatcher, engines = await start(2, "round-robin")
    bad = asyncio.create_task(ask(dispatcher, request("bad", [POISON])))
    others: list[asyncio.Task[Answer]] = []
    while all(slot.quarantined_for is None for slot in dispatcher.slots):
        others.append(asyncio.create_task(ask(dispatcher, request(f"g{len(others)}"))))
        await asyncio.sleep(0.02)
    [held] = [slot for slot in dispatcher.slots if slot.quarantined_for is not None]
    engine_of(held).give_up("It is broken.")
    assert (await bad).finish is FinishReason.ERROR
    assert all(answer.complete for answer in await asyncio.gather(*others))
    assert any(engine.replica.is_open for engine in engines)


@virtual
async def test_no_request_is_suspected_when_engines_are_killed_from_outside() -> None:
    dispatcher, [only] = await start(1)
    asking = [asyncio.create_task(ask(dispatcher, request(f"r{i}"))) for i in range(8)]
    for _ in range(6):
        await asyncio.sleep(0.012)  # before the first token
        only.kill(restart_s=0.01, blames_requests=False)
    assert not any(tracked.crash_count for tracked in dispatcher.requests.values())
    assert all(answer.complete for answer in await asyncio.gather(*asking))


@virtual
async def test_requests_that_got_nothing_for_longest_return_first() -> None:
    """Those that have not begun return behind those that have."""
    dispatcher, [only] = await start(1, max_num_seqs=4)
    asking = [asyncio.create_task(ask(dispatcher, request(f"r{i}"))) for i in range(6)]
    await asyncio.sleep(0.05)
    running = [tracked for tracked in dispatcher.requests.values() if tracked.has_begun]
    assert [tracked.request_id for tracked in running] == ["r0", "r1", "r2", "r3"]
    for tracked, instant in zip(running, (30, 10, 40, 20), strict=True):
        tracked.received_ns = instant
    only.kill(restart_s=0.05, blames_requests=False)
    await asyncio.sleep(0.06)
    [slot] = dispatcher.slots
    returned = [tracked.request_id for tracked in slot.requests]
    assert returned == ["r1", "r3", "r0", "r2", "r4", "r5"]
    assert all(answer.complete for answer in await asyncio.gather(*asking))


@virtual
async def test_many_deaths_far_apart_do_not_fail_a_request() -> None:
    dispatcher, [only] = await start(1)
    asking = asyncio.create_task(ask(dispatcher, request("long", max_tokens=100)))
    for _ in range(6):
        await asyncio.sleep(0.15)
        only.kill(restart_s=0.01)
    assert (await asking).complete


@virtual
async def test_requests_that_only_wait_are_not_suspected_when_engines_die() -> None:
    """An engine that dies twice among 600 requests costs little more time than the lost steps."""
    dispatcher, [only] = await start(1, max_num_waiting=1000, num_blocks=400)
    asking = [asyncio.create_task(ask(dispatcher, request(f"r{i}"))) for i in range(600)]
    most_suspects = 0
    for _ in range(2):
        await asyncio.sleep(0.105)  # tokens come every 10 ms
        only.kill(restart_s=0.01)
        await asyncio.sleep(0.015)
        suspects = [r for r in dispatcher.requests.values() if r.crash_count]
        most_suspects = max(most_suspects, len(suspects))
        # The next in line may have got a place each time.
        assert sum(tracked.is_suspect for tracked in suspects) <= 1
    assert 0 < most_suspects <= 2 * 8
    assert all(answer.complete for answer in await asyncio.gather(*asking))
