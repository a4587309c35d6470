"""A Ray cluster of two nodes on this machine: a model split over both serves, and outlives one of them."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from greedy_streams import stream_all
from ray_nodes import QUICK_TO_NOTICE, ray_cluster

from pagoda.cli.server_process import server_process

pytest.importorskip("ray", reason="Ray is not installed (pip install 'pagoda-llm[ray]')")

HEAD, SECOND = "127.0.0.1", "127.0.0.2"
"""Two addresses, so that the nodes count as two hosts, which share no memory."""
NUM_STREAMS = 8
MAX_TOKENS = 200


async def wait_until_lost(session: aiohttp.ClientSession) -> str:
    """What `/health/ready` says when the workers are being replaced."""
    while True:
        async with session.get("/health/ready") as response:
            if response.status == 503:
                return str(await response.json())
        await asyncio.sleep(0.02)


@pytest.mark.timeout(180)
async def test_a_node_is_killed_and_replaced_and_all_streams_complete_with_the_same_tokens() -> (
    None
):
    with server_process(["--dtype", "float32"]) as server:
        expected = await stream_all(server.base_url, NUM_STREAMS, MAX_TOKENS)
    with ray_cluster(HEAD, QUICK_TO_NOTICE) as cluster:
        second = cluster.add(SECOND)
        flags = ["--executor", "ray", "--ray-address", cluster.address, "--tp", "2"]
        with server_process([*flags, "--dtype", "float32"]) as server:

            async def replace_the_second_node(session: aiohttp.ClientSession) -> None:
                second.kill()
                assert "worker is restarting" in await wait_until_lost(session)
                await asyncio.to_thread(cluster.add, SECOND)

            texts = await stream_all(
                server.base_url, NUM_STREAMS, MAX_TOKENS, replace_the_second_node
            )
    assert texts == expected
