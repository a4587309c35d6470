# SPDX-License-Identifier: Apache-2.0
"""SIGKILL for the worker, three times, while 32 clients read streams over HTTP: they see a pause, nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Collection

import aiohttp
from streams import bodies, children, stream_all, until_more

from pagoda.cli.server_process import server_process

NUM_STREAMS = 32
NUM_KILLS = 3


async def _next_child(server_pid: int, module: str, before: Collection[int]) -> int:
    """Waits for a child that is none of those `before`; returns its process id."""
    while not (new := set(children(server_pid, module)) - set(before)):
        await asyncio.sleep(0.01)
    return new.pop()


async def test_32_streams_survive_kills_token_for_token(plain_url: str) -> None:
    requests = bodies(NUM_STREAMS, 100)

    async def kill(received: Callable[[], int]) -> None:
        """Kills each worker after every stream that still runs could have moved on."""
        killed: set[int] = set()
        while len(killed) < NUM_KILLS:
            await until_more(received, 3 * NUM_STREAMS)
            worker = await _next_child(server.pid, "pagoda.worker.main", killed)
            os.kill(worker, signal.SIGKILL)
            killed.add(worker)

    with server_process(["--dtype", "float32"]) as server:
        disturbed = await stream_all(server.base_url, requests, kill)
        async with (
            aiohttp.ClientSession(server.base_url) as session,
            session.get("/v1/load") as response,
        ):
            assert (await response.json())["num_worker_restarts"] == NUM_KILLS
    assert disturbed == await stream_all(plain_url, requests)
    assert {answer.reason for answer in disturbed} == {"length"}


async def test_the_first_worker_of_a_later_engine_may_be_lost_too(plain_url: str) -> None:
    """An engine cannot go on without its first worker. Where another one has served before, one more follows."""
    requests = bodies(4, 100)
    engines: list[int] = []

    async def kill(received: Callable[[], int]) -> None:
        await until_more(received, 12)
        workers = list(children(server.pid, "pagoda.worker.main"))
        engines.extend(children(server.pid, "pagoda.engine.main"))
        os.kill(engines[0], signal.SIGKILL)
        engines.append(await _next_child(server.pid, "pagoda.engine.main", engines))
        os.kill(await _next_child(server.pid, "pagoda.worker.main", workers), signal.SIGKILL)
        engines.append(await _next_child(server.pid, "pagoda.engine.main", engines))

    with server_process(["--dtype", "float32"]) as server:
        disturbed = await stream_all(server.base_url, requests, kill)
    assert len(set(engines)) == 3
    assert disturbed == await stream_all(plain_url, requests)
