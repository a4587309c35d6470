# SPDX-License-Identifier: Apache-2.0
"""Clients that hold connections: that trickle, drop, never read, or send what is no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator

from benchmarks.chaos.hostile.attack import Siege

_HOLD_S = 3.0
_ANSWER_S = 30.0
_READ_BYTES = 2**16
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
_BAD = frozenset({400})


def sieges() -> Iterator[Siege]:
    yield Siege("500 clients that drop their streams", _dropping)
    yield Siege("100 bodies that trickle", _many(100, _trickle(_head(1000) + b'{"prompt": "')))
    yield Siege(
        "100 headers that trickle", _many(100, _trickle(b"POST /v1/completions HTTP/1.1\r\n"))
    )
    yield Siege("1,000 half-open connections", _many(1000, _hold(b"")))
    yield Siege("8 clients that never read 64 answers", _many(8, _hold(_never_read())))
    yield Siege("4 requests with 118 tracestates of 8 kB", _many(4, _late(_tracestates())))
    yield Siege("1,000 requests in one packet", _many(1, _exchange(_GET * 1000, {200}, 1000)))
    yield Siege(
        "TLS on a plain port", _many(20, _exchange(b"\x16\x03\x01\x02\x00\x01" + bytes(512), _BAD))
    )
    noise = random.Random(1).randbytes(65_536)
    yield Siege("64 kB of noise", _many(20, _exchange(noise, _BAD)))
    yield Siege(
        "a length that is none",
        _many(20, _exchange(_GET[:-2] + b"Content-Length: -1\r\n\r\n", _BAD)),
    )
    both = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    yield Siege("two lengths", _many(20, _exchange(_post("/v1/completions") + both, _BAD)))
    chunks = b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nx"
    yield Siege(
        "a chunk of 2^64 bytes",
        _many(20, _exchange(_post("/tokenize") + chunks, {400, 413}, least=0)),
    )


_Client = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[str]]
"""Returns the fault of the server; empty if there is none."""
_GET = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


def _head(length: int, path: str = "/v1/completions", more: bytes = b"") -> bytes:
    return _post(path) + more + f"Content-Length: {length}\r\n\r\n".encode()


def _post(path: str) -> bytes:
    """A head without its end."""
    line = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return line.encode()


def _request(body: dict[str, object], more: bytes = b"") -> bytes:
    data = json.dumps(body).encode()
    return _head(len(data), more=more) + data


def _never_read() -> bytes:
    body = {"prompt": ["x"] * 8, "n": 8, "max_tokens": 100_000, "stream": True, "ignore_eos": True}
    return _request(body)


def _tracestates() -> bytes:
    body = {"prompt": ["x"] * 8, "n": 8, "max_tokens": 200, "ignore_eos": True}
    parent = b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n"
    return _request(
        body, parent + b"".join(b"tracestate: a=%b\r\n" % (b"x" * 8000) for _ in range(118))
    )


def _many(count: int, client: _Client) -> Callable[[str, int], Awaitable[str]]:
    """Siege of so many clients at once. A connection that the server does not accept is a fault."""

    async def run(host: str, port: int) -> str:
        async def one() -> str:
            try:
                reader, writer = await asyncio.open_connection(host, port)
            except OSError as error:
                return f"no connection: {error}"
            try:
                return await client(reader, writer)
            except ConnectionError:
                return ""
            finally:
                writer.transport.abort()

        faults = Counter(await asyncio.gather(*(one() for _ in range(count))))
        del faults[""]
        return "; ".join(f"{times} × {fault}" for fault, times in faults.most_common(2))

    return run


def _hold(data: bytes) -> _Client:
    """Sends, and reads nothing for some seconds."""

    async def client(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(data)
        await asyncio.sleep(_HOLD_S)
        return ""

    return client


def _late(data: bytes) -> _Client:
    """Sends, reads nothing for some seconds, and then its answer, which must be one of 200, or a refusal of its
    headers."""
    hold = _hold(data)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        await hold(reader, writer)
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        try:
            async with asyncio.timeout(_ANSWER_S):
                return _fault_of([*_STATUS.findall(await reader.readline())], {200, 400, 431}, 1)
        except TimeoutError:
            return f"no answer within {_ANSWER_S:g} s"

    return client


def _trickle(data: bytes) -> _Client:
    """Sends a byte now and then behind a beginning."""

    async def client(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        writer.write(data)
        for _turn in range(30):
            writer.write(b"x")
            await asyncio.sleep(_HOLD_S / 30)
        return ""

    return client


def _exchange(data: bytes, statuses: Collection[int], least: int = 1) -> _Client:
    """Sends, and reads what comes until the server hangs up or is silent: at least so many answers, all of these
    statuses."""

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        received = bytearray()
        writer.write(data)
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(_HOLD_S):
                while chunk := await reader.read(_READ_BYTES):
                    received += chunk
        return _fault_of(_STATUS.findall(received), statuses, least)

    return client


def _fault_of(found: list[bytes], statuses: Collection[int], least: int) -> str:
    """The fault of answers with the statuses `found`."""
    others = sorted({int(status) for status in found} - set(statuses))
    if others:
        return f"status {others[0]}"
    return "" if len(found) >= least else f"{len(found)} answers"


async def _dropping(host: str, port: int) -> str:
    body = {"prompt": "x", "max_tokens": 1000, "stream": True, "ignore_eos": True}
    data, rng = _request(body), random.Random(1)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        received = bytearray()
        writer.write(data)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rng.random() / 2):
                while chunk := await reader.read(_READ_BYTES):
                    received += chunk
        return _fault_of(_STATUS.findall(received), {200, 429}, 0)

    faults = [await _many(50, client)(host, port) for _ in range(10)]
    return "; ".join(filter(None, faults))
