"""Works that are done at the same time."""

from __future__ import annotations

import asyncio

import pytest

from pagoda.frontend.async_utils import MAX_BEGINNINGS, gather_all


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
