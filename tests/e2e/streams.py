"""Many clients that read streams over HTTP while something happens to the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil

import pagoda

HELD_OUT = Path(pagoda.__file__).parent / "checkpoints" / "pagoda_tiny" / "heldout.jsonl"

Disturb = Callable[[Callable[[], int]], Awaitable[None]]
"""Harms the server; the argument returns the number of events that have arrived so far."""


def bodies(
    count: int, max_tokens: int, temperature: float = 1.0, skill: str | None = None
) -> list[dict[str, Any]]:
    """Requests, each with a seed of its own: half of them greedy, half sampled at `temperature`.

    `skill` names the kind of question; by default they are of all kinds.
    """
    questions = [json.loads(line) for line in HELD_OUT.read_text().splitlines()]
    questions = [question for question in questions if skill in (None, question["skill"])]
    step = len(questions) // count
    return [
        {
            "model": "pagoda-tiny",
            "messages": question["messages"],
            "temperature": [0, temperature][index % 2],
            "seed": index,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        for index, question in enumerate(questions[::step][:count])
    ]


async def stream_all(
    base_url: str, requests: list[dict[str, object]], disturb: Disturb | None = None
) -> list[tuple[str, str]]:
    """Returns text and finish reason of each; streams must still run when `disturb` has done its work."""
    texts: list[list[str]] = [[] for _ in requests]
    async with aiohttp.ClientSession(base_url, connector=aiohttp.TCPConnector(limit=0)) as session:
        streams = asyncio.gather(
            *(_stream(session, body, text) for body, text in zip(requests, texts, strict=True))
        )
        if disturb is not None:
            try:
                await disturb(lambda: sum(map(len, texts)))
                assert not streams.done()
            except BaseException:
                streams.cancel()
                await asyncio.gather(streams, return_exceptions=True)
                raise
        reasons = await streams
    return [("".join(text), reason) for text, reason in zip(texts, reasons, strict=True)]


async def _stream(
    session: aiohttp.ClientSession, body: dict[str, object], received: list[str]
) -> str:
    """Returns the finish reason, and appends the text piece by piece to `received`."""
    reason = ""
    async with session.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            (choice,) = json.loads(line[6:])["choices"]
            delta = choice["delta"]
            received.append((delta.get("content") or "") + (delta.get("reasoning_content") or ""))
            reason = choice["finish_reason"] or reason
    return reason


async def until_more(received: Callable[[], int], count: int) -> None:
    """Waits for `count` more events."""
    before = received()
    while received() < before + count:
        await asyncio.sleep(0.01)


def children(server_pid: int, module: str) -> list[int]:
    """Process ids of a server's engines or workers, in the order in which they were started."""
    running = [
        process
        for process in psutil.Process(server_pid).children(recursive=True)
        if module in process.cmdline()
    ]
    return [process.pid for process in sorted(running, key=psutil.Process.create_time)]
