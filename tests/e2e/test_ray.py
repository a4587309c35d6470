# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of two nodes on this machine: a model split over both serves, and outlives one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp
import pytest
from ports import free_ports
from streams import bodies, stream_all, until_more

from benchmarks.ray_nodes import QUICK_TO_NOTICE, ray_cluster
from pagoda.cli.server_process import server_process

pytest.importorskip("ray", reason="Ray is not installed (pip install 'pagoda-llm[ray]')")

HEAD, SECOND = "127.0.0.1", "127.0.0.2"
"""Two addresses, so that the nodes count as two hosts, which share no memory."""
NUM_STREAMS = 8
MAX_TOKENS = 200


async def until_not_ready(base_url: str) -> str:
    """Returns what `/health/ready` says once workers are being replaced."""
    async with aiohttp.ClientSession(base_url) as session:
        while True:
            async with session.get("/health/ready") as response:
                if response.status == 503:
                    return str(await response.json())
            await asyncio.sleep(0.02)


async def test_a_node_is_killed_and_replaced_and_all_streams_complete(plain_url: str) -> None:
    requests = bodies(NUM_STREAMS, MAX_TOKENS, temperature=0)
    with ray_cluster(HEAD, free_ports(1, "")[0], QUICK_TO_NOTICE) as cluster:
        second = cluster.add(SECOND)
        flags = ["--executor", "ray", "--ray-address", cluster.address, "--tp", "2"]
        with server_process([*flags, "--dtype", "float32"]) as server:

            async def replace_the_second_node(received: Callable[[], int]) -> None:
                await until_more(received, 2 * NUM_STREAMS)
                second.kill()
                assert "worker is restarting" in await until_not_ready(server.base_url)
                await asyncio.to_thread(cluster.add, SECOND)

            disturbed = await stream_all(server.base_url, requests, replace_the_second_node)
    assert disturbed == await stream_all(plain_url, requests)
