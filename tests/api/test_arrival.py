"""When a request is said to have arrived."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from aiohttp import web

from pagoda.api.app import ApiServer


class _Clock:
    """Shows how often it was asked, so that two answers are never alike."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        self.now += 1
        return self.now


@pytest.mark.parametrize("body", [b"", b"x" * 300_000])
async def test_a_request_arrives_with_its_first_bytes_not_when_its_turn_comes(body: bytes) -> None:
    clock = _Clock()
    seen: list[tuple[int, int]] = []

    def make_request(message, payload, protocol, writer, task):  # type: ignore[no-untyped-def]
        turn = clock()
        seen.append((protocol.begin(), turn))
        loop = asyncio.get_running_loop()
        return web.BaseRequest(message, payload, protocol, writer, task, loop)

    async def handle(http: web.BaseRequest) -> web.StreamResponse:
        assert await http.read() == body
        http.protocol.end(is_read=http.content.is_eof())
        return web.Response()

    runner = web.ServerRunner(
        ApiServer(handle, lambda _status: None, clock, request_factory=make_request)
    )
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        connector = aiohttp.TCPConnector(limit=1)
        async with aiohttp.ClientSession(connector=connector) as session:
            for _ in range(3):  # over one connection
                async with session.post(
                    f"http://127.0.0.1:{runner.addresses[0][1]}/", data=body
                ) as it:
                    assert it.status == 200
    finally:
        await runner.cleanup()
    assert seen == [(1, 2), (3, 4), (5, 6)]
