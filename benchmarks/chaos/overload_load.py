# SPDX-License-Identifier: Apache-2.0
"""Load on a server from a process of its own: `python -m benchmarks.chaos.overload_load`, with a `Load` as JSON on
standard input; prints `Received` as JSON.

Clients of a closed loop send their next request when the last one has ended. Those of an open loop send at their
rate, whatever becomes of earlier requests, and do not come again after a refusal.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter

import aiohttp
import msgspec

_PATIENCE_S = 60.0
"""Seconds for the answers that are under way when the load ends."""


class Clients(msgspec.Struct, frozen=True):
    """Requests with one API key."""

    key: str
    rate: float = 0.0
    """Requests per second of an open loop, at random intervals; 0 for a closed loop."""
    num_clients: int = 0
    """Clients of a closed loop."""


class Load(msgspec.Struct, frozen=True):
    url: str
    seconds: float
    clients: list[Clients]
    num_prompt_tokens: int
    num_output_tokens: int


class Received(msgspec.Struct):
    num_tokens: int = 0
    """Tokens of answers that came before the load ended."""
    num_complete: int = 0
    num_incomplete: int = 0
    """Answers that began and did not complete."""
    statuses: dict[str, dict[int, int]] = {}
    """Counts of answers by key and HTTP status; 0 for connections that failed."""
    num_without_retry_after: int = 0
    """Answers with the status 429 that did not say when to come again."""
    ttft_s: dict[str, list[float]] = {}
    """Seconds until the first token, by key."""
    late_s: float = 0.0
    """The longest time by which a request was sent too late: the load itself had no time."""


class _Generator:
    def __init__(self, load: Load, session: aiohttp.ClientSession) -> None:
        self._load = load
        self._session = session
        self._end = time.perf_counter() + load.seconds
        self._random = random.Random(7)
        self._statuses = {clients.key: Counter[int]() for clients in load.clients}
        self._tasks: set[asyncio.Task[None]] = set()
        self.received = Received(ttft_s={clients.key: [] for clients in load.clients})

    async def run(self) -> Received:
        loops = [self._open(c) if c.rate else self._closed(c) for c in self._load.clients]
        await asyncio.gather(*loops)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_PATIENCE_S)
        self.received.num_incomplete += sum(not task.done() for task in self._tasks)
        self.received.statuses = {key: dict(counts) for key, counts in self._statuses.items()}
        return self.received

    async def _closed(self, clients: Clients) -> None:
        async def client() -> None:
            while time.perf_counter() < self._end:
                await self._ask(clients.key)

        await asyncio.gather(*(client() for _ in range(clients.num_clients)))

    async def _open(self, clients: Clients) -> None:
        due = time.perf_counter()
        while (due := due + self._random.expovariate(clients.rate)) < self._end:
            now = time.perf_counter()
            if due > now:
                await asyncio.sleep(due - now)
            self.received.late_s = max(self.received.late_s, time.perf_counter() - due)
            task = asyncio.create_task(self._ask(clients.key))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _ask(self, key: str) -> None:
        load, received = self._load, self.received
        body = {
            "prompt": [self._random.randrange(1, 250) for _ in range(load.num_prompt_tokens)],
            "max_tokens": load.num_output_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        began = time.perf_counter()
        try:
            async with self._session.post(
                f"{load.url}/v1/completions",
                json=body,
                headers={"Authorization": f"Bearer {key}"},
            ) as answer:
                self._statuses[key][answer.status] += 1
                if answer.status == 200:
                    await self._read(answer, key, began)
                else:
                    is_429 = answer.status == 429
                    received.num_without_retry_after += (
                        is_429 and "Retry-After" not in answer.headers
                    )
                    await answer.read()
        except aiohttp.ClientError:
            self._statuses[key][0] += 1

    async def _read(self, answer: aiohttp.ClientResponse, key: str, began: float) -> None:
        received, num_tokens, is_complete = self.received, 0, False
        async for line in answer.content:
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                if not num_tokens:
                    received.ttft_s[key].append(now - began)
                num_tokens += 1
                received.num_tokens += now < self._end
            is_complete = is_complete or line.startswith(b"data: [DONE]")
        received.num_complete += is_complete
        received.num_incomplete += not is_complete


async def _main() -> None:
    load = msgspec.json.decode(sys.stdin.buffer.read(), type=Load)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        received = await _Generator(load, session).run()
    sys.stdout.buffer.write(msgspec.json.encode(received))


if __name__ == "__main__":
    asyncio.run(_main())
