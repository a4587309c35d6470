"""A router knows what engines behind a host have cached. Real processes and sockets, made-up tokens."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

import zmq

from pagoda.engine.config import EngineConfig, SimConfig
from pagoda.frontend.dispatcher import Dispatcher
from pagoda.frontend.engine_client import EngineClient
from pagoda.frontend.fleet import Fleet
from pagoda.frontend.host_client import HostClient, Identity
from pagoda.frontend.host_server import HostServer
from pagoda.frontend.policies import POLICIES
from pagoda.frontend.prefix_index import PrefixIndex, short_keys
from pagoda.frontend.replica import Replica
from pagoda.ipc.curve import keys_of, start_authenticator
from pagoda.kv.block_keys import prefix_keys
from pagoda.messages.frontend import GenerateRequest
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker_config import WorkerConfig
from pagoda.parallel.config import ParallelConfig

SIZE = 4
KEYS = keys_of(b"a secret of all hosts and routers")
HOST = Identity("host", "m", "digest", is_router=False)
ROUTER = Identity("router", "m", "digest", is_router=True)


def config() -> EngineConfig:
    return EngineConfig(
        worker=WorkerConfig(model="sim", parallel=ParallelConfig(data_parallel_size=2)),
        executor="sim",
        sim=SimConfig(num_blocks=64, block_size=SIZE, max_model_len=64, vocab_size=50),
    )


class Pair:
    """A host of two replicas, and the router's side of the connection to it."""

    def __init__(self, host: Dispatcher, door: HostServer, context: zmq.Context) -> None:
        self.host = host
        self.door = door
        self.context = context

    async def dial(self) -> Replica:
        address = f"tcp://127.0.0.1:{self.door.port}"
        remote = HostClient(self.context, address, KEYS, ROUTER).replica
        await remote.start()
        return remote


@asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    context = zmq.Context()
    start_authenticator(context, KEYS)
    host = Fleet.of_engines(config(), "round-robin").dispatcher
    await host.start()
    door = HostServer(host, context, "tcp://127.0.0.1:*", KEYS, HOST)
    try:
        yield Pair(host, door, context)
    finally:
        await door.close()
        await host.close()
        context.term()


async def ask(dispatcher: Dispatcher, prompt: list[int]) -> None:
    sampling = SamplingParams(seed=1, max_tokens=1)
    request = GenerateRequest(
        request_id=f"r{prompt[0]}", prompt_token_ids=prompt, sampling=sampling
    )
    async for _ in dispatcher.generate(request):
        pass


def blocks_of(prompt: list[int]) -> set[int]:
    return set(short_keys(prefix_keys(prompt, SIZE, None, 100)))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_router_sees_a_host_of_two_replicas_as_one() -> None:
    async with pair() as it:
        first, second = [1] * 17, [2] * 17
        await ask(it.host, first)
        remote = await it.dial()
        router = Dispatcher([], POLICIES["prefix-affinity"])
        router.add(remote)
        index = PrefixIndex(100)
        router.subscribe_cache(index.apply)
        await until(lambda: index.told == blocks_of(first))
        await ask(router, second)
        await until(lambda: index.told == blocks_of(first) | blocks_of(second))
        one = cast(EngineClient, it.host.replicas[0].transport)
        assert one.engine_pid is not None
        os.kill(one.engine_pid, signal.SIGKILL)
        await until(lambda: index.told == blocks_of(second))
        await router.close()


async def test_a_host_stops_telling_a_router_that_is_gone() -> None:
    async with pair() as it:
        remote = await it.dial()
        index = PrefixIndex(100)
        remote.subscribe_cache(index.apply)
        await until(lambda: index.num_updates > 0)
        assert it.host.is_subscribed
        await remote.close()
        async with asyncio.timeout(20):
            # It is known to be gone when something cannot be sent to it.
            for token in itertools.count(3):
                await ask(it.host, [token % 50] * 9)
                if not it.host.is_subscribed:
                    return
