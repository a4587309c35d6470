# SPDX-License-Identifier: Apache-2.0
"""Experts as in DeepSeek-V3 with attention as in Llama: dots, Solar Open, K-EXAONE, MiniMax, AFMoE."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.checkpoints.families.shared import (
    NEXT_LAYERS,
    WINDOW_PATTERN,
    every_nth_full,
    expert_counts,
    gguf_layers,
    gguf_windows,
    layers_behind_dense,
    sigmoid_experts,
    sparse_by_kind,
    typed_windows,
    with_attention,
    with_experts,
    without_rotation,
)
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.layer_spec import ExpertsSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.multipliers import Multipliers
from pagoda.checkpoints.tensor_names import GGUF_NAMES, TensorNames

_KEYS = frozenset(
    {"first_k_dense_replace", "n_group", "n_routed_experts", "n_shared_experts"}
    | {"routed_scaling_factor", "scoring_func", "topk_group", "topk_method", "use_qk_norm"}
)

# ---- dots.llm1: norms of queries and keys (Huo et al. 2025)


def _adapt_dots1(spec: ModelSpec, fields: Fields) -> ModelSpec:
    window, full = fields.values.get("sliding_window", 4096), fields.count("max_window_layers", 62)
    usual = [
        "full_attention" if window is None or layer < full else "sliding_attention"
        for layer in range(spec.num_layers)
    ]
    windows = typed_windows(fields, spec.num_layers, usual)
    spec = with_attention(spec, windows, qk_norm="head")
    silent = fields.values.get("norm_topk_prob") is None
    sizes = {"n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1408}
    told = fields.updated({"norm_topk_prob": False}) if silent else fields
    experts = sigmoid_experts(told, sizes, scale=1.0)
    return with_experts(spec, experts, layers_behind_dense(fields, spec.num_layers, 0))


_GGUF_EXPERTS = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}
_GATING = frozenset({"expert_gating_func"})


def _gguf_values(fields: Fields) -> Mapping[str, object]:
    fields.require("expert_gating_func", 2)  # a sigmoid
    return {"sliding_window": None, "norm_topk_prob": fields.flag("expert_weights_norm", False)}


DOTS1 = Family(
    "Dots1ForCausalLM",
    "dots.llm1",
    _adapt_dots1,
    gguf=GgufFormat(
        "dots1",
        keys=_GGUF_EXPERTS,
        values=_gguf_values,
        read=_GATING,
    ),
    defaults={"num_key_value_heads": 32},
    own_keys=_KEYS,
)


# ---- Solar Open: experts in every layer (Upstage 2025)


def _adapt_solar(spec: ModelSpec, fields: Fields) -> ModelSpec:
    fields.require("use_qk_norm", False)
    fields.require("first_k_dense_replace", 0)
    spec = with_attention(spec, output_bias=False)
    sizes = {"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1280}
    experts = sigmoid_experts(fields, sizes, scale=1.0)
    return with_experts(spec, experts, range(spec.num_layers))


SOLAR_OPEN = Family(
    "SolarOpenForCausalLM",
    "Solar Open 100B",
    _adapt_solar,
    defaults={
        **{"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "head_dim": 128, "rope_theta": 1e6},
        "intermediate_size": 10_240,
    },
    partial_rotary=1.0,
    own_keys=_KEYS,
)


# ---- K-EXAONE: norms of queries and keys; layers that see all do not tell positions (LG AI Research 2025)


def _adapt_exaone(spec: ModelSpec, fields: Fields) -> ModelSpec:
    windows = every_nth_full(fields, spec.num_layers, 4)
    spec = with_attention(spec, windows, qk_norm="head", qkv_bias=False, output_bias=False)
    if fields.values.get("sliding_window", 4096) is not None:
        spec = without_rotation(spec, [window is None for window in windows])
    sizes = {"n_routed_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 1024}
    experts = sigmoid_experts(fields, sizes, scale=2.5)
    return with_experts(spec, experts, sparse_by_kind(fields, spec.num_layers))


def _gguf_exaone(fields: Fields) -> Mapping[str, object]:
    """Values of a file, whose number of blocks may count layers that predict several tokens at once."""
    fields.require("expert_gating_func", 2)
    window = {"sliding_window": None} if not fields.values.get(_WINDOW) else gguf_windows(fields)
    return {
        **window,
        **gguf_layers(fields),
        "first_k_dense_replace": fields.count("leading_dense_block_count", 0),
        "norm_topk_prob": fields.flag("expert_weights_norm", False),
        "n_group": fields.positive("expert_group_count", 1),
        "topk_group": fields.positive("expert_group_used_count", 1),
    }


_WINDOW = "attention.sliding_window"
EXAONE_MOE = Family(
    "ExaoneMoeForCausalLM",
    "K-EXAONE 236B",
    _adapt_exaone,
    names=TensorNames(correction="mlp.e_score_correction_bias"),
    gguf=GgufFormat(
        "exaone-moe",
        keys={**_GGUF_EXPERTS, _WINDOW: "sliding_window"},
        values=_gguf_exaone,
        read=_GATING
        | {NEXT_LAYERS, WINDOW_PATTERN, "expert_group_count", "expert_group_used_count"},
    ),
    renamed={"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
    defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5},
    aliases=frozenset({"ExaoneMoEForCausalLM"}),
    own_keys=_KEYS | {"num_experts", "num_shared_experts"},
)


# ---- MiniMax-M2: one norm for the queries of all heads, half of every head rotated (MiniMax 2025)


def _adapt_minimax(spec: ModelSpec, fields: Fields) -> ModelSpec:
    fields.require("scoring_func", "sigmoid")
    fields.require("shared_intermediate_size", 0)
    counts = expert_counts(fields, "num_local_experts", (256, 8))
    routing = ExpertRouting(*counts, renormalize=True, scores="sigmoid")
    experts = ExpertsSpec(routing, fields.positive("intermediate_size"), correction=True)
    return with_experts(with_attention(spec, qk_norm="all"), experts, range(spec.num_layers))


def _minimax_values(fields: Fields) -> Mapping[str, object]:
    """The part of a head that is rotated, of which files tell the dimensions."""
    if fields.values.get("rotary_dim") is None:
        return {}
    head_dim = fields.positive("head_dim")
    return {"partial_rotary_factor": fields.positive("rotary_dim") / head_dim}


def _gguf_minimax(fields: Fields) -> Mapping[str, object]:
    fields.require("expert_gating_func", 2)
    fields.require("expert_weights_norm", True)
    return {"intermediate_size": fields.positive("expert_feed_forward_length")}


_MOE = "block_sparse_moe"
MINIMAX_M2 = Family(
    "MiniMaxM2ForCausalLM",
    "MiniMax-M2, MiniMax-M2.1",
    _adapt_minimax,
    names=TensorNames(
        router=f"{_MOE}.gate",
        correction=f"{_MOE}.e_score_correction_bias",
        expert_gate=f"{_MOE}.experts.{{expert}}.w1",
        expert_up=f"{_MOE}.experts.{{expert}}.w3",
        expert_down=f"{_MOE}.experts.{{expert}}.w2",
    ),
    gguf=GgufFormat(
        "minimax-m2",
        keys={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        values=_gguf_minimax,
        read=_GATING,
    ),
    values=_minimax_values,
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5e6},
    partial_rotary=1.0,
    own_keys=frozenset({"num_local_experts", "scoring_func", "use_qk_norm"}),
)


# ---- AFMoE: gated attention, norms behind, positions in layers with windows alone (Arcee 2025)


def _adapt_afmoe(spec: ModelSpec, fields: Fields) -> ModelSpec:
    fields.require("attention_bias", False)
    fields.require("route_norm", True)
    every = fields.positive("global_attn_every_n_layers", 4)
    kinds = ("sliding_attention", "full_attention")
    usual = [kinds[(layer + 1) % every == 0] for layer in range(spec.num_layers)]
    windows = typed_windows(fields, spec.num_layers, usual, 1024)
    spec = with_attention(spec, windows, qk_norm="head", output_gate=True)
    spec = without_rotation(spec, [window is None for window in windows])
    spec = spec.with_layers(lambda _, layer: replace(layer, post_norm=True))
    if fields.flag("mup_enabled", False):
        spec = replace(spec, multipliers=Multipliers(embedding=math.sqrt(spec.hidden_size)))
    counts = expert_counts(fields, "num_experts", (64, 6))
    scale = fields.number("route_scale", 1.0)
    routing = ExpertRouting(*counts, renormalize=True, scores="sigmoid", scaling_factor=scale)
    inner = fields.positive("moe_intermediate_size", 1408)
    shared = fields.count("num_shared_experts", 2) * inner
    experts = ExpertsSpec(routing, inner, correction=True, shared_size=shared)
    first = fields.count("num_dense_layers", 1)
    return with_experts(spec, experts, range(first, spec.num_layers))


def _gguf_afmoe(fields: Fields) -> Mapping[str, object]:
    """llama.cpp scales the embeddings of all files."""
    fields.require("expert_gating_func", 2)
    fields.require("expert_weights_norm", True)
    dense = fields.count("leading_dense_block_count", 0)
    return {"mup_enabled": True, "num_dense_layers": dense, **gguf_windows(fields)}


AFMOE = Family(
    "AfmoeForCausalLM",
    "Trinity Nano, Mini and Large",
    _adapt_afmoe,
    names=TensorNames(
        attention_gate="self_attn.gate_proj",
        mlp_norm="pre_mlp_layernorm",
        mlp_post_norm="post_mlp_layernorm",
        router="mlp.router.gate",
        correction="mlp.expert_bias",
    ),
    gguf=GgufFormat(
        "afmoe",
        names=replace(GGUF_NAMES, attention_gate="attn_gate"),
        keys={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_shared_count": "num_shared_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_weights_scale": "route_scale",
            _WINDOW: "sliding_window",
        },
        values=_gguf_afmoe,
        read=_GATING | {"leading_dense_block_count", WINDOW_PATTERN},
    ),
    defaults={"rms_norm_eps": 1e-5, "head_dim": 128},
    own_keys=frozenset({"num_dense_layers", "num_experts", "num_shared_experts", "route_scale"}),
)
