# SPDX-License-Identifier: Apache-2.0
"""Seed-OSS: Llama with biases of queries, keys and values, and of the MLP if it says so."""

from __future__ import annotations

from dataclasses import replace

from pagoda.checkpoints.families.shared import with_attention
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import MlpSpec, ModelSpec
from pagoda.checkpoints.tensor_names import GGUF_NAMES


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    mlp = MlpSpec(fields.positive("intermediate_size"), fields.flag("mlp_bias", False))
    spec = spec.with_layers(lambda _, layer: replace(layer, mlp=mlp))
    return with_attention(
        spec,
        qkv_bias=fields.flag("attention_bias", True),
        output_bias=fields.flag("attention_out_bias", False),
    )


SEED_OSS = Family(
    "SeedOssForCausalLM",
    "Seed-OSS",
    _adapt,
    gguf=GgufFormat("seed_oss", names=replace(GGUF_NAMES, mlp_norm="post_attention_norm")),
    defaults={"num_key_value_heads": 8, "head_dim": 128},
    own_keys=frozenset({"mlp_bias", "attention_out_bias"}),
)
