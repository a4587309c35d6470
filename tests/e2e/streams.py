# SPDX-License-Identifier: Apache-2.0
"""Many clients that read streams over HTTP while something happens to the server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import psutil

import pagoda

HELD_OUT = Path(pagoda.__file__).parent / "checkpoints" / "pagoda_tiny" / "heldout.jsonl"

Disturb = Callable[[Callable[[], int]], Awaitable[None]]
"""Harms the server; the argument returns the number of events that have arrived so far."""


class Answer(NamedTuple):
    """One choice of a stream."""

    text: str
    """Content, and names and arguments of calls, as they came."""
    reasoning: str
    reason: str
    token_ids: list[int]
    """Tokens, where the request asks for them."""


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
    base_url: str, requests: list[dict[str, Any]], disturb: Disturb | None = None
) -> list[Answer]:
    """Returns all answers to each request in turn.

    The last request is asked once more, and again whenever it is answered, until `disturb` has done its work. So
    streams are disturbed, however late `disturb` is; raises AssertionError if what they bring is not the same.
    """
    received: list[list[dict[str, Any]]] = [[] for _ in requests]
    again: list[list[dict[str, Any]]] = []
    async with aiohttp.ClientSession(base_url, connector=aiohttp.TCPConnector(limit=0)) as session:
        streams = asyncio.gather(
            *(_stream(session, body, got) for body, got in zip(requests, received, strict=True))
        )
        if disturb is not None:
            disturbing = asyncio.ensure_future(
                disturb(lambda: sum(map(len, itertools.chain(received, again))))
            )
            asking = asyncio.ensure_future(_ask_until(disturbing, session, requests[-1], again))
            try:
                await asking
                await disturbing
            except BaseException:
                for task in (asking, disturbing, streams):
                    task.cancel()
                await asyncio.gather(asking, disturbing, streams, return_exceptions=True)
                raise
        await streams
    last = _answers(requests[-1], received[-1])
    for got in again:
        assert _answers(requests[-1], got) == last
    return [
        answer
        for body, got in zip(requests, received, strict=True)
        for answer in _answers(body, got)
    ]


async def _ask_until(
    disturbing: asyncio.Future[None],
    session: aiohttp.ClientSession,
    body: dict[str, Any],
    received: list[list[dict[str, Any]]],
) -> None:
    """Asks the same again and again, one answer after the other, the last of them at the end of `disturbing`.

    A salted prompt is not cached from the time before. What `disturbing` raises ends this at once.
    """
    for turn in itertools.count():
        salt = {"cache_salt": f"{body['cache_salt']}, {turn}"} if "cache_salt" in body else {}
        received.append([])
        asking = asyncio.ensure_future(_stream(session, {**body, **salt}, received[-1]))
        try:
            await asyncio.wait((asking, disturbing), return_when=asyncio.FIRST_COMPLETED)
            if disturbing.done():
                await disturbing
            await asking
        finally:
            asking.cancel()
        if disturbing.done():
            return


async def _stream(
    session: aiohttp.ClientSession, body: dict[str, Any], received: list[dict[str, Any]]
) -> None:
    """Appends the choice of each event to `received`."""
    async with session.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                received += json.loads(line[6:])["choices"]


def _answers(body: dict[str, Any], events: list[dict[str, Any]]) -> list[Answer]:
    """All answers to a request."""
    return [
        _answer([choice for choice in events if choice["index"] == index])
        for index in range(body.get("n", 1))
    ]


def _answer(events: list[dict[str, Any]]) -> Answer:
    text, reasoning, reason = "", "", ""
    token_ids: list[int] = []
    for event in events:
        delta = event["delta"]
        text += delta.get("content") or ""
        reasoning += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or ():
            text += (call["function"].get("name") or "") + (call["function"].get("arguments") or "")
        token_ids += event.get("token_ids") or ()
        reason = event["finish_reason"] or reason
    return Answer(text, reasoning, reason, token_ids)


async def until_more(received: Callable[[], int], count: int) -> None:
    """Waits for `count` more events."""
    before = received()
    while received() < before + count:
        await asyncio.sleep(0.01)


def children(server_pid: int, module: str) -> list[int]:
    """Process ids of a server's engines or workers, in the order in which they were started."""
    running = []
    for process in psutil.Process(server_pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie: it has just ended
            if module in process.cmdline():
                running.append(process)
    return [process.pid for process in sorted(running, key=psutil.Process.create_time)]
