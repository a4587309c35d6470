"""The first and the second token of a prompt that is handed over, beside those at the host that computes it.

The second token is the first that needs all of the KV at the decode host.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack

from benchmarks.handoff.pod import (
    Pod,
    all_times,
    free_address,
    random_prompt,
    two_cores,
    until_hosts,
)
from benchmarks.kv_tiers.client import open_session
from pagoda.cli import output

_ALONE = "prefill host alone"


def ttft(
    *,
    model: str = "qwen3-0.6b",
    dtype: str = "bfloat16",
    prompt_len: int = 1000,
    prompts: int = 9,
    transports: str = "shm,tcp",
    seed: int = 0,
) -> None:
    """Measure what the handoff adds to the first and the second token, for each transport.

    Args:
        model: A shape preset, with random weights, or pagoda-tiny.
        dtype: Of weights, activations and KV.
        prompt_len: Random tokens in a prompt.
        prompts: For each way, in turn.
        transports: Those to be measured.
        seed: Of the prompts.
    """
    chance = random.Random(seed)
    p_core, d_core = two_cores()
    names = transports.split(",")
    with ExitStack() as stack:
        pod = Pod(stack, model, 2048, dtype)
        addresses = {name: free_address() for name in names}
        urls = {_ALONE: pod.host("prefill", cores=[p_core], join=[*addresses.values()])}
        for name, address in addresses.items():
            pod.host("decode", cores=[d_core], join=[address], transports=name)
            urls[name] = pod.route(address, 1)
        times = asyncio.run(_measure(urls, chance, prompt_len, prompts))
    _report(times)


async def _measure(
    urls: Mapping[str, str], chance: random.Random, prompt_len: int, prompts: int
) -> dict[str, list[list[float]]]:
    """By way, for each prompt, when its first tokens came. What comes first, to warm up, does not count."""
    times: dict[str, list[list[float]]] = {name: [] for name in urls}
    async with AsyncExitStack() as stack:
        sessions = {
            name: await stack.enter_async_context(open_session(url)) for name, url in urls.items()
        }
        for name, session in sessions.items():
            if name != _ALONE:
                await until_hosts(session, 2)
        for number in range(prompts + 1):
            for name, session in sessions.items():
                seconds = await all_times(session, random_prompt(chance, prompt_len), 8)
                if number:
                    times[name].append(seconds)
    return times


def _report(times: Mapping[str, list[list[float]]]) -> None:
    rows = []
    for name in times:
        first, second = _median(times, name, 0), _median(times, name, 1)
        added = [
            "" if name == _ALONE else f"{(value - _median(times, _ALONE, index)) * 1e3:+.1f} ms"
            for index, value in enumerate((first, second))
        ]
        rows.append((name, f"{first:.3f} s", added[0], f"{second:.3f} s", added[1]))
    columns = ("medians", "first token", "added", "second token", "added")
    output.stdout().print(output.table("", columns, rows))


def _median(times: Mapping[str, list[list[float]]], name: str, index: int) -> float:
    return statistics.median(seconds[index] for seconds in times[name])
