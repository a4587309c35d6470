# SPDX-License-Identifier: Apache-2.0
"""A router knows what engines behind a host have cached. Real processes and sockets, made-up tokens."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

from linked_hosts import Host, until
from virtual_fleet import engine_config, request

from pagoda.fleet.dispatcher import Dispatcher
from pagoda.fleet.engine_client import EngineClient
from pagoda.fleet.fleet import Fleet
from pagoda.fleet.policies import POLICIES
from pagoda.fleet.prefix_index import PrefixIndex, short_keys
from pagoda.kv.block_keys import prefix_keys
from pagoda.messages.engine_config import EngineConfig
from pagoda.messages.worker_config import WorkerConfig
from pagoda.parallel.config import ParallelConfig

SIZE = 4


def config() -> EngineConfig:
    worker = WorkerConfig(model="sim", parallel=ParallelConfig(data_parallel_size=2))
    return engine_config(worker=worker, vocab_size=50)


@asynccontextmanager
async def host_of_two() -> AsyncIterator[tuple[Dispatcher, Host]]:
    """A dispatcher of two replicas, and the host that routers reach it at."""
    dispatcher = Fleet.of_engines(config(), "round-robin").dispatcher
    await dispatcher.start()
    try:
        async with Host(dispatcher) as host:
            yield dispatcher, host
    finally:
        await dispatcher.close()


async def ask(dispatcher: Dispatcher, prompt: list[int]) -> None:
    async for _ in dispatcher.generate(request(f"r{prompt[0]}", prompt, max_tokens=1)):
        pass


def blocks_of(prompt: list[int]) -> set[int]:
    return set(short_keys(prefix_keys(prompt, SIZE, None, 100)))


async def test_a_router_sees_a_host_of_two_replicas_as_one() -> None:
    async with host_of_two() as (dispatcher, host):
        first, second = [1] * 17, [2] * 17
        await ask(dispatcher, first)
        remote = (await host.dial()).replica
        router = Dispatcher([], POLICIES["prefix-affinity"])
        router.add(remote)
        index = PrefixIndex(100)
        router.subscribe_cache(index.apply)
        await until(lambda: index.told == blocks_of(first))
        await ask(router, second)
        await until(lambda: index.told == blocks_of(first) | blocks_of(second))
        one = cast(EngineClient, dispatcher.replicas[0].transport)
        assert one.engine_pid is not None
        os.kill(one.engine_pid, signal.SIGKILL)
        await until(lambda: index.told == blocks_of(second))
        await router.close()


async def test_a_host_stops_telling_a_router_that_is_gone() -> None:
    async with host_of_two() as (dispatcher, host):
        remote = (await host.dial()).replica
        index = PrefixIndex(100)
        remote.subscribe_cache(index.apply)
        await until(lambda: index.num_updates > 0)
        assert dispatcher.slots.is_subscribed
        await remote.close()
        async with asyncio.timeout(20):
            # It is known to be gone when something cannot be sent to it.
            for token in itertools.count(3):
                await ask(dispatcher, [token % 50] * 9)
                if not dispatcher.slots.is_subscribed:
                    return
