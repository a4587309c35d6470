# SPDX-License-Identifier: Apache-2.0
"""A model directory from disk to the first answers: seconds to ready, first tokens, and memory under load.

`python -m benchmarks.cold_start MODEL [--starts 3] [--streams 16]`. Before each start the files of weights are
dropped from the page cache.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from cyclopts import App

from benchmarks.cpu.processes import resident_bytes
from benchmarks.figure import Figure
from pagoda.checkpoints.checkpoint import weight_files
from pagoda.cli.openai_client import OpenAIClient
from pagoda.cli.server_process import ServerProcess, server_process
from pagoda.ipc.machine import format_bytes

_PROMPT_TOKENS = 256
_OUTPUT_TOKENS = 64
_FIRST_REQUESTS = 20
_PIECE = 2**23
_app = App()


@_app.default
def main(model: Path, *, starts: int = 3, streams: int = 16, num_kv_blocks: int = 640) -> None:
    """Prints the figures.

    Args:
        model: A Hugging Face model directory.
        starts: How often to start the server.
        streams: Requests at a time in the load whose memory is measured.
        num_kv_blocks: Blocks of the KV cache, which the load fills.
    """
    for figure in _measure(model, starts, streams, num_kv_blocks):
        print(f"{figure.what}: {figure.measured} (target: {figure.target})")


def _measure(model: Path, starts: int, streams: int, num_kv_blocks: int) -> Iterator[Figure]:
    command = f"python -m benchmarks.cold_start {model}"
    arguments = [str(model), "--max-model-len", "2048", "--num-kv-blocks", str(num_kv_blocks)]
    arguments += ["--log-level", "warning"]
    _drop(model)
    rate = _read(model)
    yield Figure("disk", f"{rate / 1e6:,.0f} MB/s", "-", command)
    seconds = []
    for _ in range(starts):
        _drop(model)
        began = time.perf_counter()
        with server_process(arguments):
            seconds.append(time.perf_counter() - began)
    listed = ", ".join(f"{each:.2f}" for each in seconds)
    yield Figure(
        "ready, weights not in the page cache",
        f"{statistics.median(seconds):.2f} s ({listed})",
        "≤ 4 s for 0.6B bf16",
        command,
    )
    with server_process(arguments) as server:
        first = asyncio.run(_ask(server, 1, _FIRST_REQUESTS, 2, seed=0))
        listed = ", ".join(f"{1e3 * each:.0f}" for each in first)
        median = 1e3 * statistics.median(first)
        yield Figure(
            f"first token of the first {_FIRST_REQUESTS} requests of {_PROMPT_TOKENS} tokens",
            f"{median:.0f} ms ({listed})",
            "-",
            command,
        )
        asyncio.run(_ask(server, streams, 2 * streams, _OUTPUT_TOKENS, seed=1))
        shares = resident_bytes(server.pid)
    yield Figure(
        f"proportional set size after {streams} streams",
        f"{format_bytes(sum(shares))} ({' + '.join(map(format_bytes, shares))})",
        "≤ weights + KV + 450 MB",
        command,
    )


def _drop(model: Path) -> None:
    for path in weight_files(model):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(model: Path) -> float:
    """Bytes a second at which the files are read, one after the other."""
    began, num_bytes = time.perf_counter(), 0
    for path in weight_files(model):
        with path.open("rb", buffering=0) as file:
            while count := len(file.read(_PIECE)):
                num_bytes += count
    return num_bytes / (time.perf_counter() - began)


async def _ask(
    server: ServerProcess, streams: int, requests: int, output_tokens: int, seed: int
) -> list[float]:
    """Seconds to the first token of each request, in the order in which they were answered."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 250) for _ in range(_PROMPT_TOKENS)] for _ in range(requests)]
    seconds: list[float] = []
    async with OpenAIClient(server.base_url) as client:
        model = await client.first_model()

        async def stream() -> None:
            while prompts:
                body = {"model": model, "prompt": prompts.pop(), "max_tokens": output_tokens}
                began, first = time.perf_counter(), None
                rest = {"ignore_eos": True, "temperature": 0, "stream": True}
                async for at, answers in client.stream("/v1/completions", body | rest):
                    if first is None and any(c.has_output for a in answers for c in a.choices):
                        first = at - began
                seconds.append(first or 0.0)

        await asyncio.gather(*(stream() for _ in range(streams)))
    return seconds


if __name__ == "__main__":
    _app()
