"""SIGKILL for the worker, five times, while 32 clients read streams over HTTP: they see a pause, nothing else."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import aiohttp
from streams import bodies, children, stream_all, until_more

from pagoda.cli.server_process import server_process

NUM_STREAMS = 32
NUM_KILLS = 5


async def test_32_streams_survive_five_kills_token_for_token() -> None:
    requests = bodies(NUM_STREAMS)

    async def kill(received: Callable[[], int]) -> None:
        """Each time after every stream that still runs could have moved on."""
        for _ in range(NUM_KILLS):
            await until_more(received, 4 * NUM_STREAMS)
            (worker,) = children(server.pid, "pagoda.worker.main")
            os.kill(worker, signal.SIGKILL)

    with server_process(["--dtype", "float32"]) as server:
        undisturbed = await stream_all(server.base_url, requests)
        disturbed = await stream_all(server.base_url, requests, kill)
        async with (
            aiohttp.ClientSession(server.base_url) as session,
            session.get("/v1/load") as response,
        ):
            assert (await response.json())["num_worker_restarts"] == NUM_KILLS
    assert disturbed == undisturbed
    assert {reason for _, reason in disturbed} == {"length"}
