# SPDX-License-Identifier: Apache-2.0
"""Clients that leave at a random point of their stream, that never read, or that never finish their request; and
clients that ask as those that never read, and read.

`python -m benchmarks.chaos.rude_clients URL KIND --clients N --rate R [--seed S]` is a process of its own, so that
the server is measured and not the event loop of its clients. Clients that stay leave when standard input ends;
a line of JSON says when all have come. The last line says which connections failed, and how many were closed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import struct
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pagoda.concurrency.event_loop import run

KINDS = ("drop", "reading", "never-read", "half-open")

_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: `close` sends a reset."""
_MESSAGES = [{"role": "user", "content": "What is 3 + 4?"}]
_WAIT_S = 30.0
"""Seconds for the server to accept a connection, or to send what a client waits for."""
_SMALL_BUFFER = 4096
_REQUESTS: tuple[tuple[str, dict[str, object]], ...] = (
    ("/v1/completions", {"prompt": "1 + 2 =", "max_tokens": 200, "ignore_eos": True}),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 100, "ignore_eos": True}),
    ("/v1/chat/completions", {"messages": _MESSAGES, "max_tokens": 200, "ignore_eos": True}),
    ("/v1/messages", {"model": "any", "messages": _MESSAGES, "max_tokens": 50}),
    ("/api/generate", {"model": "any", "prompt": "1 + 2 =", "options": {"num_predict": 100}}),
)
_LARGE: tuple[dict[str, object], ...] = (
    {"max_tokens": 1500, "logprobs": 5},
    {"max_tokens": 1500, "logprobs": 5, "stream": False},
    {"max_tokens": 200},
)
"""Answers that are larger than the buffers of a connection, as a stream and in one piece, and one that fits."""


@dataclass(frozen=True)
class Address:
    host: str
    port: int

    def request(self, path: str, fields: dict[str, object]) -> tuple[bytes, bytes]:
        """The headers and the body of a request, for a stream unless it says otherwise."""
        body = json.dumps({"stream": True, **fields}).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode(), body

    async def connect(self, *, receive_buffer: int | None = None) -> socket.socket:
        """Raises OSError: the server does not accept."""
        client = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        client.setblocking(False)
        if receive_buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            async with asyncio.timeout(_WAIT_S):
                await asyncio.get_running_loop().sock_connect(client, (self.host, self.port))
        except BaseException:
            client.close()
            raise
        return client


async def drop(address: Address, chance: random.Random) -> None:
    """One client that leaves anywhere: before its request is sent, in its headers or body, before the first token,
    or in its stream; by FIN, by RST, or by half a close. Raises OSError: the server did not accept."""
    head, body = address.request(*chance.choice(_REQUESTS))
    place = chance.choice(("connected", "headers", "body", "sent", "stream", "stream"))
    ending = chance.choice(("fin", "rst", "half"))
    sent = {
        "connected": b"",
        "headers": head[: chance.randrange(1, len(head))],
        "body": head + body[: chance.randrange(len(body))],
    }.get(place, head + body)
    num_reads = chance.randrange(1, 40) if place == "stream" else 0
    loop = asyncio.get_running_loop()
    client = await address.connect()
    with client, contextlib.suppress(OSError):
        async with asyncio.timeout(_WAIT_S):
            await loop.sock_sendall(client, sent)
            for _ in range(num_reads):
                read = await loop.sock_recv(client, 1024)
                if not read or read.endswith(b"0\r\n\r\n"):
                    break
            if ending == "half":
                client.shutdown(socket.SHUT_WR)
                while await loop.sock_recv(client, 4096):
                    pass
        if ending == "rst":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


async def stay(address: Address, kind: str, index: int, left: asyncio.Event) -> bool:
    """One client that stays: it sends a whole request and reads all of the answer or nothing, or it sends half a
    header or nothing. Returns True if the server closed the connection first.

    Raises OSError: the server did not accept.
    """
    loop = asyncio.get_running_loop()
    client = await address.connect(receive_buffer=_SMALL_BUFFER)
    with client:
        with contextlib.suppress(OSError):
            if kind in ("reading", "never-read"):
                fields = {"prompt": "1 + 2 =", "ignore_eos": True, **_LARGE[index % len(_LARGE)]}
                await loop.sock_sendall(
                    client, b"".join(address.request("/v1/completions", fields))
                )
                if kind == "reading":
                    await _first(_read(client), left)
                await left.wait()
                return False
            if index % 2:
                await loop.sock_sendall(client, b"POST /v1/completions HTTP/1.1\r\nHost: lo")
            return await _closed_before(client, left)
        return True


async def _closed_before(client: socket.socket, left: asyncio.Event) -> bool:
    return await _first(asyncio.get_running_loop().sock_recv(client, 4096), left)


async def _read(client: socket.socket) -> None:
    """Reads until the server closes the connection."""
    while await asyncio.get_running_loop().sock_recv(client, 65_536):
        pass


async def _first(reading: Coroutine[Any, Any, object], left: asyncio.Event) -> bool:
    """Waits for the end of `reading`, or until clients leave. Returns True if it ended."""
    tasks = (asyncio.ensure_future(reading), asyncio.ensure_future(left.wait()))
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    ended = tasks[0].done()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return ended


async def _come(address: Address, kind: str, clients: int, rate: float, seed: int) -> None:
    chance, left = random.Random(seed), asyncio.Event()
    loop = asyncio.get_running_loop()
    began, tasks = loop.time(), list[asyncio.Task[bool | None]]()
    for index in range(clients):
        await asyncio.sleep(max(0.0, began + index / rate - loop.time()))
        one = drop(address, chance) if kind == "drop" else stay(address, kind, index, left)
        tasks.append(asyncio.create_task(one))
    if kind != "drop":
        print(json.dumps({"held": sum(not task.done() for task in tasks)}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        left.set()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    failures = [repr(end) for end in ended if isinstance(end, BaseException)]
    closed = sum(end is True for end in ended)
    took = loop.time() - began
    print(json.dumps({"failures": failures, "closed": closed, "seconds": took}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rate", type=float, default=100.0, help="clients that come in a second")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    url = urlsplit(options.url)
    address = Address(url.hostname or "127.0.0.1", url.port or 80)
    run(_come(address, options.kind, options.clients, options.rate, options.seed))


if __name__ == "__main__":
    main()
