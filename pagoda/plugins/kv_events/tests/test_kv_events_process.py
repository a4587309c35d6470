# SPDX-License-Identifier: Apache-2.0
"""Engine processes publish what their caches hold. With made-up tokens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import cast

import pytest
from kv_subscriber import (
    ClearedOnTheWire,
    RemovedOnTheWire,
    StoredOnTheWire,
    Subscriber,
)
from ports import free_ports

from pagoda.errors import ConfigError
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.fleet.engine_client import EngineClient
from pagoda.fleet.fleet import Fleet
from pagoda.kv.block_keys import prefix_keys
from pagoda.llm.llm import LLM
from pagoda.messages.engine_config import EngineConfig, SimConfig
from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker_config import WorkerConfig
from pagoda.parallel.config import ParallelConfig

SIZE = 4
PROMPT = list(range(100, 117))
"""Four full blocks and the first token of another."""


def config(port: int, num_replicas: int = 1, num_blocks: int = 64) -> EngineConfig:
    parallel = ParallelConfig(data_parallel_size=num_replicas)
    return EngineConfig(
        worker=WorkerConfig(model="sim", parallel=parallel),
        executor="sim",
        sim=SimConfig(num_blocks=num_blocks, block_size=SIZE, max_model_len=64, vocab_size=50),
        kv_events=f"tcp://127.0.0.1:{port}",
    )


Subscribe = Callable[[int, int], Subscriber]


@asynccontextmanager
async def running(port: int, **settings: int) -> AsyncIterator[Dispatcher]:
    dispatcher = Fleet.of_engines(config(port, **settings), "round-robin").dispatcher
    await dispatcher.start()
    try:
        yield dispatcher
    finally:
        await dispatcher.close()


@pytest.fixture
def subscribe() -> Iterator[Subscribe]:
    with contextlib.ExitStack() as opened:
        yield lambda *ports: opened.enter_context(contextlib.closing(Subscriber(*ports)))


@pytest.fixture
def port() -> int:
    """The first of two free ports."""
    return free_ports(2)[0]


@pytest.fixture
def subscriber(subscribe: Subscribe, port: int) -> Subscriber:
    return subscribe(port, port + 1)


async def answer(
    dispatcher: Dispatcher, request_id: str, prompt: list[int], salt: str | None = None
) -> None:
    request = GenerateRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        work=Work(SamplingParams(seed=1, max_tokens=2)),
        cache_salt=salt,
    )
    async for _ in dispatcher.generate(request):
        pass


async def until(subscriber: Subscriber, num_cached: int) -> None:
    """Listens until so many blocks are cached. The first time round it asks for what went before."""
    async with asyncio.timeout(60):
        while len(subscriber.view.keys) != num_cached:
            await asyncio.to_thread(subscriber.replay)


async def test_a_prefix_is_stored_once(port: int, subscriber: Subscriber) -> None:
    async with running(port) as dispatcher:
        await answer(dispatcher, "a", PROMPT)
        await until(subscriber, 4)
        assert isinstance(subscriber.events[0], ClearedOnTheWire)
        first = subscriber.events[1:]
        assert all(isinstance(event, StoredOnTheWire) for event in first)
        assert [t for event in first for t in event.token_ids] == PROMPT[:16]  # type: ignore[union-attr]
        keys = prefix_keys(PROMPT, SIZE, None, 4)
        assert subscriber.view.keys == set(keys)

        await answer(dispatcher, "b", PROMPT)
        await answer(dispatcher, "c", [*PROMPT[:8], *range(200, 205)])
        await until(subscriber, 5)
        [last] = subscriber.events[1 + len(first) :]
        assert isinstance(last, StoredOnTheWire)
        assert (last.parent_block_hash, last.token_ids) == (keys[1], list(range(200, 204)))

        await answer(dispatcher, "d", PROMPT, salt="tenant-a")
        await until(subscriber, 9)
        assert subscriber.view.keys > set(prefix_keys(PROMPT, SIZE, "tenant-a", 4))
        report = await dispatcher.load()
        assert (report.num_blocks_stored, report.num_blocks_removed) == (9, 0)


async def test_evicted_blocks_are_removed(port: int, subscriber: Subscriber) -> None:
    async with running(port, num_blocks=16) as dispatcher:
        for index in range(10):
            await answer(dispatcher, f"r{index}", [index, *PROMPT])
        report = await dispatcher.load()
        assert report.num_blocks_stored == 40
        assert report.num_blocks_removed >= 24
        await until(subscriber, report.num_blocks_stored - report.num_blocks_removed)
        assert any(isinstance(event, RemovedOnTheWire) for event in subscriber.events)


async def test_subscribers_are_told_without_asking(port: int, subscriber: Subscriber) -> None:
    async with running(port) as dispatcher:
        index = 0
        while not await asyncio.to_thread(subscriber.receive, 0.05):
            await answer(dispatcher, f"r{index}", [index, *PROMPT])
            index += 1
            assert index < 100
        num_replays = subscriber.num_replays
        await answer(dispatcher, "last", [99, *PROMPT])
        while prefix_keys([99, *PROMPT], SIZE, None, 4)[-1] not in subscriber.view.keys:
            assert await asyncio.to_thread(subscriber.receive)
        assert subscriber.num_replays == num_replays


async def test_the_next_engine_begins_with_nothing_cached(
    port: int, subscriber: Subscriber, subscribe: Subscribe
) -> None:
    async with running(port) as dispatcher:
        await answer(dispatcher, "a", PROMPT)
        await until(subscriber, 4)
        pid = cast(EngineClient, dispatcher.replicas[0].transport).engine_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await answer(dispatcher, "b", [1, *PROMPT[:8]])
        subscriber.close()
        fresh = subscribe(port, port + 1)  # a request on the old connection could be lost with it
        fresh.last_number, fresh.view = subscriber.last_number, subscriber.view
        await until(fresh, 2)
        assert isinstance(fresh.events[0], ClearedOnTheWire)
        assert fresh.view.keys == set(prefix_keys([1, *PROMPT[:8]], SIZE, None, 2))


async def test_every_replica_has_ports_of_its_own(subscribe: Subscribe) -> None:
    port = free_ports(4)[0]
    async with running(port, num_replicas=2) as dispatcher:
        for index in range(2):
            await answer(dispatcher, f"r{index}", [index, *PROMPT])
        for replica in range(2):
            subscriber = subscribe(port + replica, port + 2 + replica)
            await until(subscriber, 4)
            assert subscriber.view.ranks == {replica}
            assert subscriber.view.keys == set(prefix_keys([replica, *PROMPT], SIZE, None, 4))
        report = await dispatcher.load()
        assert report.num_blocks_stored == 8
        assert [own.report and own.report.num_blocks_stored for own in report.replicas] == [4, 4]


async def test_a_taken_port_is_the_reason_of_a_start_that_fails() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        client = EngineClient(config(port))
        with pytest.raises(
            ConfigError, match=f"^--kv-events needs port {port} of 127.0.0.1, which"
        ):
            await client.start()


def test_an_llm_publishes_too(port: int, subscriber: Subscriber) -> None:
    options = {"executor": "sim", "num_kv_blocks": 64, "block_size": SIZE, "max_model_len": 64}
    address = f"tcp://127.0.0.1:{port}"
    with LLM(kv_events=address, **options) as llm:
        llm.generate({"prompt_token_ids": PROMPT})
        subscriber.replay()
        assert subscriber.view.keys >= set(prefix_keys(PROMPT, SIZE, None, 4))
        with pytest.raises(ConfigError, match="which is taken; name another"):
            LLM(kv_events=address, **options)
