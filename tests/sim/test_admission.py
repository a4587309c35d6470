# SPDX-License-Identifier: Apache-2.0
"""Admission at a dispatcher, in virtual time: tokens that wait, keys that share the queue, deadlines."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from virtual_fleet import Answer, ask, assert_nothing_left, request, start, virtual

from pagoda.concurrency.async_utils import cancel_all
from pagoda.errors import DeadlineError, OverloadedError
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.messages.frontend import GenerateRequest


def asking(dispatcher: Dispatcher, asked: GenerateRequest) -> asyncio.Task[Answer]:
    return asyncio.create_task(ask(dispatcher, asked))


def is_refused(answer: Answer) -> bool:
    return isinstance(answer.refusal, OverloadedError)


@virtual
async def test_prompts_that_wait_are_bounded_by_their_tokens() -> None:
    dispatcher, _ = await start(1, max_num_seqs=1, max_num_waiting_tokens=100, num_blocks=64)
    most = dispatcher.slots.sums.max_queued_tokens
    assert most == 100 + 64 * 4
    tasks = [asking(dispatcher, request(f"r{i}", [i] * 50, max_tokens=4)) for i in range(8)]
    answers = await asyncio.gather(*tasks)
    assert any(map(is_refused, answers))
    assert all(answer.complete or is_refused(answer) for answer in answers)
    assert any(answer.complete for answer in answers)
    assert_nothing_left(dispatcher)


def parts(body: str, count: int, **fields: Any) -> list[GenerateRequest]:
    """Requests of 50 tokens each."""
    return [
        request(f"{body}{i}", [i] * 50, body=body, max_tokens=4, **fields) for i in range(count)
    ]


@pytest.mark.parametrize("num_tokens", [1, 60, 200, 2000])
@virtual
async def test_a_body_that_meets_an_empty_queue_is_taken_however_much_it_is(
    num_tokens: int,
) -> None:
    dispatcher, _ = await start(1, max_num_seqs=2, max_num_waiting_tokens=num_tokens)
    asked = parts("b", 60)
    assert (
        sum(len(part.prompt_token_ids) for part in asked) > dispatcher.slots.sums.max_queued_tokens
    )
    tasks = [asking(dispatcher, part) for part in asked]
    most = 0
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0.01)
        sent = [one for one in dispatcher.requests.values() if one.placement is not None]
        most = max(most, sum(one.num_tokens for one in sent if not one.has_begun))
    assert all(task.result().complete for task in tasks)
    assert most <= max(num_tokens, 50)
    assert_nothing_left(dispatcher)


@virtual
async def test_half_of_the_queue_is_left_to_others_while_a_large_body_waits() -> None:
    dispatcher, _ = await start(1, max_num_seqs=1, max_num_waiting_tokens=400, num_blocks=64)
    large = [asking(dispatcher, part) for part in parts("b", 60, tenant="heavy")]
    await asyncio.sleep(0.05)
    others = [asking(dispatcher, part) for part in parts("c", 3, tenant="light")]
    second = [asking(dispatcher, part) for part in parts("d", 30, tenant="heavy")]
    assert all(answer.complete for answer in await asyncio.gather(*others))
    assert not all(task.done() for task in large)
    assert any(map(is_refused, await asyncio.gather(*second)))  # it met a queue
    assert all(answer.complete for answer in await asyncio.gather(*large))
    assert_nothing_left(dispatcher)


@virtual
async def test_a_body_that_is_held_ends_with_its_client_its_deadline_and_its_engine() -> None:
    dispatcher, [engine] = await start(1, max_num_seqs=1, max_num_waiting_tokens=100)
    gone = [asking(dispatcher, part) for part in parts("a", 20)]
    await asyncio.sleep(0.05)
    await cancel_all(gone)
    assert_nothing_left(dispatcher)
    late = [asking(dispatcher, part) for part in parts("b", 40, timeout_s=0.5)]
    ends = await asyncio.gather(*late, return_exceptions=True)
    assert isinstance(ends[-1], DeadlineError)
    assert asyncio.get_running_loop().time() == pytest.approx(0.6, abs=0.1)
    lost = [asking(dispatcher, part) for part in parts("c", 20)]
    await asyncio.sleep(0.05)
    engine.kill(restart_s=0.5)
    assert all(answer.complete for answer in await asyncio.gather(*lost))
    assert_nothing_left(dispatcher)


@virtual
async def test_a_key_that_fills_the_queue_does_not_keep_others_out() -> None:
    dispatcher, _ = await start(2, max_num_seqs=1, max_num_waiting=3)
    heavy = [asking(dispatcher, request(f"h{i}", [i], tenant="heavy")) for i in range(12)]
    await asyncio.sleep(0.05)
    with pytest.raises(OverloadedError):
        dispatcher.check_room("heavy", 1.0)
    dispatcher.check_room("light", 1.0)
    light = [asking(dispatcher, request(f"l{i}", [50 + i], tenant="light")) for i in range(2)]
    assert all(answer.complete for answer in await asyncio.gather(*light))
    answers = await asyncio.gather(*heavy)
    refused = [answer for answer in answers if is_refused(answer)]
    assert len(refused) == 4 + 2  # those that came too late, and the newest two that waited
    assert all(answer.complete for answer in answers if answer not in refused)
    assert not any(answer.tokens for answer in refused)
    assert_nothing_left(dispatcher)


@pytest.mark.parametrize("max_num_seqs", [1, 8])
@virtual
async def test_a_request_ends_at_its_deadline_wherever_it_is(max_num_seqs: int) -> None:
    dispatcher, _ = await start(1, max_num_seqs=max_num_seqs)
    other = asking(dispatcher, request("other", [1], max_tokens=100))
    await asyncio.sleep(0.05)
    with pytest.raises(DeadlineError):
        await ask(dispatcher, request("late", [2], max_tokens=100, timeout_s=0.3))
    assert asyncio.get_running_loop().time() == pytest.approx(0.35, abs=0.02)
    assert (await other).complete
    await asyncio.sleep(0.1)
    assert_nothing_left(dispatcher)


@virtual
async def test_a_request_that_moves_keeps_its_deadline() -> None:
    dispatcher, engines = await start(2)
    late = asyncio.create_task(ask(dispatcher, request("late", [2], max_tokens=120, timeout_s=0.5)))
    await asyncio.sleep(0.2)
    for engine in engines:
        engine.kill(restart_s=0.1)
    with pytest.raises(DeadlineError):
        await late
    assert asyncio.get_running_loop().time() == pytest.approx(0.5, abs=0.05)


@virtual
async def test_a_deadline_passes_while_there_is_no_replica() -> None:
    dispatcher, [engine] = await start(1)
    engine.kill(restart_s=100)
    with pytest.raises(DeadlineError):
        await ask(dispatcher, request("late", timeout_s=2.0))
    assert asyncio.get_running_loop().time() == pytest.approx(2.0, abs=0.1)
    with pytest.raises(DeadlineError):
        await ask(dispatcher, request("at once", timeout_s=0.0))
