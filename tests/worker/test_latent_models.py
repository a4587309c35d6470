# SPDX-License-Identifier: Apache-2.0
"""Files of models with latent attention besides plain safetensors, and what a token takes of the KV cache."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from driver import Driver, answer_differences, load
from family_models import make_model
from gguf import GGMLQuantizationType as Kind
from gguf_models import save_gguf
from quantized_models import fp8_format, packed_format, store_quantized
from tiny_models import continuation

from pagoda.messages.kv_groups import KVKind
from pagoda.messages.worker_config import WorkerConfig
from pagoda.parallel.config import ParallelConfig
from pagoda.worker.loading import plan_worker

PROMPT = [random.Random(0).randrange(320) for _ in range(100)]
SIZES: dict[str, Any] = {
    "initializer_range": 0.1,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "moe_intermediate_size": 64,
    "num_experts_per_tok": 8,
    "topk_group": 4,
}
"""Shapes that blocks of 32 divide; tokens go through all experts, as rounding may turn a close choice."""


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3"])
def test_older_gguf_files(name: str, tmp_path: Path) -> None:
    """Keys and values of heads are one tensor in them."""
    model = make_model(name)
    stored = save_gguf(model, tmp_path / "m.gguf", joins_latents=True)
    assert "blk.0.attn_kv_b.weight" in stored
    driver = Driver(load(tmp_path / "m.gguf", dtype="float32"))
    driver.start(0, PROMPT)
    driver.run([0], 32)
    assert driver.output(0) == continuation(model, PROMPT, 32)


@pytest.mark.parametrize("joins_latents", [False, True])
def test_quantized_gguf_files(joins_latents: bool, tmp_path: Path) -> None:
    model = make_model("deepseek-v2", **SIZES)
    kinds = {True: Kind.F32, False: Kind.Q8_0}
    save_gguf(
        model,
        tmp_path / "m.gguf",
        lambda name: kinds["attn_k_b" in name or "ffn_gate_inp" in name],
        joins_latents=joins_latents,
    )
    runner = load(tmp_path / "m.gguf", dtype="float32")
    assert answer_differences(runner, model).mean() < 0.05


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_fp8_blocks(backend: str, tmp_path: Path) -> None:
    """Files as DeepSeek-V3's, with a scale for each block of all maps, which blocks need not divide."""
    how = fp8_format((24, 24))
    model, meant = store_quantized(make_model("deepseek-v3"), tmp_path, how)
    assert "model.layers.0.self_attn.kv_b_proj" in meant
    assert "model.layers.0.self_attn.kv_a_proj_with_mqa" in meant
    driver = Driver(load(tmp_path, dtype="float32", backend=backend))
    driver.start(0, PROMPT)
    driver.run([0], 32)
    assert driver.output(0) == continuation(model, PROMPT, 32)


def test_maps_of_heads_are_dense_where_others_have_codes(tmp_path: Path) -> None:
    """Maps of latent vectors to heads are computed by each head alone; files hold them in codes all the same."""
    model = make_model("deepseek-v2", **SIZES)
    model, _ = store_quantized(model, tmp_path, packed_format(4, 32))
    for backend in ("cpu", "reference"):
        runner = load(tmp_path, dtype="float32", backend=backend)
        assert answer_differences(runner, model).mean() < 0.05


@pytest.mark.parametrize(
    ("kv_dtype", "itemsize", "scale"), [("bfloat16", 2, 0), ("int8", 1, 4), ("fp8", 1, 0)]
)
def test_a_token_takes_one_vector_of_each_layer(
    kv_dtype: str, itemsize: int, scale: int, tmp_path: Path
) -> None:
    """The rank and the rotated part, whatever the number of heads, on every rank of a stage."""
    make_model("deepseek-v3").save_pretrained(tmp_path)
    for size in (1, 2):
        parallel = ParallelConfig(tensor_parallel_size=size)
        for place in parallel.places(0):
            config = WorkerConfig(
                model=str(tmp_path),
                dtype="bfloat16",
                kv_cache_dtype=kv_dtype,
                backend="reference",
                num_blocks=64,
                max_model_len=128,
                parallel=parallel,
                place=place,
            )
            plan = plan_worker(config)
            assert plan.kv_bytes_per_token == 3 * ((32 + 8) * itemsize + scale)
            assert [group.kind for group in plan.kv_groups] == [KVKind.LATENT]
    plain = 2 * 4 * 24 * itemsize  # heads as long as a head's queries, as the paper compares
    assert plan.kv_bytes_per_token / 3 < plain / 2
