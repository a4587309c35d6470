"""A model split over two hosts, with 5 ms and one lost packet in a hundred between them, which outlives a cut."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from greedy_streams import stream_all
from network_hosts import missing_for_namespaces, two_hosts
from ray_nodes import ray_cluster

from pagoda.cli.server_process import server_process

pytest.importorskip("ray", reason="Ray is not installed (pip install 'pagoda-llm[ray]')")

_MISSING = missing_for_namespaces()
pytestmark = pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))

NUM_STREAMS = 4
MAX_TOKENS = 32
CUT_S = 5


@pytest.mark.timeout(240)
async def test_streams_outlive_a_cut_of_five_seconds_with_the_same_tokens() -> None:
    with server_process(["--dtype", "float32"]) as server:
        expected = await stream_all(server.base_url, NUM_STREAMS, MAX_TOKENS)
    with (
        two_hosts(delay_s=0.005, loss=0.01) as (here, there, cable),
        here.entered(),
        ray_cluster(here.address) as cluster,
    ):
        with there.entered():
            cluster.add(there.address)
        flags = ["--executor", "ray", "--ray-address", cluster.address, "--tp", "2"]
        with server_process([*flags, "--dtype", "float32"]) as server:

            async def cut_the_cable(_: aiohttp.ClientSession) -> None:
                cable.cut()
                await asyncio.sleep(CUT_S)
                cable.mend()

            undisturbed = await stream_all(server.base_url, NUM_STREAMS, MAX_TOKENS)
            disturbed = await stream_all(server.base_url, NUM_STREAMS, MAX_TOKENS, cut_the_cable)
            async with (
                aiohttp.ClientSession(server.base_url) as session,
                session.get("/v1/load") as response,
            ):
                load = await response.json()
    assert undisturbed == expected
    assert disturbed == expected
    assert load["num_worker_restarts"] == 0
    assert cable.num_lost > 0
