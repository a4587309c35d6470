"""Qwen3-Next and 3.5: a gated delta rule in three of four layers, gated attention in the others (Qwen 2025).

Layers that predict several tokens at once (`mtp.` in files) are left out.
"""

from __future__ import annotations

from dataclasses import replace

from pagoda.checkpoints.families.shared import (
    conv_width,
    expert_counts,
    layer_kinds,
    sparse_layers,
    with_attention,
    with_experts,
    with_state,
)
from pagoda.checkpoints.family import Family
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ExpertsSpec, ModelSpec
from pagoda.checkpoints.state_layers import GatedDeltaSpec
from pagoda.checkpoints.tensor_names import TensorNames

_DELTA, _ATTENTION = "linear_attention", "full_attention"


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    every = fields.positive("full_attention_interval", 4)
    usual = [_DELTA if (layer + 1) % every else _ATTENTION for layer in range(spec.num_layers)]
    kinds = layer_kinds(fields, spec.num_layers, (_DELTA, _ATTENTION), usual)
    spec = with_attention(spec, qk_norm="head", output_gate=True)
    layers = [layer for layer, kind in enumerate(kinds) if kind == _DELTA]
    return with_state(spec, _delta(fields), layers, bias=False)


def _adapt_sparse(spec: ModelSpec, fields: Fields) -> ModelSpec:
    spec = _adapt(spec, fields)
    if fields.values.get("num_experts") == 0:
        return spec
    num_experts, per_token = expert_counts(fields, "num_experts", (512, 10))
    experts = ExpertsSpec(
        num_experts,
        per_token,
        fields.positive("moe_intermediate_size", 512),
        fields.flag("norm_topk_prob", True),
        shared_size=fields.positive("shared_expert_intermediate_size", 512),
        scores_shared=True,
    )
    return with_experts(spec, experts, sparse_layers(fields, spec.num_layers))


def _delta(fields: Fields) -> GatedDeltaSpec:
    names = ("linear_num_key_heads", "linear_num_value_heads")
    key_heads, value_heads = map(fields.positive, names, (16, 32))
    if value_heads % key_heads:
        fields.refuse(names[1], f"must be a multiple of {names[0]} ({key_heads})")
    key_dim = fields.positive("linear_key_head_dim", 128)
    width = conv_width(fields, "linear_conv_kernel_dim", 4)
    value_dim = fields.positive("linear_value_head_dim", 128)
    return GatedDeltaSpec(key_heads, value_heads, key_dim, value_dim, width)


_NAMES = TensorNames(
    norm_offset=1.0,
    state_in="linear_attn.in_proj_qkv",
    state_conv="linear_attn.conv1d",
    state_out="linear_attn.out_proj",
)
QWEN3_NEXT = Family(
    "Qwen3NextForCausalLM",
    "Qwen3-Next-80B-A3B",
    _adapt_sparse,
    names=replace(
        _NAMES,
        state_in="linear_attn.in_proj_qkvz",
        shared_gate="mlp.shared_expert.gate_proj",
        shared_up="mlp.shared_expert.up_proj",
        shared_down="mlp.shared_expert.down_proj",
        shared_router="mlp.shared_expert_gate",
    ),
    defaults={"head_dim": 256},
    partial_rotary=0.25,
    own_keys=frozenset({"num_experts", "shared_expert_intermediate_size"}),
)
QWEN3_5 = Family(
    "Qwen3_5ForCausalLM",
    "Qwen3.5 without experts: 0.8B to 27B",
    _adapt,
    names=replace(
        _NAMES,
        state_output_gate="linear_attn.in_proj_z",
        state_b="linear_attn.in_proj_b",
        state_a="linear_attn.in_proj_a",
    ),
    defaults={"head_dim": 256},
    partial_rotary=0.25,
    model_types=frozenset({"qwen3_5_text"}),
)
