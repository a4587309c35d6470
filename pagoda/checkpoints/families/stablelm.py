# SPDX-License-Identifier: Apache-2.0
"""StableLM 2: Llama with layer norms, a quarter of every head being rotated (Bellagente et al. 2024)."""

from __future__ import annotations

from pagoda.checkpoints.families.shared import with_attention, with_layer_norm
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ModelSpec


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    spec = with_attention(spec, qkv_bias=fields.flag("use_qkv_bias", False), output_bias=False)
    return with_layer_norm(spec, fields, bias=True)


STABLELM = Family(
    "StableLmForCausalLM",
    "StableLM 2 1.6B, StableLM 3B",
    _adapt,
    gguf=GgufFormat(
        "stablelm",
        keys={"attention.layer_norm_epsilon": "layer_norm_eps"},
        # llama.cpp's converter says so of all models that are silent on it; those that are so lack a norm.
        read=frozenset({"use_parallel_residual"}),
    ),
    partial_rotary=0.25,
    own_keys=frozenset({"use_qkv_bias"}),
    defaults={"num_key_value_heads": 32},
)
