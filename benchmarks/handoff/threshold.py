# SPDX-License-Identifier: Apache-2.0
"""Prompts of many lengths, computed by a decode host itself and by a prefill host beside it.

Until the second token, since only that one needs all of the KV at the decode host; with nothing else to do, and
with answers under way there.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from contextlib import AsyncExitStack, ExitStack
from typing import NamedTuple

import aiohttp

from benchmarks.handoff.pod import (
    Pod,
    Streams,
    all_times,
    free_address,
    random_prompt,
    two_cores,
    until_hosts,
)
from benchmarks.kv_tiers.client import open_session
from pagoda.cli import output

_TOLERANCE = 1.05
"""Largest ratio that is called no slower. Two hosts are never faster than one that has nothing else to do: the
handoff takes time, and both compute the tokens behind the last full block."""


class _Point(NamedTuple):
    """Figures of one prompt length: medians, and the longest pause of answers under way, in seconds."""

    local_s: float
    remote_s: float
    local_pause_s: float
    remote_pause_s: float


def threshold(
    *,
    model: str = "qwen3-0.6b",
    dtype: str = "bfloat16",
    lengths: str = "24,40,72,136,264,520,1032",
    repeats: int = 7,
    streams: int = 4,
    seed: int = 0,
) -> None:
    """Measure from which length of a prompt on it is worth to have it computed elsewhere.

    Args:
        model: A shape preset, with random weights, or pagoda-tiny.
        dtype: Of weights, activations and KV.
        lengths: Tokens of prompts; by default with half a block behind the full ones.
        repeats: For each length and way, in turn.
        streams: Answers under way at the decode host in the second half.
        seed: Of the prompts.
    """
    chance = random.Random(seed)
    p_core, d_core = two_cores()
    counts = [int(length) for length in lengths.split(",")]
    with ExitStack() as stack:
        pod = Pod(stack, model, 2048, dtype)
        address = free_address()
        pod.host("prefill", cores=[p_core], join=[address])
        decode = pod.host("decode", cores=[d_core], join=[address])
        router = pod.route(address, 9)  # the prompts of streams are shorter

        async def measure(num_streams: int) -> dict[int, _Point]:
            async with AsyncExitStack() as opened:
                local, remote = [
                    await opened.enter_async_context(open_session(url)) for url in (decode, router)
                ]
                await until_hosts(remote, 2)
                await _second_token(remote, chance, max(counts))  # the first step is slower
                running = Streams(decode, chance, num_streams, 2000)
                points = {}
                for length in counts:
                    async with running:
                        points[length] = await _point(
                            local, remote, running, chance, length, repeats
                        )
                return points

        idle = asyncio.run(measure(0))
        busy = asyncio.run(measure(streams))
    _report(idle, busy, streams)


async def _second_token(
    session: aiohttp.ClientSession, chance: random.Random, length: int
) -> float:
    return (await all_times(session, random_prompt(chance, length), 2))[1]


async def _point(
    local: aiohttp.ClientSession,
    remote: aiohttp.ClientSession,
    running: Streams,
    chance: random.Random,
    length: int,
    repeats: int,
) -> _Point:
    seconds: list[list[float]] = [[], []]
    pauses: list[list[float]] = [[], []]
    for _ in range(repeats):
        for way, session in enumerate((local, remote)):
            running.pauses.clear()
            seconds[way].append(await _second_token(session, chance, length))
            pauses[way].append(max((pause.seconds for pause in running.pauses), default=0.0))
    medians = [statistics.median(values) for values in (*seconds, *pauses)]
    return _Point(*medians)


def _report(idle: dict[int, _Point], busy: dict[int, _Point], streams: int) -> None:
    rows = [
        (
            f"{length:,}",
            *(f"{value * 1e3:.1f} ms" for value in idle[length][:2]),
            *(f"{value * 1e3:.1f} ms" for value in busy[length]),
        )
        for length in idle
    ]
    columns = ["tokens", "idle: here", "elsewhere", "busy: here", "elsewhere"]
    columns += ["longest pause: here", "elsewhere"]
    output.stdout().print(output.table("", columns, rows))
    for name, points in (("idle", idle), (f"{streams} answers under way", busy)):
        found = _crossover(points)
        what = "at no length measured" if found is None else f"from {found:,} tokens on"
        output.stdout().print(
            f"{name}: the second token comes at most 5 % later from elsewhere {what}"
        )


def _crossover(points: dict[int, _Point]) -> int | None:
    """The shortest length from which on elsewhere is no slower."""
    found = None
    for length in sorted(points, reverse=True):
        if points[length].remote_s > points[length].local_s * _TOLERANCE:
            break
        found = length
    return found
