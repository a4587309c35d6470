# SPDX-License-Identifier: Apache-2.0
"""Streams that behave tell of everything that goes wrong with them, and of every time that they wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from benchmarks.chaos.good_streams import Seen, good_streams

TOKEN, DONE = b'data: {"choices": []}\n\n', b"data: [DONE]\n\n"


@asynccontextmanager
async def _serving(status: int, events: bytes) -> AsyncIterator[str]:
    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=events, status=status)

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield site.name
    finally:
        await runner.cleanup()


def _watch(url: str, is_enough: Callable[[Seen], bool]) -> Seen:
    with good_streams(url, 1, 2) as good:
        seen = good()
        while not is_enough(seen):
            seen = good()
        return seen


@pytest.mark.parametrize(
    ("status", "events", "error"),
    [
        (200, TOKEN + b'data: {"error": {"message": "It broke."}}\n\n' + DONE, "It broke."),
        (200, TOKEN * 2, "a stream ended without [DONE]"),
        (429, b"", "status 429"),
    ],
)
async def test_what_goes_wrong_is_an_error(status: int, events: bytes, error: str) -> None:
    async with _serving(status, events) as url:
        seen = await asyncio.to_thread(_watch, url, lambda seen: bool(seen.errors))
    assert error in seen.errors[0]


async def test_the_first_token_is_waited_for_from_the_sending_on() -> None:
    async with _serving(200, TOKEN + DONE) as url:
        seen = await asyncio.to_thread(_watch, url, lambda seen: seen.gaps > 20)
    assert seen.errors == ()
    assert 0 < seen.median_ms <= seen.p99_ms <= seen.longest_ms
