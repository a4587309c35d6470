# SPDX-License-Identifier: Apache-2.0
"""Replicas as processes behind a dispatcher: killed, restarted, refused at the start. With made-up tokens."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import msgspec
import psutil
import pytest
from test_engine_client import kill as kill_engine
from test_engine_client import make_request, sim_config
from virtual_fleet import VOCAB_SIZE, expected

from pagoda.errors import ConfigError, EngineDeadError, OverloadedError
from pagoda.fleet import engine_client
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.fleet.endpoint import ReplicaState
from pagoda.fleet.engine_client import EngineClient
from pagoda.fleet.fleet import Fleet, replicas_of
from pagoda.fleet.policies import POLICIES
from pagoda.messages.engine_config import EngineConfig, SimConfig
from pagoda.messages.frontend import FinishReason, GenerateRequest
from pagoda.messages.worker_config import WorkerConfig
from pagoda.parallel.config import ParallelConfig, RankPlace

Answer = tuple[list[int], FinishReason | None]


def replicated(count: int, **fields: object) -> EngineConfig:
    worker = WorkerConfig(model="sim", parallel=ParallelConfig(data_parallel_size=count))
    return sim_config(worker=worker, **fields)


@asynccontextmanager
async def fleet(count: int, **fields: object) -> AsyncIterator[Dispatcher]:
    dispatcher = Fleet.of_engines(replicated(count, **fields), "least-pending-tokens").dispatcher
    await dispatcher.start()
    try:
        yield dispatcher
    finally:
        await dispatcher.close()


def client_of(dispatcher: Dispatcher, index: int) -> EngineClient:
    return cast(EngineClient, dispatcher.replicas[index].transport)


def kill(dispatcher: Dispatcher, index: int, fault: signal.Signals = signal.SIGKILL) -> int:
    return kill_engine(client_of(dispatcher, index), fault)


async def collect(dispatcher: Dispatcher, request: GenerateRequest) -> Answer:
    tokens: list[int] = []
    reason = None
    async for chunk in dispatcher.generate(request):
        tokens += chunk.token_ids
        reason = chunk.finish_reason
    return tokens, reason


async def until_running(dispatcher: Dispatcher, count: int = 1) -> None:
    while (await dispatcher.load()).num_running < count:
        await asyncio.sleep(0.001)


def assert_settled(dispatcher: Dispatcher) -> None:
    count = len(dispatcher.replicas)
    assert [slot.work.pending_tokens for slot in dispatcher.slots] == [0] * count
    assert not any(slot.requests for slot in dispatcher.slots)


def test_each_replica_knows_its_place() -> None:
    places = [config.worker.place for config in replicas_of(replicated(3))]
    assert places == [RankPlace(dp=0), RankPlace(dp=1), RankPlace(dp=2)]


async def test_both_replicas_work_and_their_figures_add_up() -> None:
    sim = SimConfig(base_s=0.01, vocab_size=VOCAB_SIZE)
    async with fleet(2, max_num_seqs=8, max_num_waiting=100, sim=sim) as dispatcher:
        limits = dispatcher.limits
        assert (limits.max_num_seqs, limits.max_num_waiting) == (16, 200)
        assert limits.num_blocks == 2 * SimConfig().num_blocks
        assert limits.summary == "2 replicas, each simulated worker"
        requests = [make_request(i) for i in range(50)]
        answers = asyncio.gather(*(collect(dispatcher, request) for request in requests))
        await until_running(dispatcher, 16)
        load = await dispatcher.load()
        assert [replica.state for replica in load.replicas] == ["ready", "ready"]
        assert [replica.num_requests for replica in load.replicas] == [25, 25]
        assert all(replica.report and replica.report.num_running == 8 for replica in load.replicas)
        assert [tokens for tokens, _ in await answers] == [expected(r) for r in requests]
        assert_settled(dispatcher)


@pytest.mark.parametrize(
    ("count", "num_streams", "fault"),
    [
        (1, 100, signal.SIGKILL),
        (2, 100, signal.SIGKILL),
        (1, 32, signal.SIGSTOP),
        (2, 32, signal.SIGSTOP),
    ],
)
async def test_streams_survive_an_engine_that_dies_or_hangs(
    count: int, num_streams: int, fault: signal.Signals
) -> None:
    sim = SimConfig(base_s=0.005, vocab_size=VOCAB_SIZE)
    async with fleet(count, sim=sim, engine_timeout_s=1.0) as dispatcher:
        requests = [make_request(i, max_tokens=60) for i in range(num_streams)]
        answers = asyncio.gather(*(collect(dispatcher, request) for request in requests))
        await until_running(dispatcher, num_streams)
        pid = kill(dispatcher, 0, fault)
        assert await answers == [(expected(request), FinishReason.LENGTH) for request in requests]
        assert not psutil.pid_exists(pid)
        assert_settled(dispatcher)
        while dispatcher.replicas[0].state is not ReplicaState.READY:
            await asyncio.sleep(0.001)
        assert (await dispatcher.health()).ready


async def test_a_restarted_engine_takes_back_all_that_it_had_taken() -> None:
    sim = SimConfig(base_s=0.01, vocab_size=VOCAB_SIZE)
    async with fleet(1, max_num_seqs=1, max_num_waiting=7, sim=sim) as dispatcher:
        requests = [make_request(i, max_tokens=5) for i in range(8)]
        answers = asyncio.gather(*(collect(dispatcher, request) for request in requests))
        while (await dispatcher.load()).num_waiting < 7:
            await asyncio.sleep(0)
        kill(dispatcher, 0)
        assert [tokens for tokens, _ in await answers] == [expected(r) for r in requests]


async def test_while_no_engine_runs_only_so_many_requests_wait() -> None:
    async with fleet(1, max_num_seqs=1, max_num_waiting=1) as dispatcher:
        kill(dispatcher, 0)
        while dispatcher.replicas[0].state is ReplicaState.READY:
            await asyncio.sleep(0)
        answers = await asyncio.gather(
            *(collect(dispatcher, make_request(i, max_tokens=3)) for i in range(4)),
            return_exceptions=True,
        )
        assert [type(answer) for answer in answers] == [tuple] * 2 + [OverloadedError] * 2


async def test_a_replica_that_is_given_up_leaves_the_others_and_the_last_one_ends_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pagoda.fleet.engine_restarts.MAX_DEATHS_IN_ROW", 0)
    async with fleet(2) as dispatcher:
        kill(dispatcher, 0)
        while dispatcher.replicas[0].state is not ReplicaState.FAILED:
            await asyncio.sleep(0.001)
        request = make_request(1)
        assert (await collect(dispatcher, request))[0] == expected(request)
        running = asyncio.create_task(collect(dispatcher, make_request(2, max_tokens=100_000)))
        await until_running(dispatcher)
        kill(dispatcher, 1)
        reason = str(await dispatcher.wait_failed())
        assert reason.startswith("replica 1: The engine was killed by SIGKILL")
        with pytest.raises(EngineDeadError, match="replica 1: "):
            await running
        with pytest.raises(EngineDeadError):
            await collect(dispatcher, make_request(3))
        assert not (await dispatcher.health()).ready
        assert_settled(dispatcher)


async def test_an_engine_that_cannot_start_again_at_once_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with fleet(1) as dispatcher:
        client = client_of(dispatcher, 0)
        request = make_request(1, max_tokens=300)
        running = asyncio.create_task(collect(dispatcher, request))
        await until_running(dispatcher)
        with monkeypatch.context() as patch:
            patch.setattr(engine_client, "socket_address", lambda *_: "ipc://" + "d" * 200)
            kill(dispatcher, 0)
            while client.restarts.num_in_row < 2:
                await asyncio.sleep(0.001)
        assert (await running)[0] == expected(request)


@pytest.mark.parametrize(("count", "prefix"), [(1, "(?!replica)"), (4, "replica 3: ")])
async def test_a_replica_that_cannot_start_ends_all(count: int, prefix: str) -> None:
    configs = replicas_of(replicated(count))
    broken = msgspec.structs.replace(
        configs[-1].worker, model="/no/such/directory", load_format="auto"
    )
    configs[-1] = EngineConfig(worker=broken)
    before = _children()
    dispatcher = Dispatcher(
        [EngineClient(config).replica for config in configs], POLICIES["round-robin"]
    )
    with pytest.raises(ConfigError, match=f"^{prefix}.*/no/such/directory"):
        await dispatcher.start()
    assert _children() == before


async def test_draining_finishes_what_runs_also_when_an_engine_dies_meanwhile() -> None:
    async with fleet(2, sim=SimConfig(base_s=0.01, vocab_size=VOCAB_SIZE)) as dispatcher:
        requests = [make_request(i) for i in range(4)]
        running = asyncio.gather(*(collect(dispatcher, request) for request in requests))
        await until_running(dispatcher, 4)
        draining = asyncio.create_task(dispatcher.drain(60))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="shutting down"):
            await collect(dispatcher, make_request(9))
        kill(dispatcher, 0)
        await draining
        assert [tokens for tokens, _ in await running] == [expected(r) for r in requests]


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}
