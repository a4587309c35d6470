# SPDX-License-Identifier: Apache-2.0
"""Experts between layer norms: Phi-3.5-MoE and DBRX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.checkpoints.families.shared import (
    expert_counts,
    with_attention,
    with_experts,
    with_given_window,
    with_layer_norm,
)
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.layer_spec import ExpertsSpec, NormSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.tensor_names import GGUF_NAMES, TensorNames

# ---- Phi-3.5-MoE: two experts, each weighed among those of like scores (Liu et al. 2024)


def _adapt_phi(spec: ModelSpec, fields: Fields) -> ModelSpec:
    fields.require("num_experts_per_tok", 2)
    count, _ = expert_counts(fields, "num_local_experts", (16, 2))
    if count < 2:
        fields.refuse("num_local_experts", "must be at least 2")
    routing = ExpertRouting(count, 2, renormalize=False, scores="given")
    jitter = fields.amount("router_jitter_noise", 0.01)
    experts = ExpertsSpec(routing, fields.positive("intermediate_size"), jitter=jitter)
    spec = with_given_window(spec, fields)
    spec = replace(
        spec,
        norm=NormSpec(fields.number("rms_norm_eps", 1e-5), "layer", bias=True),
        head_bias=fields.flag("lm_head_bias", False),
    )
    return with_experts(spec, experts, range(spec.num_layers))


_MOE = "block_sparse_moe"
PHIMOE = Family(
    "PhimoeForCausalLM",
    "Phi-3.5-MoE",
    _adapt_phi,
    names=TensorNames(
        router=f"{_MOE}.gate",
        expert_gate=f"{_MOE}.experts.{{expert}}.w1",
        expert_up=f"{_MOE}.experts.{{expert}}.w3",
        expert_down=f"{_MOE}.experts.{{expert}}.w2",
    ),
    gguf=GgufFormat(
        "phimoe",
        keys={
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "attention.sliding_window": "sliding_window",
        },
        shown=lambda names: {"lm_head_bias": "output.bias" in names},
    ),
    defaults={"num_key_value_heads": 8, "rope_theta": 1e6},
    aliases=frozenset({"PhiMoEForCausalLM"}),
    own_keys=frozenset({"num_local_experts", "lm_head_bias"}),
)


# ---- DBRX: clipped queries, experts of a layer in tensors without a dimension of their own (Databricks 2024)


def _adapt_dbrx(spec: ModelSpec, fields: Fields) -> ModelSpec:
    attention, ffn = _part(fields, "attn_config"), _part(fields, "ffn_config")
    spec = with_attention(spec, clip=attention.optional_number("clip_qkv"))
    activation = ffn.table("ffn_act_fn")
    if activation is not None:
        activation.require("name", "silu")
    # Weights of a token's experts are positive, so their 1-norm is their sum.
    renormalize = ffn.values.get("moe_normalize_expert_weights", 1) is not None
    if renormalize:
        ffn.require("moe_normalize_expert_weights", 1)
    counts = expert_counts(ffn, "moe_num_experts", (4, 1), "moe_top_k")
    experts = ExpertsSpec(ExpertRouting(*counts, renormalize), fields.positive("intermediate_size"))
    spec = with_experts(spec, experts, range(spec.num_layers))
    return with_layer_norm(spec, fields, bias=False)


def _part(fields: Fields, name: str) -> Fields:
    return fields.table(name) or Fields({}, fields.source, f"{name}.")


def _dbrx_values(fields: Fields) -> Mapping[str, object]:
    """Sizes and rotary base, which files have in tables of their own."""
    attention, ffn = _part(fields, "attn_config"), _part(fields, "ffn_config")
    sizes = {
        "num_key_value_heads": attention.positive("kv_n_heads", 1),
        "intermediate_size": ffn.positive("ffn_hidden_size", 3584),
    }
    if fields.values.get("rope_parameters") is not None:
        return sizes
    return {**sizes, "rope_theta": attention.number("rope_theta", 10_000.0)}


def _gguf_dbrx(fields: Fields) -> Mapping[str, object]:
    attention = {
        "kv_n_heads": fields.positive("attention.head_count_kv", 1),
        "rope_theta": fields.number("rope.freq_base", 10_000.0),
        "clip_qkv": fields.optional_number("attention.clamp_kqv"),
    }
    experts = {
        "ffn_hidden_size": fields.positive("feed_forward_length"),
        "moe_num_experts": fields.positive("expert_count"),
        "moe_top_k": fields.positive("expert_used_count"),
    }
    return {"attn_config": attention, "ffn_config": experts}


_QKV, _EXPERTS = "norm_attn_norm.attn.Wqkv", "ffn.experts.mlp"
DBRX = Family(
    "DbrxForCausalLM",
    "DBRX 132B",
    _adapt_dbrx,
    names=TensorNames(
        embedding="wte",
        norm="norm_f",
        layers="blocks",
        attention_norm="norm_attn_norm.norm_1",
        query=_QKV,
        key=_QKV,
        value=_QKV,
        attention_out="norm_attn_norm.attn.out_proj",
        mlp_norm="norm_attn_norm.norm_2",
        router="ffn.router.layer",
        expert_gate=f"{_EXPERTS}.w1",
        expert_up=f"{_EXPERTS}.v1",
        expert_down=f"{_EXPERTS}.w2",
        expert_layout="flat",
    ),
    gguf=GgufFormat(
        "dbrx",
        names=replace(GGUF_NAMES, mlp_norm="attn_output_norm"),
        keys={"attention.layer_norm_epsilon": "layer_norm_eps"},
        values=_gguf_dbrx,
        read=frozenset({"attention.clamp_kqv", "expert_count"}),
    ),
    renamed={
        "d_model": "hidden_size",
        "n_heads": "num_attention_heads",
        "n_layers": "num_hidden_layers",
        "max_seq_len": "max_position_embeddings",
    },
    values=_dbrx_values,
)
