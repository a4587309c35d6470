# SPDX-License-Identifier: Apache-2.0
"""Three routers over one etcd, which is killed and started again while they serve."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from etcd_server import EtcdServer
from sim_hosts import (
    ask,
    expected,
    host_ids,
    router_process,
    sim_hosts,
    start_host,
    until_hosts,
    write_key,
)

NUM_HOSTS = 4
NUM_ROUTERS = 3
MAX_TOKENS = 100


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path / "etcd")
    yield server
    server.kill()


async def test_service_goes_on_and_views_agree_when_etcd_is_started_again(
    etcd: EtcdServer, tmp_path: Path
) -> None:
    key_file, place = write_key(tmp_path), f"etcd://{etcd.address}/pagoda"
    flags = ["--discovery", place, "--cluster-key-file", str(key_file)]
    async with (
        AsyncExitStack() as stack,
        sim_hosts([place] * NUM_HOSTS, key_file) as hosts,
        aiohttp.ClientSession() as session,
    ):
        routers = [stack.enter_async_context(router_process(*flags)) for _ in range(NUM_ROUTERS)]
        urls = [router.base_url for router in await asyncio.gather(*routers)]
        await until_hosts(session, urls, NUM_HOSTS)
        seeds = itertools.count()

        async def ask_all() -> None:
            """Every router, several at a time."""
            asked = [(url, next(seeds)) for url in urls for _ in range(4)]
            answers = [ask(session, url, seed, MAX_TOKENS) for url, seed in asked]
            assert await asyncio.gather(*answers) == [
                expected(seed, MAX_TOKENS) for _, seed in asked
            ]

        running = asyncio.gather(*(ask_all() for _ in range(3)))
        await asyncio.to_thread(etcd.kill)
        await running
        await ask_all()
        new = await start_host(place, key_file)  # nobody hears of it yet
        stack.push_async_callback(new.close)
        await hosts[0].leave()  # connections tell, whatever etcd does
        await until_hosts(session, urls, NUM_HOSTS - 1)
        await ask_all()
        running = asyncio.gather(*(ask_all() for _ in range(3)))
        await asyncio.to_thread(etcd.start)
        await until_hosts(session, urls, NUM_HOSTS)
        views = [await host_ids(session, url) for url in urls]
        assert new.id in views[0]
        await running
        await ask_all()
