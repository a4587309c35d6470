# SPDX-License-Identifier: Apache-2.0
"""MiniMax-Text-01 and M1: lightning attention in most layers, experts in all (MiniMax 2025, arXiv 2501.08313)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.checkpoints.families.shared import (
    expert_counts,
    layer_kinds,
    with_experts,
    with_given_window,
    with_state,
)
from pagoda.checkpoints.family import Family
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.layer_spec import ExpertsSpec, LayerSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.scan_layers import LightningSpec
from pagoda.checkpoints.tensor_names import TensorNames

_LIGHTNING, _ATTENTION = "linear_attention", "full_attention"


def _values(fields: Fields) -> Mapping[str, object]:
    """Kinds of layers, and the part of a head that is rotated, as the makers' own files tell them."""
    found: dict[str, object] = {}
    if fields.values.get("attn_type_list") is not None:
        kinds = fields.integers("attn_type_list")
        found["layer_types"] = [_ATTENTION if kind else _LIGHTNING for kind in kinds]
    if fields.values.get("rotary_dim") is not None:
        usual = fields.positive("hidden_size") // fields.positive("num_attention_heads")
        size = fields.positive("head_dim", max(usual, 1))
        found["partial_rotary_factor"] = fields.positive("rotary_dim") / size
    return found


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    fields.require("postnorm", True)
    for name in ("shared_intermediate_size", "use_qk_norm"):
        fields.require(name, 0)
    usual = [_LIGHTNING if at % 2 else _ATTENTION for at in range(spec.num_layers)]
    kinds = layer_kinds(fields, spec.num_layers, (_LIGHTNING, _ATTENTION), usual)
    factors = {
        name: tuple(fields.number(f"{name}_{part}_factor", 1.0) for part in ("alpha", "beta"))
        for name in ("full_attn", "linear_attn", "mlp")
    }

    def change(index: int, layer: LayerSpec) -> LayerSpec:
        kept, added = factors["full_attn" if kinds[index] == _ATTENTION else "linear_attn"]
        return replace(layer, normed_residuals=(kept, factors["mlp"][0]), output_factor=added)

    counts = expert_counts(fields, "num_local_experts", (8, 2))
    routing = ExpertRouting(*counts, renormalize=True, scaling_factor=factors["mlp"][1])
    experts = ExpertsSpec(routing, fields.positive("intermediate_size"))
    spec = with_given_window(spec, fields).with_layers(change)
    spec = with_experts(spec, experts, range(spec.num_layers))
    layers = [layer for layer, kind in enumerate(kinds) if kind == _LIGHTNING]
    return with_state(spec, LightningSpec(spec.num_heads, spec.head_dim), layers, bias=False)


_EXPERTS = "block_sparse_moe.experts.{expert}"
MINIMAX = Family(
    "MiniMaxForCausalLM",
    "MiniMax-Text-01, MiniMax-M1",
    _adapt,
    names=TensorNames(
        router="block_sparse_moe.gate",
        expert_gate=f"{_EXPERTS}.w1",
        expert_up=f"{_EXPERTS}.w3",
        expert_down=f"{_EXPERTS}.w2",
        state_in="self_attn.qkv_proj",
        state_out="self_attn.out_proj",
        state_output_gate="self_attn.output_gate",
        state_norm="self_attn.norm",
    ),
    renamed={
        f"layernorm_{own}_{part}": f"{name}_{part}_factor"
        for own, name in (
            ("full_attention", "full_attn"),
            ("linear_attention", "linear_attn"),
            ("mlp", "mlp"),
        )
        for part in ("alpha", "beta")
    },
    values=_values,
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    partial_rotary=1.0,
    aliases=frozenset({"MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"}),
    own_keys=frozenset({"num_local_experts", "shared_intermediate_size", "use_qk_norm"}),
)
