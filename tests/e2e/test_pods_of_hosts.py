# SPDX-License-Identifier: Apache-2.0
"""Pods of processes: hosts with roles behind `pagoda route`, killed and cut off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from constrained import check_answers, constrained_bodies
from network_hosts import missing_for_namespaces, two_hosts
from pod_processes import Crowd, PodProcesses, fetched, long_bodies, until_free, until_hosts
from streams import Answer, Disturb, stream_all, until_more

CUT_S = 5


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crowd]:
    with ExitStack() as stack:
        pod = PodProcesses(tmp_path_factory.mktemp("crowd"), stack)
        yield Crowd(pod, {"prefill": 2, "decode": 2})


@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize(
    ("role", "num_events"), [("prefill", 0), ("prefill", 200), ("decode", 1), ("decode", 200)]
)
def test_a_host_is_killed(crowd: Crowd, role: str, num_events: int, constrained: bool) -> None:
    """Some prompts have their KV before them, on its way or behind them whenever a host is killed."""
    asked = constrained_bodies(skill="recall_40") if constrained else long_bodies(24, 60)
    crowd.fill()

    async def ask() -> None:
        await crowd.until_all_joined()
        alone = [{**body, "cache_salt": "alone"} for body in asked]
        expected = await stream_all(crowd.hosts["decode"][1].base_url, alone)
        if constrained:
            check_answers(expected)

        async def kill(received: Callable[[], int]) -> None:
            await until_more(received, num_events)
            crowd.kill(role)

        salt = f"{role} {num_events} {constrained}"
        salted = [{**body, "cache_salt": salt} for body in asked]
        assert await stream_all(crowd.router.base_url, salted, kill) == expected
        await until_free(crowd.urls)
        await crowd.until_all_joined()

    asyncio.run(ask())


def test_a_router_is_killed_and_started_again(crowd: Crowd) -> None:
    crowd.fill()

    async def ask(salt: str, kill: Disturb | None = None) -> list[Answer]:
        await crowd.until_all_joined()
        asked = long_bodies(8, 200, cache_salt=salt)
        return await stream_all(crowd.router.base_url, asked, kill)

    async def kill(received: Callable[[], int]) -> None:
        await until_more(received, 20)
        crowd.kill_router()
        raise ConnectionError

    expected = asyncio.run(ask("before"))
    with pytest.raises(ConnectionError):
        asyncio.run(ask("broken off", kill))
    asyncio.run(until_free(crowd.urls))
    crowd.restart_router()
    assert asyncio.run(ask("after")) == expected


@pytest.mark.skipif(missing_for_namespaces() is not None, reason=str(missing_for_namespaces()))
def test_the_line_between_prefill_and_decode_is_cut_for_five_seconds(tmp_path: Path) -> None:
    asked = long_bodies(12, 60)
    with (
        two_hosts(delay_s=0.002, loss=0.0) as (here, there, cable),
        ExitStack() as stack,
        here.entered(),
    ):
        pod = PodProcesses(tmp_path, stack, here.address)
        decode = pod.host("decode", advertise=here.address)
        with there.entered():
            prefill = pod.host("prefill", advertise=there.address)
        router = pod.route()

        async def mend(due: asyncio.Event) -> None:
            await due.wait()
            cable.mend()

        async def ask() -> None:
            await until_hosts(router.base_url, 2)
            alone = [{**body, "cache_salt": "alone"} for body in asked]
            expected = await stream_all(decode.base_url, alone)
            before = await fetched(decode.base_url)

            async def cut(received: Callable[[], int]) -> None:
                del received
                while await fetched(decode.base_url) == before:
                    await asyncio.sleep(0.001)
                cable.cut()
                asyncio.get_running_loop().call_later(CUT_S, mended.set)

            mended = asyncio.Event()
            mending = asyncio.create_task(mend(mended))
            assert await stream_all(router.base_url, asked, cut) == expected
            await mending
            await until_free([decode.base_url])
            await until_hosts(router.base_url, 2)
            before = await fetched(decode.base_url)
            again = [{**body, "cache_salt": "again"} for body in asked]
            assert await stream_all(router.base_url, again) == expected
            assert await fetched(decode.base_url) > before

        asyncio.run(ask())
        with there.entered():
            asyncio.run(until_free([prefill.base_url]))
