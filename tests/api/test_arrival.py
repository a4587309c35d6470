# SPDX-License-Identifier: Apache-2.0
"""The time at which a request arrives (`pagoda.api.http.app`)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import aiohttp
import pytest
from aiohttp import web

from pagoda.api.http.app import ApiServer


@pytest.fixture
def clock(api, monkeypatch) -> Iterator[int]:
    """Shows how often it was asked, so that two answers are never alike."""
    clock = itertools.count(1)
    monkeypatch.setattr(api.service.tracker, "clock_ns", lambda: next(clock))
    return clock


@pytest.fixture
def arrived(api) -> list[int]:
    """The times of arrival of all answers."""
    arrived: list[int] = []
    api.service.tracker.subscribe(
        on_start=lambda record: arrived.append(record.client_request.arrived_ns)
    )
    return arrived


@pytest.mark.parametrize("padding", [0, 300_000])
async def test_a_request_arrives_with_its_first_bytes_not_when_its_turn_comes(
    api, clock, arrived, padding: int
) -> None:
    turns: list[int] = []
    server = ApiServer(api.service)
    make_request = server.request_factory

    def in_turn(*parts):  # type: ignore[no-untyped-def]
        turns.append(next(clock))
        return make_request(*parts)

    server.request_factory = in_turn
    runner = web.ServerRunner(server)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/completions"
    connector = aiohttp.TCPConnector(limit=1)
    async with aiohttp.ClientSession(connector=connector) as session:
        for _ in range(3):  # over one connection
            async with session.post(url, data=b'{"prompt": "hi"}' + b" " * padding) as answer:
                assert answer.status == 200
    await runner.cleanup()
    assert arrived == [turn - 1 for turn in turns]


async def test_an_empty_line_is_no_arrival(api, clock, arrived) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    body = b'{"prompt": "hi", "max_tokens": 1}'
    request = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    request += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    for before in (b"", b"\r\n"):
        writer.write(request + before)
        await writer.drain()
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        length = int(head.lower().split(b"content-length:")[1].split()[0])
        await reader.readexactly(length)
    writer.write(b"\r\n")
    await writer.drain()
    await api.get("/version")  # which comes behind the line, so that it has been read
    before_the_last = next(clock)
    writer.write(request)
    await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    writer.close()
    assert len(arrived) == 3
    assert arrived[-1] > before_the_last


async def test_long_headers_of_traces_are_not_kept(api) -> None:
    kept: list[tuple[str | None, str | None]] = []
    api.service.tracker.subscribe(
        on_start=lambda record: kept.append(
            (record.client_request.traceparent, record.client_request.tracestate)
        )
    )
    url = f"http://127.0.0.1:{api.port}/v1/completions"
    good = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01", "tracestate": "a=1"}
    long = {"traceparent": "0" * 4000, "tracestate": "a" * 4000}
    async with aiohttp.ClientSession() as session:
        for headers in (good, long, {}):
            async with session.post(url, json={"prompt": "hi"}, headers=headers) as answer:
                assert answer.status == 200
    assert kept == [(good["traceparent"], "a=1"), (None, None), (None, None)]
