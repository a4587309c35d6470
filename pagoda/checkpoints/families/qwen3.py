# SPDX-License-Identifier: Apache-2.0
"""Qwen3: Llama with norms of queries and keys."""

from __future__ import annotations

from pagoda.checkpoints.families.shared import layer_windows, text_sizes, with_attention
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ModelSpec


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    fields.require("use_qk_norm", True)
    return with_attention(spec, layer_windows(fields, spec.num_layers), qk_norm="head")


QWEN3 = Family(
    "Qwen3ForCausalLM",
    "Qwen3, text of Qwen3-VL",
    _adapt,
    gguf=GgufFormat("qwen3"),
    defaults={"num_key_value_heads": 32, "head_dim": 128},
    model_types={
        "qwen3": text_sizes(151_936, 4096, 22_016, 32, 32, 32, 32_768),
        "qwen3_vl_text": {
            **text_sizes(151_936, 4096, 22_016, 32, 32, 32, 128_000),
            "rope_theta": 500_000.0,
        },
    },
    own_keys=frozenset({"use_qk_norm"}),
)
