# SPDX-License-Identifier: Apache-2.0
"""Streams of clients that behave, and the times between their tokens.

`python -m benchmarks.chaos.good_streams URL [--streams N] [--max-tokens M]` runs until standard input ends. For
each line on it, it prints a line of JSON with what it saw since the line before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import aiohttp
import msgspec

from benchmarks.chaos.processes import reporting
from pagoda.concurrency.event_loop import run


class Seen(msgspec.Struct, frozen=True):
    """Gaps between events of all streams, from the sending of a request on, in ms, those that still last included;
    and errors: refusals, error events, and streams that end without `[DONE]`."""

    gaps: int
    median_ms: float
    p99_ms: float
    longest_ms: float
    errors: tuple[str, ...]


@dataclass
class _Gaps:
    gaps: list[float] = field(default_factory=list)
    heard_at: dict[int, float] = field(default_factory=dict)
    """Times of the last events of running streams, or of the sending of their requests, by stream."""
    errors: list[str] = field(default_factory=list)

    def take(self) -> Seen:
        now = time.monotonic()
        gaps = sorted([*self.gaps, *(now - last for last in self.heard_at.values())])
        self.gaps = []
        errors, self.errors = self.errors, []
        at = [1e3 * gaps[int(share * (len(gaps) - 1))] for share in (0.5, 0.99, 1)] if gaps else []
        median, p99, longest = at or (0.0, 0.0, 0.0)
        return Seen(len(gaps), median, p99, longest, tuple(errors))


async def _stream(
    session: aiohttp.ClientSession, number: int, max_tokens: int, seen: _Gaps
) -> None:
    body = {"prompt": "1 + 2 =", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    while True:
        seen.heard_at[number] = time.monotonic()
        try:
            async with session.post("/v1/completions", json=body) as answer:
                fault = await _read(answer, number, seen)
        except aiohttp.ClientError as error:
            fault = repr(error)
        if fault:
            seen.errors.append(fault)
            await asyncio.sleep(0.1)


async def _read(answer: aiohttp.ClientResponse, number: int, seen: _Gaps) -> str:
    """Notes the gaps of a stream until its end. Returns what was wrong with it, or nothing."""
    if answer.status != 200:
        return f"status {answer.status}"
    async for line in answer.content:
        if line.startswith(b"data: [DONE]"):
            return ""
        if line.startswith(b"data: {"):
            if "error" in json.loads(line.removeprefix(b"data: ")):
                return line.decode(errors="replace").strip()[:200]
            now = time.monotonic()
            seen.gaps.append(now - seen.heard_at[number])
            seen.heard_at[number] = now
    return "a stream ended without [DONE]"


async def _run(url: str, streams: int, max_tokens: int) -> None:
    seen = _Gaps()
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(None)) as session:
        tasks = [
            asyncio.create_task(_stream(session, number, max_tokens, seen))
            for number in range(streams)
        ]
        while await asyncio.to_thread(sys.stdin.readline):
            sys.stdout.write(msgspec.json.encode(seen.take()).decode() + "\n")
            sys.stdout.flush()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def good_streams(
    url: str, streams: int, max_tokens: int
) -> AbstractContextManager[Callable[[], Seen]]:
    """Streams in a process of their own, until the context ends. The function tells what they saw since its last
    call."""
    numbers = ["--streams", str(streams), "--max-tokens", str(max_tokens)]
    return reporting("benchmarks.chaos.good_streams", [url, *numbers], Seen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=200)
    options = parser.parse_args()
    run(_run(options.url, options.streams, options.max_tokens))


if __name__ == "__main__":
    main()
