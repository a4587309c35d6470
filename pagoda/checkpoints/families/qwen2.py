# SPDX-License-Identifier: Apache-2.0
"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values."""

from __future__ import annotations

from pagoda.checkpoints.families.shared import layer_windows, text_sizes, with_attention
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ModelSpec


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    windows = layer_windows(fields, spec.num_layers)
    return with_attention(spec, windows, qkv_bias=True, output_bias=False)


_QWEN2_VL = {
    **text_sizes(152_064, 8192, 29_568, 80, 64, 8, 32_768),
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}

QWEN2 = Family(
    "Qwen2ForCausalLM",
    "Qwen2, Qwen2.5, text of Qwen2-VL and Qwen2.5-VL",
    _adapt,
    gguf=GgufFormat("qwen2"),
    model_types={
        "qwen2": text_sizes(151_936, 4096, 22_016, 32, 32, 32, 32_768),
        "qwen2_vl_text": _QWEN2_VL,
        "qwen2_5_vl_text": _QWEN2_VL,
    },
    aliases=frozenset({"Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"}),
    defaults={"num_key_value_heads": 32},
)
