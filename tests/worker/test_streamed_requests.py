# SPDX-License-Identifier: Apache-2.0
"""Real workers whose device holds a small part of a request's KV: tokens are those of one that holds all."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import msgspec
import pytest
from small_objects import disk_under
from tier_server import COUNT, Server
from tiny_models import make_model

from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.transfers import HostSlots, TierBlocks
from pagoda.parallel.config import ParallelConfig

SEGMENT = 128
DEVICE_BLOCKS = 17
"""Two segments and a block."""
DEVICE_TOKENS = 16 * DEVICE_BLOCKS
LENGTH = 33 * DEVICE_TOKENS
FORMATS = [
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("float32", "int8"),
]


def prompt_of(length: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(320) for _ in range(length)]


def server(tmp_path: Path, formats: tuple[str, str], num_blocks: int, **options: object) -> Server:
    dtype, kv_dtype = formats
    return Server(
        tmp_path,
        ParallelConfig(),
        num_blocks,
        max_model_len=LENGTH,
        max_num_batched_tokens=512,
        segment_tokens=SEGMENT,
        dtype=dtype,
        kv_cache_dtype=kv_dtype,
        **options,
    )


@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
@pytest.mark.parametrize(("tier", "times"), [("host", 8), ("disk", 32)])
def test_tokens_are_those_of_a_device_that_holds_all(
    formats: tuple[str, str], tier: str, times: int, tmp_path: Path
) -> None:
    make_model("llama", max_position_embeddings=LENGTH).save_pretrained(tmp_path / "model")
    prompt = prompt_of(times * DEVICE_TOKENS)
    whole = server(tmp_path, formats, LENGTH // 16 + 1, kv_host_bytes=2**22)
    expected = whole.ask(prompt)
    whole.core.close()
    below = {"kv_host_bytes": 2**27} if tier == "host" else {"kv_tiers": disk_under(tmp_path)}
    it = server(tmp_path, formats, DEVICE_BLOCKS, **below)
    assert it.ask(prompt) == expected
    load = it.core.load()
    assert load.num_cold_segments >= (times - 2) * DEVICE_TOKENS // SEGMENT
    assert load.num_streamed_bytes > 0
    answers, num_cached = it.ask(prompt)
    assert answers == expected[0]
    assert num_cached > (times - 2) * DEVICE_TOKENS
    it.core.close()


def test_a_worker_and_an_engine_that_die_in_mid_stream(tmp_path: Path) -> None:
    make_model("llama", max_position_embeddings=LENGTH).save_pretrained(tmp_path / "model")
    prompt, formats = prompt_of(8 * DEVICE_TOKENS), FORMATS[0]
    whole = server(tmp_path, formats, LENGTH // 16 + 1, kv_host_bytes=2**22)
    (expected,), _ = whole.ask(prompt)
    whole.core.close()
    below = {"kv_host_bytes": 2**20, "kv_tiers": disk_under(tmp_path)}
    it = server(tmp_path, formats, DEVICE_BLOCKS, **below)
    work = Work(SamplingParams(temperature=0, seed=0, max_tokens=COUNT))
    request = GenerateRequest(request_id="long", prompt_token_ids=prompt, work=work)
    so_far = it.ask_some(request, 5)
    assert cold_kinds(it) == {HostSlots, TierBlocks}
    for pid in it.core.executor.pids().values():
        os.kill(pid, signal.SIGKILL)
    so_far += it.go_on("long", 10 - len(so_far))
    assert cold_kinds(it) == {HostSlots, TierBlocks}
    it.core.close()
    after = server(tmp_path, formats, DEVICE_BLOCKS, **below)
    again = msgspec.structs.replace(request, output_token_ids=so_far)
    (rest,), _ = after.ask_requests([again])
    assert so_far + rest == expected
    assert after.core.load().num_cold_segments > 0
    after.core.close()


def cold_kinds(it: Server) -> set[type[object]]:
    assert it.core.scheduler is not None
    table = it.core.scheduler.requests["long"].table
    return {type(hold.place) for segment in table.cold for hold in segment}
