# SPDX-License-Identifier: Apache-2.0
"""Open connections are bounded: silent ones make room, and those with a request stay."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import select
import socket
from typing import Any

import pytest

from pagoda.api.http.connections import Connections, bound_silence, raise_descriptor_limit

_REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b'Content-Length: 15\r\n\r\n{"prompt":"hi"}'
)


class Connection:
    def __init__(self) -> None:
        self.is_closed = False

    def force_close(self) -> None:
        self.is_closed = True


def _closed(*connections: Connection) -> list[bool]:
    return [connection.is_closed for connection in connections]


def test_the_longest_waiting_connection_makes_room() -> None:
    a, b, c, d = (Connection() for _ in range(4))
    connections = Connections(2)
    connections.add(a)
    connections.add(b)
    connections.set_busy(a)
    connections.set_waiting(a)  # b waits longer now
    connections.add(c)
    assert _closed(a, b, c) == [False, True, False]
    connections.remove(b)
    connections.remove(c)
    connections.add(d)
    assert connections.num_open == 2
    assert _closed(a, d) == [False, False]


def test_a_connection_with_a_request_stays() -> None:
    busy, new = Connection(), Connection()
    connections = Connections(1)
    connections.add(busy)
    connections.set_busy(busy)
    connections.add(new)
    assert _closed(busy, new) == [False, True]


def test_connections_that_come_at_once_close_as_many() -> None:
    """Closed connections are lost only in a later turn of the event loop."""
    some = [Connection() for _ in range(10)]
    connections = Connections(3)
    for connection in some:
        connections.add(connection)
    assert _closed(*some) == [True] * 7 + [False] * 3


def test_one_warning_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    connections = Connections(1, clock=lambda: now)
    with caplog.at_level(logging.WARNING, "pagoda.api"):
        for _ in range(100):
            connections.add(Connection())
        assert len(caplog.records) == 1
        now = 60.0
        connections.add(Connection())
    assert len(caplog.records) == 2
    assert "99 were closed" in caplog.records[1].getMessage()


def test_the_kernel_cuts_a_client_that_reads_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(server.getsockname())
        accepted, _ = server.accept()
        with accepted:
            bound_silence(accepted, 0.1)
            accepted.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    accepted.send(bytes(2**16))
            lost = select.poll()
            lost.register(accepted, select.POLLHUP)
            assert lost.poll(60_000)


class Limits:
    """What a system allows, instead of `resource`."""

    RLIM_INFINITY = resource.RLIM_INFINITY
    RLIMIT_NOFILE = resource.RLIMIT_NOFILE

    def __init__(self, soft: int, hard: int, most: int) -> None:
        self.now = soft, hard
        self._most = most

    def getrlimit(self, _which: int) -> tuple[int, int]:
        return self.now

    def setrlimit(self, _which: int, limits: tuple[int, int]) -> None:
        soft, hard = limits
        if hard != self.now[1] or soft == self.RLIM_INFINITY or soft > self._most:
            raise ValueError("not allowed to raise maximum limit")
        self.now = limits


INFINITE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "most", "then"),
    [
        (1024, 4096, 4096, 4096),
        (1024, INFINITE, 10**6, 65_536),
        (1024, INFINITE, 2048, 1024),
        (10**5, INFINITE, 10**6, 10**5),
        (4096, 4096, 4096, 4096),
        (INFINITE, INFINITE, 0, INFINITE),
    ],
)
def test_the_limit_of_descriptors_is_raised_as_far_as_the_system_allows(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, most: int, then: int
) -> None:
    limits = Limits(soft, hard, most)
    monkeypatch.setattr("pagoda.api.http.connections.resource", limits)
    raise_descriptor_limit()
    assert limits.now == (then, hard)


async def test_silent_connections_keep_nobody_out(serve_api: Any) -> None:
    server = await serve_api(max_connections=2)
    silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
    silent[0][1].write(b"POST /v1/compl")
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(_REQUEST)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    assert head.startswith(b"HTTP/1.1 200 ")
    assert await asyncio.wait_for(silent[0][0].read(), 30) == b""
    assert not silent[1][0].at_eof()
    for _, opened in [*silent, (reader, writer)]:
        opened.close()


async def test_a_connection_waits_again_behind_its_answer(serve_api: Any) -> None:
    server = await serve_api(max_connections=1)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(_REQUEST)
    await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    assert await server.raw(_REQUEST)
    assert b"choices" in await asyncio.wait_for(reader.read(), 30)
    writer.close()
