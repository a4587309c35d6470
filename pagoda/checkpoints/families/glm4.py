# SPDX-License-Identifier: Apache-2.0
"""GLM-4: half of every head is rotated, in pairs of neighbours; from GLM-4-0414 on with norms behind, too."""

from __future__ import annotations

from dataclasses import replace

from pagoda.checkpoints.families.shared import with_attention
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.tensor_names import GGUF_NEIGHBOURS, TensorNames


def _adapt_first(spec: ModelSpec, fields: Fields) -> ModelSpec:
    """GLM-4-9B: biases of queries, keys and values, none behind."""
    return with_attention(spec, qkv_bias=fields.flag("attention_bias", True), output_bias=False)


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    first = _adapt_first(spec, fields)
    return first.with_layers(lambda _, layer: replace(layer, post_norm=True))


GLM = Family(
    "GlmForCausalLM",
    "GLM-4-9B",
    _adapt_first,
    names=TensorNames(
        attention_post_norm="post_self_attn_layernorm",
        mlp_post_norm="post_mlp_layernorm",
        gate="mlp.gate_up_proj",
        up="mlp.gate_up_proj",
        rotates_neighbours=True,
    ),
    gguf=GgufFormat("chatglm", names=GGUF_NEIGHBOURS),
    defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7},
    partial_rotary=0.5,
)
GLM4 = replace(
    GLM,
    architecture="Glm4ForCausalLM",
    models="GLM-4-0414, GLM-Z1",
    adapt=_adapt,
    gguf=GgufFormat("glm4", names=GGUF_NEIGHBOURS),
)
