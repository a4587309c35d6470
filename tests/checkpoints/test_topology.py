# SPDX-License-Identifier: Apache-2.0
"""Models that can, and cannot, be split over a number of devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_files import finish

from pagoda.checkpoints.presets import PRESETS
from pagoda.checkpoints.topology import check_topology
from pagoda.errors import ConfigError
from pagoda.parallel.config import ParallelConfig


def check(
    model: str, *, tp: int = 1, pp: int = 1, load_format: str = "dummy", experts: bool = False
) -> None:
    parallel = ParallelConfig(
        tensor_parallel_size=tp, pipeline_parallel_size=pp, expert_parallel=experts
    )
    check_topology(model, load_format, parallel)


def test_sizes_that_fit() -> None:
    for tp, pp in ((1, 1), (2, 1), (4, 7), (8, 28), (16, 1)):
        check("qwen3-0.6b", tp=tp, pp=pp)
    check("qwen3-30b-a3b", tp=8, pp=2, experts=True)
    check("mixtral-8x7b", tp=8, experts=True)


@pytest.mark.parametrize(
    ("model", "sizes", "message"),
    [
        ("qwen3-0.6b", {"tp": 3}, r"3 does not divide the 16 attention heads .* is 2 or 4\.$"),
        ("qwen3-0.6b", {"tp": 12}, r"12 does not divide .* of qwen3-0\.6b; .* is 8 or 16\.$"),
        ("qwen3-0.6b", {"tp": 99}, r"99 does not divide .*; the nearest that does is 16\.$"),
        ("qwen3-0.6b", {"pp": 29}, r"29 is more than the 28 layers .* at most 28"),
        (
            "qwen3-0.6b",
            {"tp": 2, "experts": True},
            r"needs a model with experts, which qwen3-0\.6b",
        ),
        ("mixtral-8x7b", {"tp": 16, "experts": True}, r"16 is more than the 8 experts .* most 8"),
        ("mixtral-8x7b", {"experts": True}, r"--enable-expert.* give --tensor-parallel-size 2"),
    ],
)
def test_sizes_that_do_not_fit(model: str, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(model, **sizes)


def test_key_value_heads_are_split_or_copied(tmp_path: Path) -> None:
    shape = {"num_attention_heads": 12, "num_key_value_heads": 4, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["qwen3-0.6b"] | shape))
    check(str(tmp_path), tp=12, load_format="auto")
    with pytest.raises(ConfigError, match=r"6 neither divides the 4 key-value heads .* is 4 or 12"):
        check(str(tmp_path), tp=6, load_format="auto")


@pytest.mark.parametrize(
    ("name", "changes", "what"),
    [
        ("llama-3.1-8b", {"vocab_size": 12}, "12 tokens of the vocabulary"),
        ("llama-3.1-8b", {"intermediate_size": 9}, r"9 inner channels \(intermediate_size\)"),
        ("qwen3-30b-a3b", {"moe_intermediate_size": 8}, "8 inner channels of an expert"),
        ("mixtral-8x7b", {"intermediate_size": 8}, "8 inner channels of an expert"),
    ],
)
def test_more_ranks_than_channels(
    name: str, changes: dict[str, int], what: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PRESETS[name] | changes))
    check(str(tmp_path), tp=8, load_format="auto")
    with pytest.raises(ConfigError, match=f"16 is more than the {what} of .* size is 8"):
        check(str(tmp_path), tp=16, load_format="auto")


def test_a_gguf_file_is_checked_by_its_metadata(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_block_count(1)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_context_length(64)
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), dtype=np.float32))
    finish(writer)
    check(str(path), tp=4, load_format="auto")
    with pytest.raises(ConfigError, match="3 does not divide the 4 attention heads"):
        check(str(path), tp=3, load_format="auto")


@pytest.mark.parametrize("text", [None, "{", "[]", '{"num_attention_heads": "many"}'])
def test_what_is_wrong_with_the_model_is_left_to_the_worker(
    tmp_path: Path, text: str | None
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    check(str(tmp_path), tp=3, pp=3, load_format="auto")
