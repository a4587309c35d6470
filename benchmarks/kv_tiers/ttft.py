# SPDX-License-Identifier: Apache-2.0
"""Long prompts that an earlier server has written to SSD, beside prompts that must be computed.

One server computes some prompts and writes their blocks. A second one, over the same directory, gets these and
prompts that nobody has seen in turn. Blocks are read with O_DIRECT where the file system takes it; where it does
not, `--drop-caches` (root only) keeps them from being read from memory.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

import aiohttp

from benchmarks.kv_tiers.client import Answer, ask, open_session, tier_figures
from pagoda.cli import output
from pagoda.cli.server_process import server_process

_VOCABULARY = range(3, 256)
_BLOCK_SIZE = 16
_ANSWER = 8
_PATIENCE_S = 300.0


def ttft(
    *,
    directory: Path | None = None,
    model: str = "qwen3-0.6b",
    dtype: str = "bfloat16",
    prompt_len: int = 4000,
    prompts: int = 5,
    kv_disk_bytes: str = "8GiB",
    drop_caches: bool = False,
    seed: int | None = None,
) -> None:
    """Measure the time to the first token from SSD, after a restart, and of computing.

    Args:
        directory: Where blocks are kept; its file system is what is measured. By default a temporary one.
        model: A shape preset, with random weights.
        dtype: Of weights, activations and blocks.
        prompt_len: Random tokens in a prompt.
        prompts: How many are read, and how many computed.
        kv_disk_bytes: Room for all of them.
        drop_caches: Drop the page cache before every prompt.
        seed: Of the prompts; by default another one each time.
    """
    chance = random.Random(seed)
    known, new = (
        [chance.choices(_VOCABULARY, k=prompt_len) for _ in range(prompts)] for _ in range(2)
    )
    with tempfile.TemporaryDirectory(dir=directory) as kept:
        flags = ["--load-format", "dummy", "--dtype", dtype, "--log-level", "warning"]
        flags += ["--max-model-len", str(prompt_len + _ANSWER), "--max-num-seqs", "4"]
        flags += ["--kv-disk-path", kept, "--kv-disk-bytes", kv_disk_bytes]
        flags += ["--kv-disk-min-touches", "1", "--block-size", str(_BLOCK_SIZE)]
        with server_process([model, *flags]) as server:
            asyncio.run(_write(server.base_url, known))
        with server_process([model, *flags]) as server:
            read, computed = asyncio.run(_measure(server.base_url, known, new, drop_caches))
    _report(read, computed, _BLOCK_SIZE * _num_full_blocks(known[0]))


async def _write(base_url: str, prompts: list[list[int]]) -> None:
    """Returns when every block that a later request may use is on SSD."""
    async with open_session(base_url) as session:
        for count, prompt in enumerate(prompts, start=1):
            await ask(session, "/v1/completions", _body(prompt))
            await _until_written(session, count * _num_full_blocks(prompt))


def _num_full_blocks(prompt: list[int]) -> int:
    """Full blocks that a later request may find: the last token is always computed."""
    return (len(prompt) - 1) // _BLOCK_SIZE


async def _until_written(session: aiohttp.ClientSession, blocks: int) -> None:
    give_up = time.monotonic() + _PATIENCE_S
    while (written := (await tier_figures(session))["disk", "blocks"]) < blocks:
        if time.monotonic() > give_up:
            raise RuntimeError(f"{written} of {blocks} blocks were written in {_PATIENCE_S} s.")
        await asyncio.sleep(0.1)


async def _measure(
    base_url: str, known: list[list[int]], new: list[list[int]], drop_caches: bool
) -> tuple[list[Answer], list[Answer]]:
    read, computed = [], []
    async with open_session(base_url) as session:
        await ask(session, "/v1/completions", _body(new[0][:64]))  # the first step is slower
        for old_prompt, new_prompt in zip(known, new, strict=True):
            if drop_caches:
                _drop_caches()
            read.append(await ask(session, "/v1/completions", _body(old_prompt)))
            # Another first token: not even the block of the warm-up is found.
            computed.append(await ask(session, "/v1/completions", _body([2, *new_prompt[1:]])))
    return read, computed


def _drop_caches() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1")


def _body(prompt: list[int]) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": _ANSWER, "temperature": 0, "ignore_eos": True}


def _report(read: list[Answer], computed: list[Answer], findable: int) -> None:
    """`findable` is how many tokens of a prompt may be found cached."""
    rows = [
        (
            name,
            f"{statistics.median(answer.ttft_s for answer in answers):.3f} s",
            f"{min(a.ttft_s for a in answers):.3f}–{max(a.ttft_s for a in answers):.3f} s",
            f"{sum(a.num_cached_tokens for a in answers) / (len(answers) * findable):.2%}",
        )
        for name, answers in (("from SSD", read), ("computed", computed))
    ]
    output.stdout().print(
        output.table("", ("prompts", "TTFT, median", "all", "of full blocks, found"), rows)
    )
    ratio = statistics.median(a.ttft_s for a in computed) / statistics.median(
        a.ttft_s for a in read
    )
    output.stdout().print(f"from SSD the first token comes {ratio:.1f} times as fast")
