# SPDX-License-Identifier: Apache-2.0
"""Answers beside a request whose KV does not fit the device, and that request's own tokens.

A prompt of several times what the device holds is computed once. Then a short request answers alone, then beside
an answer to the long prompt, whose segments lie in host memory or on SSD and are read in every step of it.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.kv_tiers.client import answer_body, ask, gaps, open_session, token_times
from pagoda.cli import output
from pagoda.cli.server_process import server_process

_VOCABULARY = range(3, 256)
_BLOCK_SIZE = 16


def stream(
    *,
    directory: Path | None = None,
    model: str = "qwen3-0.6b",
    dtype: str = "bfloat16",
    kv_cache_dtype: str = "int8",
    context: int = 12288,
    device_tokens: int = 6144,
    kv_host_bytes: str = "4GiB",
    kv_disk_bytes: str = "8GiB",
    tokens: int = 400,
) -> None:
    """Measure gaps between tokens beside a request that is streamed.

    Args:
        directory: Where blocks are kept on SSD; None keeps them in host memory.
        model: A shape preset, with random weights.
        dtype: Of weights and activations.
        kv_cache_dtype: Of blocks.
        context: Tokens of the long prompt.
        device_tokens: Tokens that the device holds.
        kv_host_bytes: Host memory, without a directory.
        kv_disk_bytes: Room on SSD.
        tokens: Of the short answer.
    """
    flags = ["--load-format", "dummy", "--dtype", dtype, "--kv-cache-dtype", kv_cache_dtype]
    flags += ["--max-model-len", str(context + 4096), "--max-num-seqs", "4", "--speculative-config"]
    flags += ['{"method": "off"}', "--log-level", "warning", "--block-size", str(_BLOCK_SIZE)]
    flags += ["--num-kv-blocks", str(device_tokens // _BLOCK_SIZE)]
    with tempfile.TemporaryDirectory(dir=directory) as kept:
        below = ["--kv-host-bytes", kv_host_bytes]
        if directory is not None:
            below = ["--kv-disk-path", kept, "--kv-disk-bytes", kv_disk_bytes]
        with server_process([model, *flags, *below]) as server:
            asyncio.run(_measure(server.base_url, context, tokens))


async def _measure(base_url: str, context: int, tokens: int) -> None:
    long_prompt = random.Random(1).choices(_VOCABULARY, k=context)
    short_prompt = random.Random(2).choices(_VOCABULARY, k=64)
    console = output.stdout()
    async with open_session(base_url) as session:
        began = time.perf_counter()
        await ask(session, "/v1/completions", answer_body(long_prompt, 1))
        console.print(f"prompt of {context} tokens: {time.perf_counter() - began:.1f} s")
        alone = gaps(await token_times(session, answer_body(long_prompt, 24)))
        console.print(f"its tokens alone: {statistics.median(alone) * 1e3:.0f} ms each, median")
        before = gaps(await token_times(session, answer_body(short_prompt, tokens)))
        long = asyncio.create_task(token_times(session, answer_body(long_prompt, 4000)))
        await asyncio.sleep(4 * max(alone))
        begun = time.perf_counter()
        beside = gaps(await token_times(session, answer_body(short_prompt, tokens)))
        ended = time.perf_counter()
        long.cancel()
        await asyncio.wait([long])
        async with session.get("/v1/load") as response:
            load = await response.json()
    for name, found in (("alone", before), ("beside it", beside)):
        p99 = sorted(found)[len(found) * 99 // 100]
        console.print(
            f"short answer {name}: {statistics.median(found) * 1e3:.1f} ms median, {p99 * 1e3:.1f} ms p99, "
            f"{statistics.mean(found) * 1e3:.1f} ms mean, {max(found) * 1e3:.1f} ms at most"
        )
    console.print(f"in {ended - begun:.1f} s; {json.dumps(load, sort_keys=True)}", soft_wrap=True)
