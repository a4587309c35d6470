"""The time at which a request arrives (`pagoda.api.app`)."""

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


async def test_an_empty_line_is_no_arrival(api, monkeypatch) -> None:
    clock = _Clock()
    monkeypatch.setattr(api.service.tracker, "clock_ns", clock)
    arrived: list[int] = []
    api.service.tracker.subscribe(
        on_start=lambda record: arrived.append(record.client_request.arrived_ns)
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    body = b'{"prompt": "hi", "max_tokens": 1}'
    request = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    request += b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    for before in (b"", b"\r\n"):
        writer.write(request + before)
        await writer.drain()
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        length = int(head.lower().split(b"content-length:")[1].split()[0])
        await reader.readexactly(length)
    writer.write(b"\r\n")
    await writer.drain()
    await api.get("/version")  # which comes behind the line, so that it has been read
    clock.now = 1000
    writer.write(request)
    await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    writer.close()
    assert len(arrived) == 3
    assert arrived[-1] > 1000
