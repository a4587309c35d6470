# SPDX-License-Identifier: Apache-2.0
"""Small models of forms that the embedded model does not have: a configuration each, with dummy weights."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_SHAPE = {
    "vocab_size": 960,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
WITH_STATES: Mapping[str, object] = {
    **_SHAPE,
    "architectures": ["Qwen3_5ForCausalLM"],
    "full_attention_interval": 2,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
"""A gated delta rule behind a convolution in one layer, and attention in the other."""
WITH_EXPERTS: Mapping[str, object] = {
    **_SHAPE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


@contextmanager
def model_directory(config: Mapping[str, object]) -> Iterator[str]:
    """A directory of a model that has no weights, as long as the context lasts."""
    with tempfile.TemporaryDirectory(prefix="pagoda-check-") as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield directory
