# SPDX-License-Identifier: Apache-2.0
"""Cores that processes of a simulated server share (`pagoda.plugins.simulate.cores`)."""

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.plugins.simulate.cores import Cores, SimProcess
from pagoda.plugins.simulate.event_loop import run

_WORK = st.lists(
    st.tuples(st.floats(0, 2), st.floats(0.001, 1), st.integers(0, 3)), min_size=1, max_size=12
)
"""Instants at which work comes, its seconds and its threads."""


def _ends(number: float, work: list[tuple[float, float, int]]) -> list[float]:
    """When each piece of work is done."""

    async def all_of_it() -> list[float]:
        loop, cores, ends = asyncio.get_running_loop(), Cores(number), [math.inf] * len(work)
        left = asyncio.Semaphore(0)

        def begin(index: int) -> None:
            _, seconds, threads = work[index]
            cores.run(seconds, lambda: end(index), threads)

        def end(index: int) -> None:
            ends[index] = loop.time()
            left.release()

        for index, (at, _, _) in enumerate(work):
            loop.call_at(at, begin, index)
        for _ in work:
            await left.acquire()
        return ends

    return run(all_of_it())


@given(_WORK)
def test_nothing_waits_where_there_are_cores_for_all(work: list[tuple[float, float, int]]) -> None:
    for (at, seconds, _), end in zip(work, _ends(math.inf, work), strict=True):
        assert end == pytest.approx(at + seconds, abs=1e-6)


@given(_WORK, st.floats(1, 4))
def test_cores_do_no_more_than_they_can(
    work: list[tuple[float, float, int]], number: float
) -> None:
    ends = _ends(number, work)
    for (at, seconds, _), end in zip(work, ends, strict=True):
        assert end > at + seconds - 1e-6
        done = sum(
            seconds * max(1, threads)
            for (began, seconds, threads), ended in zip(work, ends, strict=True)
            if began >= at and ended <= end + 1e-9
        )
        assert done <= (end - at) * number + 1e-6


def test_workers_share_what_those_that_wake_leave() -> None:
    # Four workers on two cores have half a core each; one that wakes for a second takes a whole one.
    work = [(0.0, 1.0, 1)] * 4 + [(0.5, 1.0, 0)]
    *workers, short = _ends(2, work)
    assert short == pytest.approx(1.5)
    assert workers == pytest.approx([2.5] * 4)


def test_a_process_does_one_thing_after_the_other() -> None:
    async def three() -> list[float]:
        loop, ends = asyncio.get_running_loop(), []
        process, done = SimProcess(Cores(8)), asyncio.Event()
        process.do(1.0, lambda: ends.append(loop.time()))
        process.do(2.0, lambda: ends.append(loop.time()))
        process.do(0.5, done.set)
        await done.wait()
        return [*ends, loop.time()]

    assert run(three()) == pytest.approx([1.0, 3.0, 3.5])
