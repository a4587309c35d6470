# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next and Qwen3.5: most layers have a gated delta rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagoda.checkpoints.draft_heads import DraftHeadSpec
from pagoda.checkpoints.families.qwen import GGUF_EXPERTS, SHARED_NAMES, with_shared_expert
from pagoda.checkpoints.families.shared import (
    NEXT_LAYERS,
    conv_width,
    gguf_layers,
    layer_kinds,
    text_sizes,
    with_attention,
    with_state,
)
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.state_layers import GatedDeltaSpec
from pagoda.checkpoints.tensor_names import GGUF_NAMES, TensorNames

# ---- Qwen3.5: a gated delta rule in three of four layers, gated attention in the others (Qwen 2025)

_DELTA, _ATTENTION = "linear_attention", "full_attention"
_HEAD = DraftHeadSpec(
    layers="mtp.layers",
    norm="mtp.norm",
    hidden_norm="mtp.pre_fc_norm_hidden",
    embedding_norm="mtp.pre_fc_norm_embedding",
    joined="mtp.fc",
    passes_normed=True,
)
"""The head that guesses one more token; files have it or not, whatever config.json says."""
_KEEP_STATES = "attention.recurrent_layers"
"""Metadata of newer files: whether each layer has a delta rule."""


def adapt_delta(spec: ModelSpec, fields: Fields) -> ModelSpec:
    """The model with gated attention in some layers, and a gated delta rule in the others."""
    every = fields.positive("full_attention_interval", 4)
    usual = [_DELTA if (layer + 1) % every else _ATTENTION for layer in range(spec.num_layers)]
    kinds = layer_kinds(fields, spec.num_layers, (_DELTA, _ATTENTION), usual)
    spec = with_attention(spec, qk_norm="head", output_gate=True)
    layers = [layer for layer, kind in enumerate(kinds) if kind == _DELTA]
    spec = with_state(spec, _delta(fields), layers, bias=False)
    return replace(spec, next_token=_HEAD)


def _delta(fields: Fields) -> GatedDeltaSpec:
    names = ("linear_num_key_heads", "linear_num_value_heads")
    key_heads, value_heads = map(fields.positive, names, (16, 32))
    if value_heads % key_heads:
        fields.refuse(names[1], f"must be a multiple of {names[0]} ({key_heads})")
    key_dim = fields.positive("linear_key_head_dim", 128)
    width = conv_width(fields, "linear_conv_kernel_dim", 4)
    value_dim = fields.positive("linear_value_head_dim", 128)
    return GatedDeltaSpec(key_heads, value_heads, key_dim, value_dim, width)


def gguf_values(fields: Fields) -> Mapping[str, object]:
    """Size of values, of which files tell that of all heads, and what they do not tell."""
    heads = fields.positive("ssm.time_step_rank")
    values: dict[str, object] = {
        "linear_value_head_dim": fields.positive("ssm.inner_size") // heads,
        # llama.cpp renormalizes in all models of these architectures.
        "norm_topk_prob": True,
    }
    layers = gguf_layers(fields)
    flags = fields.values.get(_KEEP_STATES)
    if isinstance(flags, list):
        own = flags[: layers["num_hidden_layers"]]
        values["layer_types"] = [_DELTA if flag else _ATTENTION for flag in own]
    return {**layers, **values}


GGUF_KEYS = {
    "full_attention_interval": "full_attention_interval",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.time_step_rank": "linear_num_value_heads",
}
"""Metadata of delta rules, with the keys of config.json that say the same."""
GGUF_READ = frozenset({NEXT_LAYERS, _KEEP_STATES, "ssm.inner_size"})
GGUF_DELTA = replace(
    GGUF_NAMES,
    mlp_norm="post_attention_norm",
    state_in="attn_qkv",
    state_conv="ssm_conv1d",
    state_out="ssm_out",
    state_output_gate="attn_gate",
    state_gates="ssm_ba",
    state_decay="ssm_a",
    log_decay=False,
    state_bias="ssm_dt.bias",
    state_norm="ssm_norm",
)
GGUF_TILED = replace(GGUF_DELTA, state_b="ssm_beta", state_a="ssm_alpha", tiled_values=True)
NAMES = TensorNames(
    norm_offset=1.0,
    state_in="linear_attn.in_proj_qkv",
    state_conv="linear_attn.conv1d",
    state_out="linear_attn.out_proj",
)
QWEN3_5 = Family(
    "Qwen3_5ForCausalLM",
    "Qwen3.5 without experts: 0.8B to 27B",
    adapt_delta,
    names=replace(
        NAMES,
        state_output_gate="linear_attn.in_proj_z",
        state_b="linear_attn.in_proj_b",
        state_a="linear_attn.in_proj_a",
    ),
    gguf=GgufFormat(
        "qwen35",
        names=GGUF_TILED,
        keys=GGUF_KEYS,
        values=gguf_values,
        read=GGUF_READ,
    ),
    defaults={"num_key_value_heads": 4, "head_dim": 256},
    partial_rotary=0.25,
    model_types={"qwen3_5_text": text_sizes(248_320, 4096, 12_288, 32, 16, 4, 32_768)},
)


# ---- Qwen3.5 with experts in all layers, and one more that every token goes through by its own score (Qwen 2025)


def _adapt_qwen3_5_moe(spec: ModelSpec, fields: Fields) -> ModelSpec:
    fields.require("norm_topk_prob", True)
    return with_shared_expert(
        adapt_delta(spec, fields), fields, counts=(256, 8), inner=512, shared=512, renormalize=True
    )


QWEN3_5_MOE = replace(
    QWEN3_5,
    architecture="Qwen3_5MoeForCausalLM",
    models="Qwen3.5 with experts: 35B-A3B to 397B-A17B",
    adapt=_adapt_qwen3_5_moe,
    names=replace(QWEN3_5.names, **SHARED_NAMES),
    gguf=GgufFormat(
        "qwen35moe",
        names=GGUF_TILED,
        keys={**GGUF_KEYS, **GGUF_EXPERTS},
        values=gguf_values,
        read=GGUF_READ,
    ),
    # No layer is dense, and files do not say how large one would be.
    defaults={
        **QWEN3_5.defaults,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        "norm_topk_prob": True,
    },
    model_types={"qwen3_5_moe_text": text_sizes(248_320, 2048, 512, 40, 16, 2, 32_768)},
    own_keys=frozenset({"num_experts", "shared_expert_intermediate_size"}),
    joins_experts=True,
)


# ---- Qwen3-Next: layers as in Qwen3.5, with experts and one more by its own score, as in Qwen2-MoE (Qwen 2025)


def _adapt_qwen3_next(spec: ModelSpec, fields: Fields) -> ModelSpec:
    return with_shared_expert(
        adapt_delta(spec, fields), fields, counts=(512, 10), inner=512, shared=512, renormalize=True
    )


QWEN3_NEXT = Family(
    "Qwen3NextForCausalLM",
    "Qwen3-Next-80B-A3B",
    _adapt_qwen3_next,
    names=replace(NAMES, state_in="linear_attn.in_proj_qkvz", **SHARED_NAMES),
    gguf=GgufFormat(
        "qwen3next",
        names=GGUF_DELTA,
        keys={**GGUF_KEYS, **GGUF_EXPERTS},
        values=gguf_values,
        read=GGUF_READ,
    ),
    defaults={"num_key_value_heads": 2, "head_dim": 256},
    partial_rotary=0.25,
    own_keys=frozenset({"num_experts", "shared_expert_intermediate_size"}),
)
