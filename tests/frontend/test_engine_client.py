"""The engine as a process: started, killed, restarted, drained. With the simulated executor, so without torch."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pagoda.engine.config import EngineConfig
from pagoda.engine.messages import (
    FinishReason,
    GenerateRequest,
    SamplingParams,
    SimConfig,
    TokenChunk,
    WorkerConfig,
)
from pagoda.errors import ConfigError, EngineDeadError, OverloadedError
from pagoda.executor.sim import sim_token
from pagoda.frontend.engine_client import EngineClient

VOCAB_SIZE = 100


def sim_config(**fields: object) -> EngineConfig:
    merged: dict[str, object] = {
        "worker": WorkerConfig(model="sim"),
        "executor": "sim",
        "sim": SimConfig(base_s=0.002, vocab_size=VOCAB_SIZE),
        **fields,
    }
    return EngineConfig(**merged)  # type: ignore[arg-type]


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    client = EngineClient(sim_config())
    await client.start()
    yield client
    await client.close()


def make_request(index: int, max_tokens: int = 40) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"r{index}",
        prompt_token_ids=[index, 1, 2],
        sampling=SamplingParams(seed=index, max_tokens=max_tokens),
    )


def expected(request: GenerateRequest) -> list[int]:
    tokens = [request.prompt_token_ids[-1]]
    for position in range(request.sampling.max_tokens or 0):
        tokens.append(sim_token(request.sampling.seed or 0, position, tokens[-1], VOCAB_SIZE))
    return tokens[1:]


async def collect(client: EngineClient, request: GenerateRequest) -> tuple[list[int], TokenChunk]:
    tokens: list[int] = []
    async for chunk in client.generate(request):
        tokens += chunk.token_ids
        last = chunk
    return tokens, last


async def test_many_requests_at_once(client: EngineClient) -> None:
    requests = [make_request(i) for i in range(50)]
    answers = await asyncio.gather(*(collect(client, request) for request in requests))
    assert [tokens for tokens, _ in answers] == [expected(request) for request in requests]
    assert {last.finish_reason for _, last in answers} == {FinishReason.LENGTH}
    assert (await client.load()).num_running == 0


async def test_requests_survive_the_death_of_the_engine(client: EngineClient) -> None:
    requests = [make_request(i, max_tokens=100) for i in range(20)]
    seen = asyncio.Event()

    async def watch(request: GenerateRequest) -> list[int]:
        tokens: list[int] = []
        async for chunk in client.generate(request):
            tokens += chunk.token_ids
            if len(tokens) > 10:
                seen.set()
        return tokens

    async def kill() -> None:
        await seen.wait()
        assert client.engine_pid is not None
        os.kill(client.engine_pid, signal.SIGKILL)

    *answers, _ = await asyncio.gather(*(watch(request) for request in requests), kill())
    assert answers == [expected(request) for request in requests]
    assert (await client.health()).ready


async def test_a_reader_that_leaves_aborts_its_request(client: EngineClient) -> None:
    stream = client.generate(make_request(1, max_tokens=100_000))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    async with asyncio.timeout(10):
        while (await client.load()).num_running:
            await asyncio.sleep(0)


async def test_abort_ends_the_stream(client: EngineClient) -> None:
    stream = client.generate(make_request(1, max_tokens=100_000))
    await anext(stream)
    await client.abort("r1")
    await client.abort("unknown")
    assert [chunk async for chunk in stream][-1].finish_reason is FinishReason.ABORT


async def test_draining_finishes_what_runs_and_takes_nothing_new(client: EngineClient) -> None:
    running = asyncio.create_task(collect(client, make_request(1)))
    await asyncio.sleep(0)
    draining = asyncio.create_task(client.drain(30))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="shutting down"):
        await collect(client, make_request(2))
    assert (await client.health()).reason == "the server is shutting down"
    await draining
    assert (await running)[0] == expected(make_request(1))


async def test_draining_ends_stragglers(client: EngineClient) -> None:
    running = asyncio.create_task(collect(client, make_request(1, max_tokens=100_000)))
    await asyncio.sleep(0)
    await client.drain(0.01)
    assert (await running)[1].finish_reason is FinishReason.ABORT


async def test_a_full_queue_refuses() -> None:
    client = EngineClient(sim_config(max_num_seqs=1, max_num_waiting=1, sim=SimConfig(base_s=0.02)))
    await client.start()
    answers = await asyncio.gather(
        *(collect(client, make_request(i, max_tokens=3)) for i in range(6)), return_exceptions=True
    )
    assert [type(answer) for answer in answers] == [tuple] * 2 + [OverloadedError] * 4
    await client.close()


async def test_a_restarted_engine_takes_back_all_that_it_had_taken() -> None:
    client = EngineClient(
        sim_config(
            max_num_seqs=1, max_num_waiting=7, sim=SimConfig(base_s=0.01, vocab_size=VOCAB_SIZE)
        )
    )
    await client.start()
    requests = [make_request(i, max_tokens=5) for i in range(8)]
    answers = asyncio.gather(*(collect(client, request) for request in requests))
    while (await client.load()).num_waiting < 7:
        await asyncio.sleep(0)
    assert client.engine_pid is not None
    os.kill(client.engine_pid, signal.SIGKILL)
    assert [tokens for tokens, _ in await answers] == [expected(request) for request in requests]
    await client.close()


async def test_an_engine_that_keeps_dying_is_given_up_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pagoda.frontend.engine_client.MAX_DEATHS_IN_ROW", 1)
    client = EngineClient(sim_config())
    await client.start()
    failed = asyncio.create_task(client.wait_failed())
    running = asyncio.create_task(collect(client, make_request(1, max_tokens=100_000)))
    for _ in range(2):
        while (await client.load()).num_running == 0:
            await asyncio.sleep(0)
        assert client.engine_pid is not None
        os.kill(client.engine_pid, signal.SIGKILL)
        if _ == 0:
            first = client.engine_pid
            while client.engine_pid in (first, None):
                await asyncio.sleep(0.001)
    assert "2 times in a row" in str(await failed)
    with pytest.raises(EngineDeadError, match="2 times in a row"):
        await running
    assert not (await client.health()).ready
    await client.close()


async def test_an_engine_that_cannot_start_again_at_once_is_tried_again() -> None:
    client = EngineClient(sim_config())
    await client.start()
    request = make_request(1, max_tokens=300)
    running = asyncio.create_task(collect(client, request))
    while (await client.load()).num_running == 0:
        await asyncio.sleep(0)
    good = client._config
    client._config = EngineConfig(worker=WorkerConfig(model="/no/such/directory"))
    first = client.engine_pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    while client._deaths_in_row < 2:
        await asyncio.sleep(0.001)
    client._config = good
    assert (await running)[0] == expected(request)
    await client.close()


async def test_too_long_a_directory_for_sockets_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigError, match=r"TMPDIR .* is too long"):
        EngineClient(sim_config())
    assert list(deep.iterdir()) == []


async def test_a_start_that_fails_says_why_and_leaves_nothing() -> None:
    client = EngineClient(EngineConfig(worker=WorkerConfig(model="/no/such/directory")))
    with pytest.raises(ConfigError, match="/no/such/directory"):
        await client.start()
    assert client.engine_pid is None


async def test_after_closing_requests_are_refused_with_the_reason() -> None:
    client = EngineClient(sim_config())
    await client.start()
    pid = client.engine_pid
    assert pid is not None
    await client.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(EngineDeadError, match="closed"):
        await collect(client, make_request(1))
    assert not (await client.health()).ready
