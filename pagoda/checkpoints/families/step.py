# SPDX-License-Identifier: Apache-2.0
"""Step 3.5: windows with more heads of queries, gates of heads, experts whose gates are clamped (StepFun 2026)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace

from pagoda.checkpoints.families.deepseek import KEYS
from pagoda.checkpoints.families.shared import (
    NEXT_LAYERS,
    dense_mlp,
    sigmoid_experts,
    sparse_by_kind,
    text_sizes,
    typed_windows,
    with_attention,
    with_experts,
    with_local_rotary,
    with_query_heads,
)
from pagoda.checkpoints.family import Family
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.layer_spec import ExpertsSpec, LayerSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.rope import rope_by_layer
from pagoda.checkpoints.tensor_names import TensorNames

_HEADS, _FULL_HEADS = "num_sliding_attention_heads", "full_attention_heads"
_SIZES = {"n_routed_experts": 288, "num_experts_per_tok": 8, "moe_intermediate_size": 1280}
_SPARSE = "moe_layers_enum"
_LIMITS = ("swiglu_limits", "swiglu_limits_shared")
_LISTS = ("layer_types", "mlp_layer_types", "rope_theta", "partial_rotary_factors", *_LIMITS)
"""Lists that may have places for layers that predict several tokens at once, too."""


def _values(fields: Fields) -> Mapping[str, object]:
    """Lists of as many places as there are layers, and heads of the layers that have most."""
    count, full = fields.positive("num_hidden_layers"), fields.positive("num_attention_heads")
    other = fields.table("attention_other_setting") or Fields({}, fields.source)
    dim, groups = fields.positive("head_dim"), fields.positive("num_key_value_heads")
    same = {"attention_type": "sliding_attention", "num_attention_groups": groups, "sink": False}
    for name, value in {**same, "head_dim": dim, "true_head_dim": dim}.items():
        other.require(name, value)
    own = fields.positive(_HEADS, other.positive("num_attention_heads", full))
    lists = {name: it[:count] for name in _LISTS if isinstance(it := fields.values.get(name), list)}
    if (sparse := _sparse_layers(fields, count)) is not None:
        kinds = ["sparse" if layer in sparse else "dense" for layer in range(count)]
        lists["mlp_layer_types"] = kinds
    heads = {"num_attention_heads": max(full, own), _HEADS: own, _FULL_HEADS: full}
    return {**lists, **heads, **rope_by_layer(fields.updated(lists))}


def _sparse_layers(fields: Fields, count: int) -> frozenset[int] | None:
    """Numbers of layers, a list or text with commas; None where the file is silent."""
    found, most = fields.values.get(_SPARSE), count + fields.count(f"num_{NEXT_LAYERS}", 0)
    if found is None:
        return None
    if isinstance(found, str):
        found = [
            int(it) if it.isdecimal() and len(it) < 9 else it
            for it in found.replace(" ", "").split(",")
            if it
        ]
    if not isinstance(found, list) or any(
        type(it) is not int or not 0 <= it < most for it in found
    ):
        fields.refuse(_SPARSE, f"must list layers from 0 to {most - 1}")
    return frozenset(found)


def _limits(fields: Fields, name: str, count: int) -> list[float | None]:
    """Limits of gates and ups of each layer; files have 0 where there is none."""
    found = fields.values.get(name) or [0] * count
    limits = [it or 0 for it in found] if isinstance(found, list) else []
    if len(limits) != count or any(
        type(it) not in (int, float) or not (it == 0 or 1 <= it <= sys.float_info.max)
        for it in limits
    ):
        fields.refuse(name, f"must be a list of {count} numbers, each 0, or 1 or more")
    return [it or None for it in limits]


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    neutral = {"zero_centered": True, "use_moe_router_bias": True, "use_rope_layers": []}
    neutral |= {"use_head_wise_attn_gate": True, "mlp_bias": False, "att_impl_type": "GQA"}
    neutral |= {"sink": False}
    for name, value in {**neutral, "query_pre_attn_scalar": spec.head_dim}.items():
        fields.require(name, value)
    count = spec.num_layers
    windows = typed_windows(fields, count, ["full_attention"] * count, 512)
    spec = with_attention(spec, windows, qk_norm="head", output_gate=True, gates_heads=True)
    limits, of_shared = (_limits(fields, name, count) for name in _LIMITS)
    experts = sigmoid_experts(fields.updated({"n_shared_experts": 1}), _SIZES, scale=1.0)
    experts = replace(experts, shared_size=fields.positive("share_expert_dim", 1280))
    spec = with_experts(spec, experts, sparse_by_kind(fields, count, 3))
    heads = [fields.positive(_FULL_HEADS if it is None else _HEADS) for it in windows]
    if any(number % spec.num_kv_heads for number in heads):
        fields.refuse(_HEADS, f"must be a multiple of the heads of keys ({spec.num_kv_heads})")
    spec = with_query_heads(spec, heads)

    def change(index: int, layer: LayerSpec) -> LayerSpec:
        limit, mlp = of_shared[index], layer.mlp
        if isinstance(mlp, ExpertsSpec):
            return replace(layer, mlp=replace(mlp, limit=limits[index], shared_limit=limit))
        return replace(layer, mlp=replace(dense_mlp(layer), limit=limit))

    return with_local_rotary(spec.with_layers(change), fields, 1e4)


STEP = Family(
    "Step3p5ForCausalLM",
    "Step 3.5 Flash, text of Step 3.7 Flash",
    _adapt,
    names=TensorNames(
        attention_gate="self_attn.g_proj",
        router="moe.gate",
        correction="moe.router_bias",
        expert_gate="moe.gate_proj",
        expert_up="moe.up_proj",
        expert_down="moe.down_proj",
        shared_gate="share_expert.gate_proj",
        shared_up="share_expert.up_proj",
        shared_down="share_expert.down_proj",
        norm_offset=1.0,
    ),
    renamed={
        "num_attention_groups": "num_key_value_heads",
        "moe_num_experts": "n_routed_experts",
        "moe_top_k": "num_experts_per_tok",
        "moe_router_activation": "scoring_func",
        "moe_router_scaling_factor": "routed_scaling_factor",
        "norm_expert_weight": "norm_topk_prob",
        "share_expert_dims": "share_expert_dim",
    },
    values=_values,
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
    partial_rotary=1.0,
    model_types={"step3p5": text_sizes(128_815, 4096, 11_264, 45, 64, 8, 128_000)},
    own_keys=KEYS | {"moe_num_experts", "query_pre_attn_scalar", "use_qk_norm"},
)
