# SPDX-License-Identifier: Apache-2.0
"""Cost of tiers without use: prompts that never return, servers with and without tiers in turn."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Literal

from pagoda.cli import output
from pagoda.cli.server_process import server_process
from pagoda.plugins.bench.compare import CompareOptions, compare


def no_reuse(
    *,
    directory: Path | None = None,
    model: Literal["pagoda-tiny", "qwen3-0.6b"] | None = None,
    repeats: int = 5,
    kv_cache_memory_bytes: str = "1GiB",
    kv_host_bytes: str = "1GiB",
) -> None:
    """Compare the throughput of random prompts with `pagoda bench compare`; the first server has no tiers.

    Args:
        directory: Where blocks are kept; by default a temporary one.
        model: Only this one: the embedded model, or random weights in the shape of Qwen3-0.6B, in bfloat16.
        repeats: Runs of each server, in turn; medians are compared.
        kv_cache_memory_bytes: Of the device of each server.
        kv_host_bytes: Of the host tier, where there is one.
    """
    tiny = CompareOptions(
        concurrency="16",
        input_len=256,
        output_len=64,
        num_prompts=256,
        repeats=repeats,
        num_warmups=8,
    )
    large = CompareOptions(
        concurrency="4",
        input_len=256,
        output_len=64,
        num_prompts=16,
        repeats=repeats,
        num_warmups=2,
    )
    shape = [
        "qwen3-0.6b",
        "--load-format",
        "dummy",
        "--dtype",
        "bfloat16",
        "--max-model-len",
        "4096",
    ]
    device = ["--kv-cache-memory-bytes", kv_cache_memory_bytes, "--log-level", "warning"]
    for name, flags, load in (("pagoda-tiny", [], tiny), ("qwen3-0.6b", shape, large)):
        if model in (name, None):
            output.stdout().print(f"{name}: no tiers; a disk; host memory and a disk")
            _compare([*flags, *device], directory, kv_host_bytes, load)


def _compare(
    flags: list[str], directory: Path | None, host_bytes: str, load: CompareOptions
) -> None:
    with contextlib.ExitStack() as stack:
        urls = []
        for host in (None, [], ["--kv-host-bytes", host_bytes]):
            tiers: list[str] = []
            if host is not None:
                kept = stack.enter_context(tempfile.TemporaryDirectory(dir=directory))
                tiers = [*host, "--kv-disk-path", kept, "--kv-disk-bytes", "4GiB"]
            urls.append(stack.enter_context(server_process([*flags, *tiers])).base_url)
        compare(base_url=tuple(urls), load=load)
