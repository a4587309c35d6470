# SPDX-License-Identifier: Apache-2.0
"""Works that are done at the same time, and work that takes long."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from pagoda.concurrency.async_utils import (
    LONG_TEXT_CHARS,
    MAX_BEGINNINGS,
    LongWork,
    LoopBudget,
    gather_all,
)


async def test_many_works_begin_in_turns_and_end_in_order() -> None:
    loop = asyncio.get_running_loop()
    num_begun = [0]
    """Works that began in each turn of the loop."""

    async def work(number: int) -> int:
        if not num_begun[-1]:
            loop.call_soon(num_begun.append, 0)
        num_begun[-1] += 1
        await asyncio.sleep(0)
        return number

    numbers = list(range(2 * MAX_BEGINNINGS + 1))
    assert await gather_all(list(map(work, numbers))) == numbers
    assert num_begun == [MAX_BEGINNINGS, MAX_BEGINNINGS, 1, 0]


async def test_a_cancelled_crowd_begins_no_more_and_leaves_nothing() -> None:
    begun: list[int] = []
    never = asyncio.Event()

    async def work(number: int) -> None:
        begun.append(number)
        await never.wait()

    works = [work(number) for number in range(3 * MAX_BEGINNINGS)]
    running = asyncio.create_task(gather_all(works))
    while not begun:
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(begun) < len(works)
    assert all(work.cr_frame is None for work in works)  # closed, or ended


# ---- the budget of the event loop


async def test_a_body_has_one_budget_however_it_is_cut() -> None:
    threads, here = LongWork(1), threading.get_ident()
    for size in (100, 1000, LONG_TEXT_CHARS // 2, LONG_TEXT_CHARS, 10**6):
        await asyncio.sleep(0)  # in a turn of its own
        budget, done = LoopBudget(), list[int]()
        for _ in range(20):
            where = await threads.run_sized(threading.get_ident, size, budget)
            done.append(size * (where == here))
        assert sum(done) <= (LONG_TEXT_CHARS if size > 256 else 20 * size)
        assert done[0] == (size if size < LONG_TEXT_CHARS else 0)


async def test_all_bodies_of_a_turn_have_one_budget() -> None:
    loop = asyncio.get_running_loop()
    threads, here = LongWork(1), threading.get_ident()
    done = [0]
    """Characters that were worked on in each turn of the loop."""

    def work(size: int) -> None:
        if threading.get_ident() == here:
            if not done[-1]:
                loop.call_soon(done.append, 0)
            done[-1] += size

    for size in (50, 250, 1000, LONG_TEXT_CHARS // 2):
        works = (partial(work, size) for _ in range(300))
        await asyncio.gather(*(threads.run_sized(one, size, LoopBudget()) for one in works))
        await asyncio.sleep(0)
    assert max(done) <= LONG_TEXT_CHARS
    assert sum(done) >= 300 * (50 + 250)  # short work is never worth a thread


async def test_a_body_of_many_short_texts_lets_others_go_first() -> None:
    threads = LongWork(1)
    num_done = 0

    async def work_on_many() -> None:
        nonlocal num_done
        budget = LoopBudget()
        while num_done < 5000:
            await threads.run_sized(int, 100, budget)
            num_done += 1

    many = asyncio.create_task(work_on_many())
    while num_done < 1000:
        await asyncio.sleep(0)
    await asyncio.create_task(threads.run_sized(int, 100, LoopBudget()))
    assert num_done < 2000
    await many
