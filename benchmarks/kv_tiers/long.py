# SPDX-License-Identifier: Apache-2.0
"""One context that grows far beyond what the device holds: what its prompt and its tokens cost at each depth.

Prompts of doubling lengths begin alike, so each computes only what it has beyond the one before, behind segments
in host memory or on SSD. Then a few tokens are decoded there. Lines through what was measured say what comes
later.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import linear_regression
from typing import NamedTuple

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.kv_tiers.client import answer_body, ask, gaps, open_session, token_times
from pagoda.cli import output
from pagoda.cli.server_process import server_process
from pagoda.messages.segments import SEGMENT

_VOCABULARY = range(3, 256)
_DECODED = 8
"""Tokens behind each prompt."""


class Depth(NamedTuple):
    """Costs of a context of so many tokens."""

    length: int
    computed: int
    """Tokens of the prompt that no storey had."""
    prompt_s: float
    token_s: float
    """Seconds of a decoded token, the median of some."""
    token_bytes: float
    """Bytes that were streamed for one."""


def long(
    *,
    directory: Path | None = None,
    model: str = "qwen3-0.6b",
    dtype: str = "bfloat16",
    quantization: str = "int8",
    kv_cache_dtype: str = "int8",
    context: int = 32768,
    target: int = 131072,
    device_tokens: int = 8192,
    kv_host_bytes: str = "8GiB",
    kv_disk_bytes: str = "32GiB",
) -> None:
    """Measure prompt and tokens of one context that is streamed, and reckon those of a longer one.

    Args:
        directory: Where blocks are kept on SSD; None keeps them in host memory.
        model: A shape preset, with random weights.
        dtype: Of activations.
        quantization: Of weights.
        kv_cache_dtype: Of blocks.
        context: Tokens of the longest prompt that is computed.
        target: Tokens of the context that is reckoned.
        device_tokens: Tokens that the device holds.
        kv_host_bytes: Host memory, without a directory.
        kv_disk_bytes: Room on SSD.
    """
    flags = ["--load-format", "dummy", "--dtype", dtype, "--quantization", quantization]
    flags += ["--kv-cache-dtype", kv_cache_dtype, "--max-model-len", str(context + 64)]
    flags += ["--max-num-seqs", "1", "--num-kv-blocks", str(device_tokens // 32)]
    flags += ["--block-size", "32", "--speculative-config", '{"method": "off"}']
    with tempfile.TemporaryDirectory(dir=directory) as kept:
        below = ["--kv-host-bytes", kv_host_bytes]
        if directory is not None:
            below = ["--kv-disk-path", kept, "--kv-disk-bytes", kv_disk_bytes]
        with server_process([model, *flags, *below, "--log-level", "warning"]) as server:
            depths = asyncio.run(_measure(server.base_url, context))
    _reckon(depths, target)


async def _measure(base_url: str, context: int) -> list[Depth]:
    prompt = random.Random(1).choices(_VOCABULARY, k=context)
    depths: list[Depth] = []
    length = SEGMENT
    async with open_session(base_url) as session:
        while length <= context:
            answer = await ask(session, "/v1/completions", answer_body(prompt[:length], 1))
            before = await _streamed_bytes(session)
            times = await token_times(session, answer_body(prompt[:length], _DECODED))
            between = sorted(gaps(times))
            streamed = (await _streamed_bytes(session) - before) / _DECODED
            computed = length - answer.num_cached_tokens
            depths.append(
                Depth(length, computed, answer.ttft_s, between[len(between) // 2], streamed)
            )
            _show(depths[-1])
            length *= 2
    return depths


def _show(depth: Depth) -> None:
    rate = depth.token_bytes / depth.token_s / 1e9
    output.stdout().print(
        f"{depth.length} tokens: {depth.computed} computed in {depth.prompt_s:.1f} s, "
        f"{depth.computed / depth.prompt_s:.0f} tokens/s; then {depth.token_s * 1e3:.0f} ms a token, "
        f"{depth.token_bytes / 2**20:.0f} MiB streamed for it, {rate:.2f} GB/s"
    )


def _reckon(depths: Sequence[Depth], target: int) -> None:
    """Prints the lines: seconds of a prompt's token by the tokens in front of it, and of a decoded one."""
    if len(depths) < 2:
        return
    middles = [depth.length - depth.computed / 2 for depth in depths]
    slope, base = linear_regression(middles, [depth.prompt_s / depth.computed for depth in depths])
    prompt_s = base * target + slope * target**2 / 2
    token_slope, token_base = linear_regression(
        [depth.length for depth in depths], [depth.token_s for depth in depths]
    )
    output.stdout().print(
        f"a token of the prompt takes {base * 1e3:.2f} ms and {slope * 1e6:.3f} ms for each 1,000 in front of it: "
        f"{prompt_s / 60:.0f} minutes for {target}; then a token takes {token_base + token_slope * target:.2f} s"
    )


async def _streamed_bytes(session: aiohttp.ClientSession) -> float:
    async with session.get("/metrics") as response:
        text = await response.text()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "pagoda_kv_streamed_bytes_total"
    )
