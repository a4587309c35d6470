"""A router knows what engines behind a host have cached. Real processes and sockets, made-up tokens."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

from linked_hosts import Host, Router, routed, until

from pagoda.engine.config import EngineConfig, SimConfig
from pagoda.frontend.dispatcher import Dispatcher
from pagoda.frontend.engine_client import EngineClient
from pagoda.frontend.fleet import Fleet
from pagoda.frontend.prefix_index import PrefixIndex, short_keys
from pagoda.kv.block_keys import prefix_keys
from pagoda.messages.frontend import GenerateRequest
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker_config import WorkerConfig
from pagoda.parallel.config import ParallelConfig

SIZE = 4
CONFIG = EngineConfig(
    worker=WorkerConfig(model="sim", parallel=ParallelConfig(data_parallel_size=2)),
    executor="sim",
    sim=SimConfig(num_blocks=64, block_size=SIZE, max_model_len=64, vocab_size=50),
)


@asynccontextmanager
async def host_of_two() -> AsyncIterator[tuple[Dispatcher, Host]]:
    engines = Fleet.of_engines(CONFIG, "round-robin").dispatcher
    await engines.start()
    host = Host(engines)
    try:
        yield engines, host
    finally:
        await host.close()
        await engines.close()


async def follow(host: Host, router: Router) -> PrefixIndex:
    """What a router knows of a host that joins it."""
    host.join(router)
    await router.until_hosts(1)
    index = PrefixIndex(100)
    router.dispatcher.subscribe_cache(index.apply)
    return index


async def ask(dispatcher: Dispatcher, token: int) -> set[int]:
    """Short keys of the blocks of a prompt that has been answered."""
    prompt = [token] * 17
    sampling = SamplingParams(seed=1, max_tokens=1)
    asked = GenerateRequest(request_id=f"r{token}", prompt_token_ids=prompt, sampling=sampling)
    async for _ in dispatcher.generate(asked):
        pass
    return set(short_keys(prefix_keys(prompt, SIZE, None, 100)))


async def test_a_router_sees_a_host_of_two_replicas_as_one() -> None:
    async with host_of_two() as (engines, host), routed() as router:
        first = await ask(engines, 1)
        index = await follow(host, router)
        await until(lambda: index.told == first)
        second = await ask(router.dispatcher, 2)
        await until(lambda: index.told == first | second)
        one = cast(EngineClient, engines.replicas[0].transport)
        assert one.engine_pid is not None
        os.kill(one.engine_pid, signal.SIGKILL)
        await until(lambda: index.told == second)


async def test_a_host_stops_telling_a_router_that_is_gone() -> None:
    async with host_of_two() as (engines, host):
        async with routed() as router:
            await follow(host, router)
            await until(lambda: engines.is_subscribed)
        async with asyncio.timeout(20):
            # The router is known to be gone when something cannot be sent to it.
            tokens = itertools.count(3)
            while engines.is_subscribed:
                await ask(engines, next(tokens) % 50)
