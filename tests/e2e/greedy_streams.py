"""Streams over HTTP whose tokens must not depend on what happens meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp

import pagoda

HELD_OUT = Path(pagoda.__file__).parent / "checkpoints" / "pagoda_tiny" / "heldout.jsonl"

Disturbance = Callable[[aiohttp.ClientSession], Awaitable[None]]


async def stream_all(
    base_url: str, num_streams: int, max_tokens: int, disturb: Disturbance | None = None
) -> list[str]:
    """The texts of so many greedy answers of a fixed length; `disturb` is called when all have begun.

    It must be done before the first answer is.
    """
    pieces: list[list[str]] = [[] for _ in range(num_streams)]
    async with aiohttp.ClientSession(base_url) as session:
        streams = [
            asyncio.create_task(_stream(session, body, received))
            for body, received in zip(_bodies(num_streams, max_tokens), pieces, strict=True)
        ]
        if disturb is not None:
            while not all(pieces):
                await asyncio.sleep(0.01)
                for stream in streams:
                    if stream.done():
                        stream.result()
            await disturb(session)
            assert not any(stream.done() for stream in streams)
        assert await asyncio.gather(*streams) == ["length"] * num_streams
    return ["".join(received) for received in pieces]


def _bodies(num_streams: int, max_tokens: int) -> list[dict[str, object]]:
    questions = [json.loads(line) for line in HELD_OUT.read_text().splitlines()]
    chosen = questions[:: len(questions) // num_streams][:num_streams]
    return [
        {
            "model": "pagoda-tiny",
            "messages": question["messages"],
            "temperature": 0,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        for question in chosen
    ]


async def _stream(
    session: aiohttp.ClientSession, body: dict[str, object], received: list[str]
) -> str:
    """The finish reason; the text goes piece by piece into `received`."""
    reason = ""
    async with session.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200
        async for line in response.content:
            if line.startswith(b"data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                delta = choice["delta"]
                text = (delta.get("content") or "") + (delta.get("reasoning_content") or "")
                if text:
                    received.append(text)
                reason = choice["finish_reason"] or reason
    return reason
