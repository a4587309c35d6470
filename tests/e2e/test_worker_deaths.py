"""SIGKILL for the worker, five times, while 32 clients read streams over HTTP: they see a pause, nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import aiohttp
import psutil

import pagoda
from pagoda.cli.server_process import server_process

HELD_OUT = Path(pagoda.__file__).parent / "models" / "pagoda_tiny" / "heldout.jsonl"
NUM_STREAMS = 32
NUM_KILLS = 5


def bodies() -> list[dict[str, object]]:
    questions = [json.loads(line) for line in HELD_OUT.read_text().splitlines()]
    step = len(questions) // NUM_STREAMS
    return [
        {
            "model": "pagoda-tiny",
            "messages": question["messages"],
            "temperature": [0, 1.0][index % 2],
            "seed": index,
            "max_tokens": 160,
            "ignore_eos": True,
            "stream": True,
        }
        for index, question in enumerate(questions[::step][:NUM_STREAMS])
    ]


async def stream(
    session: aiohttp.ClientSession, body: dict[str, object], received: list[str]
) -> str:
    """The finish reason; the text goes piece by piece into `received`."""
    reason = ""
    async with session.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            (choice,) = json.loads(line[6:])["choices"]
            delta = choice["delta"]
            received.append((delta.get("content") or "") + (delta.get("reasoning_content") or ""))
            reason = choice["finish_reason"] or reason
    return reason


def worker_pid(server_pid: int) -> int | None:
    for process in psutil.Process(server_pid).children(recursive=True):
        if "pagoda.worker.main" in process.cmdline():
            return process.pid
    return None


async def kill_the_worker(server_pid: int, texts: list[list[str]]) -> None:
    """Five times, each time after every stream that still runs could have moved on."""
    for _ in range(NUM_KILLS):
        before = sum(map(len, texts))
        while sum(map(len, texts)) < before + 4 * NUM_STREAMS:
            await asyncio.sleep(0.01)
        pid = worker_pid(server_pid)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)


async def run_all(base_url: str, kill_under: int | None) -> list[tuple[str, str]]:
    texts: list[list[str]] = [[] for _ in range(NUM_STREAMS)]
    async with aiohttp.ClientSession(base_url) as session:
        streams = asyncio.gather(
            *(stream(session, body, text) for body, text in zip(bodies(), texts, strict=True))
        )
        if kill_under is not None:
            await kill_the_worker(kill_under, texts)
            assert not streams.done()
        reasons = await streams
        if kill_under is not None:
            async with session.get("/v1/load") as response:
                assert (await response.json())["num_worker_restarts"] == NUM_KILLS
    return [("".join(text), reason) for text, reason in zip(texts, reasons, strict=True)]


async def test_32_streams_survive_five_kills_token_for_token() -> None:
    with server_process(["--dtype", "float32"]) as server:
        undisturbed = await run_all(server.base_url, None)
        disturbed = await run_all(server.base_url, server.pid)
    assert disturbed == undisturbed
    assert {reason for _, reason in disturbed} == {"length"}
