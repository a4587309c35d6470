# SPDX-License-Identifier: Apache-2.0
"""Running streams while long prompts arrive: a prefill and a decode host with a core each, and one with both.

All servers run all the time and take turns; one that has nothing to do uses no core. Pauses count while a prompt
is under way, however long that is at either.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import ExitStack

from benchmarks.handoff.pod import (
    Pause,
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

_ROUND_UP_TO = 0.25


def itl(
    *,
    model: str = "qwen3-0.6b",
    dtype: str = "bfloat16",
    prompt_len: int = 1500,
    prompts: int = 6,
    streams: int = 4,
    rounds: int = 2,
    seed: int = 0,
) -> None:
    """Measure the pauses between tokens of running streams while long prompts arrive.

    Args:
        model: A shape preset, with random weights, or pagoda-tiny.
        dtype: Of weights, activations and KV.
        prompt_len: Random tokens in a prompt that arrives.
        prompts: That arrive in a round, one every time in which a prefill host can compute one.
        streams: That run meanwhile.
        rounds: Of either, in turn.
        seed: Of the prompts.
    """
    chance = random.Random(seed)
    most = 2048
    p_core, d_core = two_cores()
    with ExitStack() as stack:
        pod = Pod(stack, model, most, dtype)
        address = free_address()
        prefill = pod.host("prefill", cores=[p_core], join=[address])
        pod.host("decode", cores=[d_core], join=[address])
        apart = pod.route(address, prompt_len)
        one = pod.host(cores=[p_core, d_core])
        pauses: dict[str, list[float]] = {"apart": [], "one host": []}
        first_tokens: dict[str, list[float]] = {"apart": [], "one host": []}

        async def measure() -> float:
            async with open_session(apart) as session:
                await until_hosts(session, 2)
            interval = await _prefill_time(prefill, chance, prompt_len)
            for _ in range(rounds):
                for name, url in (("apart", apart), ("one host", one)):
                    async with Streams(url, chance, streams, most - 16) as running:
                        arriving = [random_prompt(chance, prompt_len) for _ in range(prompts)]
                        under_way = await _arrive(url, arriving, interval)
                        first_tokens[name] += [prompt.seconds for prompt in under_way]
                        pauses[name] += _meanwhile(running.pauses, under_way)
            return interval

        interval = asyncio.run(measure())
    _report(pauses, first_tokens, interval)


async def _prefill_time(url: str, chance: random.Random, prompt_len: int) -> float:
    """Seconds of prefill of the second prompt: the first step of a server is slower."""
    async with open_session(url) as session:
        for _ in range(2):
            [seconds] = await all_times(session, random_prompt(chance, prompt_len), 1)
    return seconds * (1 + _ROUND_UP_TO)


async def _arrive(url: str, arriving: list[list[int]], interval: float) -> list[Pause]:
    """Sends one prompt every `interval` seconds; returns from when to when each was without its first token."""
    async with open_session(url) as session:

        async def ask(prompt: list[int]) -> Pause:
            began = time.perf_counter()
            times = await all_times(session, prompt, 4)
            return Pause(began, began + times[0])

        began, asking = time.perf_counter(), []
        for index, prompt in enumerate(arriving):
            await asyncio.sleep(max(0.0, began + index * interval - time.perf_counter()))
            asking.append(asyncio.create_task(ask(prompt)))
        return await asyncio.gather(*asking)


def _meanwhile(pauses: list[Pause], under_way: list[Pause]) -> list[float]:
    return [
        pause.seconds
        for pause in pauses
        if any(pause.end > prompt.start and pause.start < prompt.end for prompt in under_way)
    ]


def _report(
    pauses: dict[str, list[float]], first_tokens: dict[str, list[float]], interval: float
) -> None:
    rows = [
        (
            name,
            f"{_quantile(values, 0.5) * 1e3:.1f} ms",
            f"{_quantile(values, 0.99) * 1e3:.1f} ms",
            f"{max(values) * 1e3:.1f} ms",
            f"{len(values):,}",
            f"{_quantile(first_tokens[name], 0.5):.2f} s",
        )
        for name, values in pauses.items()
    ]
    columns = ("streams", "ITL p50", "p99", "longest", "tokens", "TTFT of the prompts, median")
    output.stdout().print(output.table("", columns, rows))
    ratio = _quantile(pauses["apart"], 0.99) / _quantile(pauses["one host"], 0.99)
    output.stdout().print(
        f"a prompt every {interval:.2f} s; ITL p99 apart is {ratio:.3f} × that of one host"
    )


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]
