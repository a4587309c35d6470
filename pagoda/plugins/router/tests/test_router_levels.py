# SPDX-License-Identifier: Apache-2.0
"""Routers over routers over 32 hosts, one of them killed while it serves."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
from ports import free_ports
from sim_hosts import (
    NUM_BLOCKS,
    ask,
    expected,
    router_process,
    sim_hosts,
    until_hosts,
    write_key,
)

NUM_HOSTS = 32
NUM_LOWER = 2
NUM_STREAMS = 64
MAX_TOKENS = 150


async def test_two_levels_answer_as_one_host_also_when_a_router_between_is_killed(
    tmp_path: Path,
) -> None:
    key_file = write_key(tmp_path)
    key = ("--cluster-key-file", str(key_file))
    top, *middle = (f"127.0.0.1:{port}" for port in free_ports(1 + NUM_LOWER))
    async with (
        AsyncExitStack() as stack,
        sim_hosts(middle * (NUM_HOSTS // NUM_LOWER), key_file, step_s=0.02) as hosts,
        aiohttp.ClientSession() as session,
    ):
        upper, *lower = await asyncio.gather(
            stack.enter_async_context(router_process("--join-listen", top, *key)),
            *(
                stack.enter_async_context(
                    router_process("--join-listen", listen, "--join", top, *key)
                )
                for listen in middle
            ),
        )
        await until_hosts(session, [upper.base_url], NUM_LOWER)
        for router in lower:
            await until_hosts(session, [router.base_url], NUM_HOSTS // NUM_LOWER)
        await _until_blocks(session, upper.base_url, NUM_BLOCKS * NUM_HOSTS)

        asking = asyncio.gather(
            *(ask(session, upper.base_url, seed, MAX_TOKENS) for seed in range(NUM_STREAMS))
        )
        # Policies at both levels spread the work over all hosts.
        while not all([(await host.dispatcher.load()).num_running for host in hosts]):
            assert not asking.done()
            await asyncio.sleep(0.01)
        os.kill(lower[0].pid, signal.SIGKILL)
        assert await asking == [expected(seed, MAX_TOKENS) for seed in range(NUM_STREAMS)]
        await until_hosts(session, [upper.base_url], NUM_LOWER - 1)
        assert await ask(session, upper.base_url, 7, 20) == expected(7, 20)
        assert await ask(session, lower[1].base_url, 7, 20) == expected(7, 20)


async def _until_blocks(session: aiohttp.ClientSession, base_url: str, count: int) -> None:
    """Waits until a router knows of so many KV blocks of hosts."""
    while True:
        async with session.get(f"{base_url}/v1/load") as response:
            if (await response.json())["num_blocks"] == count:
                return
        await asyncio.sleep(0.05)
