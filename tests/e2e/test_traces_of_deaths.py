# SPDX-License-Identifier: Apache-2.0
"""Processes that are killed, and a disk that is full, while a server traces: answers are complete in any case."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fragment_files import assert_nested, fragments_of, phases_of, read_fragments
from small_disk import cramped_server, missing_for_a_small_disk
from streams import bodies, children, stream_all, until_more

from pagoda.cli.server_process import ServerProcess, server_process

NUM_STREAMS = 16


async def test_a_trace_survives_the_death_of_a_worker_and_of_an_engine(
    plain_url: str, tmp_path: Path
) -> None:
    requests = bodies(NUM_STREAMS, 300)

    async def kill(received: Callable[[], int]) -> None:
        for module in ("pagoda.worker.main", "pagoda.engine.main"):
            await until_more(received, 6 * NUM_STREAMS)
            (worker,) = children(server.pid, "pagoda.worker.main")
            await until_written(tmp_path, worker, "prepare")
            (victim,) = children(server.pid, module)
            if victim != worker:
                await until_written(tmp_path, victim, "recovering")
            os.kill(victim, signal.SIGKILL)
        await until_more(received, 2 * NUM_STREAMS)

    with server_process(["--dtype", "float32", "--profile-dir", str(tmp_path)]) as server:
        await post(server, "start")
        disturbed = await stream_all(server.base_url, requests, kill)
        assert (await post(server, "stop"))["problems"] == []
    assert disturbed == await stream_all(plain_url, requests)

    fragments = read_fragments(tmp_path)
    for fragment in fragments:
        assert_nested(fragment)
    assert len({fragment.header.uid for fragment in fragments}) == len(fragments)
    (frontend,) = fragments_of(tmp_path, "frontend")
    killed, successor = fragments_of(tmp_path, "engine dp0")
    workers = fragments_of(tmp_path, "worker dp0 tp0 pp0")
    assert len(workers) == 3
    for child in (killed, successor):
        assert child.header.parent_uid == frontend.header.uid
    parents = [worker.header.parent_uid for worker in workers]
    assert parents == [killed.header.uid, killed.header.uid, successor.header.uid]

    # The frontend saw all of it.
    answers = frontend.named("request")
    reasons = [event["args"]["finish_reason"] for event in answers]
    assert reasons.count("length") >= NUM_STREAMS
    assert set(reasons) == {"length"}  # also of the streams that run until the kills are done
    assert len(frontend.named("engine lost")) == 1
    moved = {event["args"]["request"] for event in frontend.named("request moved")}
    names = {event["args"]["request"] for event in answers}
    assert moved
    assert moved <= names
    # The engine that was killed had lost its worker before, and had begun to recover.
    (lost,) = killed.named("worker lost")
    assert lost["args"]["reason"] == "the worker was killed by SIGKILL"
    assert killed.named("recovering")
    assert killed.named("step")
    assert all(worker.named("prepare") for worker in workers)
    # Its successor closed its fragment in good order.
    assert not successor.is_cut
    for name in moved:
        assert phases_of(successor, name)[:2] == ["queued", "prefill"]


async def until_written(directory: Path, pid: int, event: str) -> None:
    """Waits until the process has written an event of this name."""
    while not any(
        it.header.pid == pid and any(e["name"] == event for e in it.events)
        for it in read_fragments(directory)
    ):
        await asyncio.sleep(0.05)


async def post(server: ServerProcess, what: str) -> dict[str, Any]:
    async with (
        aiohttp.ClientSession(server.base_url) as session,
        session.post(f"/profile/{what}") as response,
    ):
        assert response.status == 200
        answer: dict[str, Any] = await response.json()
        return answer


async def test_a_full_disk_ends_tracing_and_nothing_else(tmp_path: Path) -> None:
    reason = missing_for_a_small_disk(tmp_path)
    if reason is not None:
        pytest.skip(reason)
    log = tmp_path / "log"
    sim = ["qwen3-0.6b", "--load-format", "dummy", "--executor", "sim", "--profile", "verbose"]
    with cramped_server(tmp_path / "small", log, sim) as server:
        async with aiohttp.ClientSession(server.base_url) as session:
            assert await ask(session, 20) == [("length", 300)] * 20
            async with session.post("/profile/stop") as response:
                assert response.status == 200
                problems = (await response.json())["problems"]
            assert await ask(session, 2) == [("length", 300)] * 2
        fragments = read_fragments(server.traces)
    assert sorted(problem.split(":")[0] for problem in problems) == ["engine dp0", "frontend"]
    assert all("No space left on device" in problem for problem in problems)
    assert log.read_text().count("tracing has stopped") == 2
    assert "Traceback" not in log.read_text()
    # What was written before can be read.
    assert {fragment.header.role for fragment in fragments} == {"engine dp0", "frontend"}
    for fragment in fragments:
        assert_nested(fragment)
    assert any(fragment.is_cut for fragment in fragments)


async def ask(session: aiohttp.ClientSession, count: int) -> list[tuple[str, int]]:
    """Finish reason and number of tokens of as many answers at once."""
    body = {"prompt": "x", "max_tokens": 300, "ignore_eos": True}

    async def one() -> tuple[str, int]:
        async with session.post("/v1/completions", json=body) as response:
            answer = await response.json()
            return answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]

    return list(await asyncio.gather(*(one() for _ in range(count))))
