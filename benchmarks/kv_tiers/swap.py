# SPDX-License-Identifier: Apache-2.0
"""Requests that do not fit on the device together: swapping beside computing preempted ones again.

A server without tiers and one with a disk get the same requests at once, in turn. The device holds a quarter of
what they need in the end. Answers are greedy, so they must be the same where products do not depend on the batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.kv_tiers.client import ask, counter, open_session, tier_figures
from pagoda.cli import output
from pagoda.cli.server_process import server_process

_BLOCK_SIZE = 16
_VOCABULARY = range(3, 256)


def swap(
    *,
    directory: Path | None = None,
    model: str = "qwen3-0.6b",
    load_format: str = "dummy",
    dtype: str = "bfloat16",
    requests: int = 16,
    prompt_len: int = 1536,
    answer_len: int = 512,
    kv_host_bytes: str | None = None,
    repeats: int = 1,
) -> None:
    """Measure the throughput of both.

    Args:
        directory: Where blocks are kept; by default a temporary one.
        model: A directory or a shape preset.
        load_format: `dummy` for random weights.
        dtype: Of weights, activations and blocks.
        requests: How many are asked at once.
        prompt_len: Random tokens in each.
        answer_len: Tokens of each answer.
        kv_host_bytes: Host memory for blocks, too.
        repeats: Runs of each server, in turn, with prompts of their own; medians are compared.
    """
    blocks = requests * -(-(prompt_len + answer_len) // _BLOCK_SIZE) // 4
    flags = [model, "--load-format", load_format, "--dtype", dtype, "--log-level", "warning"]
    flags += ["--block-size", str(_BLOCK_SIZE), "--num-kv-blocks", str(blocks)]
    flags += ["--max-model-len", str(prompt_len + answer_len), "--max-num-seqs", str(requests)]
    with contextlib.ExitStack() as stack:
        kept = stack.enter_context(tempfile.TemporaryDirectory(dir=directory))
        tiers = ["--kv-disk-path", kept, "--kv-disk-bytes", "16GiB"]
        if kv_host_bytes is not None:
            tiers += ["--kv-host-bytes", kv_host_bytes]
        servers = [
            stack.enter_context(server_process([*flags, *more])).base_url for more in ([], tiers)
        ]
        seconds: list[list[float]] = [[], []]
        for number in range(repeats):
            chance = random.Random(number)
            prompts = [chance.choices(_VOCABULARY, k=prompt_len) for _ in range(requests)]
            texts: list[list[str]] = [[], []]
            for which in (0, 1)[:: 1 if number % 2 else -1]:
                began = time.perf_counter()
                texts[which] = asyncio.run(_answers(servers[which], prompts, answer_len))
                seconds[which].append(time.perf_counter() - began)
            equal = sum(one == other for one, other in zip(*texts, strict=True))
            output.stdout().print(
                f"{seconds[0][-1]:.1f} s without tiers, {seconds[1][-1]:.1f} s with; "
                f"{equal} of {requests} answers equal"
            )
        figures = asyncio.run(_figures(servers[1]))
        preempted = [asyncio.run(_num_preempted(url)) for url in servers]
    ratio = statistics.median(seconds[0]) / statistics.median(seconds[1])
    output.stdout().print(
        f"throughput with tiers is {ratio:.2f} of that without; {figures}; "
        f"{preempted[0]} requests preempted without, {preempted[1]} with"
    )


async def _answers(url: str, prompts: list[list[int]], answer_len: int) -> list[str]:
    body = {"temperature": 0, "max_tokens": answer_len, "ignore_eos": True}
    async with open_session(url) as session:
        answers = await asyncio.gather(
            *(ask(session, "/v1/completions", {**body, "prompt": prompt}) for prompt in prompts)
        )
    return [answer.text for answer in answers]


async def _num_preempted(url: str) -> int:
    async with open_session(url) as session:
        return await counter(session, "pagoda_num_preemptions_total")


async def _figures(url: str) -> str:
    async with open_session(url) as session:
        counts = await tier_figures(session)
    names = ("stored", "loaded", "failed")
    tiers = sorted({tier for tier, _ in counts})
    return "; ".join(
        f"{tier}: " + ", ".join(f"{counts[tier, n]} {n}" for n in names) for tier in tiers
    )
