# SPDX-License-Identifier: Apache-2.0
"""An event loop whose clock moves when nothing else can."""

from __future__ import annotations

import asyncio

import pytest

from pagoda.plugins.simulate.event_loop import run


def test_a_year_passes_at_once_and_in_order() -> None:
    seen: list[tuple[str, float]] = []

    async def wait(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((name, asyncio.get_running_loop().time()))

    async def main() -> None:
        await asyncio.gather(wait("year", 365 * 86400.0), wait("second", 1.0), wait("now", 0.0))

    run(main())
    assert seen == [("now", 0.0), ("second", 1.0), ("year", 365 * 86400.0)]


def test_timeouts_and_instants_that_differ_by_little() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1e6):
                await asyncio.Event().wait()
        instants = [loop.time()]
        for _ in range(100):
            await asyncio.sleep(1e-6)
            instants.append(loop.time())
        return instants

    instants = run(main())
    assert instants == sorted(set(instants))


def test_timers_meet_in_one_turn_of_a_loop_that_is_late() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        seen: list[float] = []
        for delay_s in (1.0, 1.5, 3.0):
            loop.call_later(delay_s, lambda: seen.append(loop.time()))
        await asyncio.sleep(4.0)
        return seen

    assert run(main(), lateness_s=lambda: 1.0) == [2.0, 2.0, 4.0]
    assert run(main()) == [1.0, 1.5, 3.0]


def test_waiting_for_nothing_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="no ready task and no timer"):
        run(main())
