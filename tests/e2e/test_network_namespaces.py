# SPDX-License-Identifier: Apache-2.0
"""A model split over two hosts, with 5 ms and one lost packet in a hundred between them, which outlives a cut."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import aiohttp
import pytest
from network_hosts import missing_for_namespaces, two_hosts
from ports import free_ports
from streams import bodies, stream_all, until_more

from benchmarks.ray_nodes import ray_cluster
from pagoda.cli.server_process import server_process

pytest.importorskip("ray", reason="Ray is not installed (pip install 'pagoda-llm[ray]')")

_MISSING = missing_for_namespaces()
pytestmark = pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))

NUM_STREAMS = 4
MAX_TOKENS = 32
CUT_S = 5


async def test_streams_outlive_a_cut_of_five_seconds_with_the_same_tokens(plain_url: str) -> None:
    requests = bodies(NUM_STREAMS, MAX_TOKENS, temperature=0)
    expected = await stream_all(plain_url, requests)
    with (
        two_hosts(delay_s=0.005, loss=0.01) as (here, there, cable),
        here.entered(),
        ray_cluster(here.address, free_ports(1, "")[0]) as cluster,
    ):
        with there.entered():
            cluster.add(there.address)
        flags = ["--executor", "ray", "--ray-address", cluster.address, "--tp", "2"]
        with server_process([*flags, "--dtype", "float32"]) as server:

            async def cut_the_cable(received: Callable[[], int]) -> None:
                await until_more(received, 2 * NUM_STREAMS)
                cable.cut()
                mended_at = time.monotonic() + CUT_S
                while time.monotonic() < mended_at:
                    await asyncio.sleep(0.05)
                cable.mend()

            disturbed = await stream_all(server.base_url, requests, cut_the_cable)
            async with (
                aiohttp.ClientSession(server.base_url) as session,
                session.get("/v1/load") as response,
            ):
                load = await response.json()
    assert load["num_worker_restarts"] == 0
    assert cable.num_lost > 0
    assert disturbed == expected
