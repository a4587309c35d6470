# SPDX-License-Identifier: Apache-2.0
"""The engine as a process: started, killed, restarted, drained. With the simulated executor, so without torch."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
from fragment_files import assert_nested, phases_of, read_fragments
from virtual_fleet import VOCAB_SIZE, expected, request

from pagoda.errors import ConfigError, EngineDeadError, EngineLostError
from pagoda.fleet import engine_client, engine_restarts
from pagoda.fleet.answer_check import PeerError
from pagoda.fleet.endpoint import ReplicaState
from pagoda.fleet.engine_client import EngineClient
from pagoda.messages.adapters import Adapter
from pagoda.messages.engine_config import EngineConfig, SimConfig
from pagoda.messages.frontend import (
    EngineMessage,
    GenerateRequest,
    HostLeave,
    TokenChunk,
    TokenChunks,
)
from pagoda.messages.tracing import StartTrace
from pagoda.messages.worker_config import WorkerConfig
from pagoda.telemetry.tracer import TraceLevel, Tracer, TraceSession

Answer = tuple[list[int], TokenChunk]


def sim_config(**fields: object) -> EngineConfig:
    merged: dict[str, object] = {
        "worker": WorkerConfig(model="sim"),
        "executor": "sim",
        "sim": SimConfig(base_s=0.002, vocab_size=VOCAB_SIZE),
        **fields,
    }
    return EngineConfig(**merged)  # type: ignore[arg-type]


@pytest.fixture
def tracer() -> Tracer:
    return Tracer("frontend")


@asynccontextmanager
async def started(
    tracer: Tracer | None = None, *, start_timeout_s: float = 300.0, **fields: object
) -> AsyncIterator[EngineClient]:
    client = EngineClient(sim_config(**fields), tracer, start_timeout_s=start_timeout_s)
    try:
        await client.start()
        yield client
    finally:
        await client.close()


@pytest.fixture
async def client(tracer: Tracer) -> AsyncIterator[EngineClient]:
    async with started(tracer) as client:
        yield client


def kill(client: EngineClient, fault: signal.Signals = signal.SIGKILL) -> int:
    """Returns the process id."""
    pid = client.engine_pid
    assert pid is not None
    os.kill(pid, fault)
    return pid


async def until_ready(client: EngineClient) -> None:
    async with asyncio.timeout(20):
        while client.replica.state is not ReplicaState.READY:
            await asyncio.sleep(0.001)


async def until_lost(client: EngineClient) -> None:
    async with asyncio.timeout(20):
        while client.replica.state is ReplicaState.READY:
            await asyncio.sleep(0.001)


async def asking(client: EngineClient, max_tokens: int = 100_000) -> asyncio.Task[Answer]:
    """A request that the engine is computing."""
    running = asyncio.create_task(collect(client, make_request(1, max_tokens)))
    while (await client.replica.load()).num_running == 0:
        await asyncio.sleep(0)
    return running


def assert_gone(pid: int) -> None:
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def make_request(index: int, max_tokens: int = 40) -> GenerateRequest:
    return request(f"r{index}", [index, 1, 2], max_tokens)


async def collect(client: EngineClient, asked: GenerateRequest) -> Answer:
    tokens: list[int] = []
    async for chunk in client.replica.generate(asked):
        tokens += chunk.token_ids
        last = chunk
    return tokens, last


async def test_the_death_of_the_engine_loses_its_requests_and_another_engine_comes(
    client: EngineClient,
) -> None:
    replica = client.replica
    states: list[ReplicaState] = []
    replica.watch(lambda: states.append(replica.state))
    asked = make_request(1, max_tokens=100_000)
    tokens: list[int] = []
    stream = replica.generate(asked)
    while len(tokens) < 10:
        tokens += (await anext(stream)).token_ids
    counted = (await replica.load()).num_generated_tokens
    assert counted >= 10
    kill(client)

    async def rest() -> None:
        async for chunk in stream:
            tokens.extend(chunk.token_ids)

    for lost in (rest(), replica.load(), collect(client, asked)):
        with pytest.raises(EngineLostError):
            await lost
    assert tokens == expected(make_request(1, max_tokens=len(tokens)))
    assert states == [ReplicaState.STARTING]
    assert (await replica.health()).reason == "the engine is restarting"
    await until_ready(client)
    moved = msgspec.structs.replace(
        make_request(1, max_tokens=len(tokens) + 5), output_token_ids=tokens, returns=True
    )
    assert (await collect(client, moved))[0] == expected(moved)[-5:]
    # The counters of the first engine, as far as it has reported them, go on.
    assert (await replica.load()).num_generated_tokens >= counted + 5


async def test_an_engine_that_keeps_dying_is_given_up_and_says_so(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda.fleet.engine_restarts.MAX_DEATHS_IN_ROW", 1)
    failed = asyncio.create_task(client.replica.wait_failed())
    for _ in range(2):
        await until_ready(client)
        kill(client)
        await until_lost(client)
    assert "2 times in a row" in str(await failed)
    with pytest.raises(EngineDeadError, match="2 times in a row"):
        await collect(client, make_request(1))
    assert client.replica.state is ReplicaState.FAILED
    assert not (await client.replica.health()).ready


async def test_engines_that_compute_before_they_die_are_never_given_up(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda.fleet.engine_restarts.MAX_DEATHS_IN_ROW", 1)
    for _ in range(3):
        await until_ready(client)
        stream = client.replica.generate(make_request(1, max_tokens=100_000))
        while not (await anext(stream)).token_ids:
            pass
        kill(client)
        await until_lost(client)
        await stream.aclose()
    await until_ready(client)


async def test_an_engine_that_answers_for_a_moment_and_hangs_then_is_not_stable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long its silence is waited for."""
    monkeypatch.setattr(engine_restarts, "STABLE_S", 0.2)
    monkeypatch.setattr(engine_restarts, "MAX_DEATHS_IN_ROW", 1)
    async with started(engine_timeout_s=0.8) as client:
        failed = asyncio.create_task(client.replica.wait_failed())
        for _ in range(2):
            await until_ready(client)
            kill(client, signal.SIGSTOP)
            await until_lost(client)
        assert "did not answer for 0.8 s (it was stopped), 2 times in a row" in str(await failed)


async def test_an_idle_engine_that_is_stopped_is_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with started(engine_timeout_s=0.8) as client:
        pid = kill(client, signal.SIGSTOP)
        await until_lost(client)
        assert_gone(pid)
        await until_ready(client)
        assert (
            "the engine did not answer for 0.8 s (it was stopped); starting it again" in caplog.text
        )
        assert (await collect(client, make_request(1)))[0] == expected(make_request(1))


async def test_an_idle_engine_that_answers_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked all the time."""
    async with started(engine_timeout_s=0.8) as client:
        pid = client.engine_pid
        reports: list[EngineMessage | HostLeave] = []
        receive = client.replica.receive

        def hear(message: EngineMessage | HostLeave) -> None:
            reports.append(message)
            receive(message)

        monkeypatch.setattr(client.replica, "receive", hear)
        async with asyncio.timeout(20):
            while len(reports) < 5:
                await asyncio.sleep(0.01)
        assert client.engine_pid == pid


async def test_nothing_counts_behind_what_cannot_be(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the answer would go on behind a gap."""
    heard: list[TokenChunks] = []
    receive = client.replica.receive
    process = psutil.Process(client.engine_pid)
    began = process.cpu_times().user

    def hear(message: EngineMessage | HostLeave) -> None:
        if isinstance(message, TokenChunks):
            heard.append(message)
            if len(heard) == 3:
                while process.cpu_times().user < 0.1 + began:
                    time.sleep(0.001)  # more comes meanwhile
                raise PeerError("sent what cannot be")
        receive(message)

    monkeypatch.setattr(client.replica, "receive", hear)
    with pytest.raises(EngineLostError):
        await collect(client, make_request(1, 100_000))
    await until_ready(client)
    assert len(heard) == 3
    assert client.replica.blames_requests


async def test_an_engine_that_is_stopped_while_it_starts_is_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = EngineClient(sim_config(), start_timeout_s=3.0)
    starting = asyncio.create_task(client.start())
    while client.engine_pid is None:
        await asyncio.sleep(0)
    kill(client, signal.SIGSTOP)
    try:
        await starting
        assert (
            "the engine did not answer for 3 s (it was stopped); starting it again" in caplog.text
        )
        assert (await collect(client, make_request(1)))[0] == expected(make_request(1))
    finally:
        await client.close()


async def test_a_caller_that_is_cancelled_in_close_learns_of_it_and_nothing_is_left(
    client: EngineClient,
) -> None:
    pid = kill(client, signal.SIGSTOP)  # the engine does not end when it is asked to
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert_gone(pid)


async def test_an_engine_without_a_socket_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_restarts, "MAX_DEATHS_IN_ROW", 0)
    monkeypatch.setattr(engine_client, "socket_address", lambda *_: "ipc://" + "d" * 200)
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(EngineDeadError, match="could not be started"):
        await EngineClient(sim_config()).start()
    assert {child.pid for child in psutil.Process().children()} == before
    assert "cannot be supervised" not in caplog.text


async def test_too_long_a_directory_for_sockets_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigError, match=r"TMPDIR .* is too long"):
        EngineClient(sim_config())
    assert list(deep.iterdir()) == []


async def test_after_closing_requests_are_refused_with_the_reason(client: EngineClient) -> None:
    pid = client.engine_pid
    assert pid is not None
    await client.close()
    assert_gone(pid)
    with pytest.raises(EngineDeadError, match="closed"):
        await collect(client, make_request(1))
    assert not (await client.replica.health()).ready


# ---- traces


def start_order(directory: Path, num_steps: int | None = None) -> StartTrace:
    session = TraceSession(level=TraceLevel.E2E, directory=str(directory), run="r")
    return StartTrace(session, num_steps)


async def test_an_engine_traces_until_it_is_told_to_stop(
    client: EngineClient, tracer: Tracer, tmp_path: Path
) -> None:
    await collect(client, make_request(0))
    client.start_trace(start_order(tmp_path))
    await collect(client, make_request(1))
    assert await client.stop_trace() == []
    await collect(client, make_request(2))
    (fragment,) = read_fragments(tmp_path)
    assert_nested(fragment)
    assert fragment.header.role == "engine dp0"
    assert phases_of(fragment, "r1") == ["queued", "prefill", "decode"]
    assert len(fragment.named("request")) == 1
    assert fragment.named("send")
    assert fragment.header.parent_uid == tracer.process.uid
    assert fragment.clocks == []  # processes of one host read the same clock
    assert await client.stop_trace() == []


async def test_an_engine_that_is_to_start_traces_its_start(tmp_path: Path) -> None:
    client = EngineClient(sim_config())
    client.start_trace(start_order(tmp_path))
    await client.start()
    try:
        assert await client.stop_trace() == []
        (fragment,) = read_fragments(tmp_path)
        assert len(fragment.named("worker ready")) == 1
    finally:
        await client.close()


async def test_the_next_engine_traces_too(client: EngineClient, tmp_path: Path) -> None:
    client.start_trace(start_order(tmp_path))
    running = asyncio.create_task(collect(client, make_request(0, max_tokens=4000)))
    await until_traced(tmp_path)
    kill(client)
    with pytest.raises(EngineLostError):
        await running
    await until_ready(client)
    await collect(client, make_request(1))
    assert await client.stop_trace() == []
    killed, successor = read_fragments(tmp_path)
    assert killed.header.uid != successor.header.uid
    assert killed.named("step")
    assert phases_of(successor, "r1") == ["queued", "prefill", "decode"]
    for fragment in (killed, successor):
        assert_nested(fragment)


async def until_traced(directory: Path) -> None:
    """Until a step has been written."""
    async with asyncio.timeout(20):
        while not any(fragment.named("step") for fragment in read_fragments(directory)):
            await asyncio.sleep(0.01)


async def test_an_engine_stops_by_itself_after_so_many_steps(
    client: EngineClient, tmp_path: Path
) -> None:
    client.start_trace(start_order(tmp_path, num_steps=3))
    await collect(client, make_request(0))
    async with asyncio.timeout(20):
        await client.trace_ended()
    (fragment,) = read_fragments(tmp_path)
    # Both steps that are in flight may end in the turn in which the third step is counted.
    assert len(fragment.named("update")) in (3, 4)
    assert await client.stop_trace() == []


async def test_an_engine_that_does_not_answer_is_not_waited_for(
    client: EngineClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "_TRACE_END_S", 0.05)
    client.start_trace(start_order(tmp_path))
    pid = kill(client, signal.SIGSTOP)
    try:
        assert await client.stop_trace() == [
            "the engine has not closed its fragment within 0.05 s."
        ]
    finally:
        os.kill(pid, signal.SIGCONT)


# ---- what an engine owes when it dies

ADAPTER = Adapter(name="a", path="/nowhere", digest="d")


async def test_an_adapter_that_a_dying_engine_owes_is_asked_of_the_next_one(
    client: EngineClient,
) -> None:
    kill(client, signal.SIGSTOP)
    loading = asyncio.create_task(client.load_adapter(ADAPTER))
    await asyncio.sleep(0)
    kill(client)
    async with asyncio.timeout(20):
        await loading


async def test_nothing_waits_for_an_engine_that_was_given_up(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engine_restarts, "MAX_DEATHS_IN_ROW", 0)
    kill(client, signal.SIGSTOP)
    client.start_trace(start_order(tmp_path))
    owed = [client.load_adapter(ADAPTER), client.replica.load(), collect(client, make_request(1))]
    waiting = [asyncio.ensure_future(one) for one in (*owed, client.trace_ended())]
    await asyncio.sleep(0)
    kill(client)
    async with asyncio.timeout(20):
        adapter, load, answer, trace = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(adapter, EngineDeadError)
        assert isinstance(load, EngineLostError)
        assert isinstance(answer, EngineLostError)
        assert trace is None
        await client.replica.abort("r1")
        for late in (client.load_adapter(ADAPTER), client.replica.load()):
            with pytest.raises(EngineDeadError):
                await late
        client.start_trace(start_order(tmp_path))
        await client.trace_ended()
        assert await client.stop_trace() == []
