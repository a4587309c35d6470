# SPDX-License-Identifier: Apache-2.0
"""Real workers whose device holds a small part of a request's KV: tokens are those of one that holds all."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from small_objects import disk_under
from tier_server import Server
from tiny_models import make_model

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
