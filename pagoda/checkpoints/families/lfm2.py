# SPDX-License-Identifier: Apache-2.0
"""LFM2, dense and with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.checkpoints.families.shared import (
    conv_width,
    expert_counts,
    gguf_kv_heads,
    layer_kinds,
    text_sizes,
    with_attention,
    with_experts,
    with_state,
)
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.layer_spec import ExpertsSpec, MlpSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.state_layers import ShortConvSpec
from pagoda.checkpoints.tensor_names import GGUF_NAMES, TensorNames

# ---- LFM2: gated short convolutions in most layers, attention with norms of heads in the others (Liquid AI 2025)

_ATTENTION, _CONV = "full_attention", "conv"
_MAX_FACTOR = 1024


def adapt_lfm2(spec: ModelSpec, fields: Fields) -> ModelSpec:
    """The model with attention in some layers, and short convolutions in the others."""
    bias = fields.flag("conv_bias", False)
    mlp = MlpSpec(_intermediate_size(fields))
    conv = ShortConvSpec(spec.hidden_size, conv_width(fields, "conv_L_cache", 3), bias)
    kinds = layer_kinds(fields, spec.num_layers, (_ATTENTION, _CONV), _usual_kinds(spec, fields))
    spec = with_attention(spec, qk_norm="head")
    spec = spec.with_layers(lambda _, layer: replace(layer, mlp=mlp))
    layers = [layer for layer, kind in enumerate(kinds) if kind == _CONV]
    return with_state(spec, conv, layers, bias=bias)


def _usual_kinds(spec: ModelSpec, fields: Fields) -> list[str]:
    """Kinds of layers by the indices of those with attention, as older files have them."""
    if fields.values.get("full_attn_idxs") is None:
        return [_ATTENTION] * spec.num_layers
    attending = set(fields.integers("full_attn_idxs"))
    if not all(0 <= index < spec.num_layers for index in attending):
        fields.refuse("full_attn_idxs", f"must be a list of layers from 0 to {spec.num_layers - 1}")
    return [_ATTENTION if index in attending else _CONV for index in range(spec.num_layers)]


def _intermediate_size(fields: Fields) -> int:
    """Inner channels, of which most files tell what two thirds of a usual MLP's are made of."""
    size = fields.positive("intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    if fields.values.get("block_ffn_dim_multiplier", 1.0) is None:
        return size
    multiple = fields.positive("block_multiple_of", 256)
    factor = fields.number("block_ffn_dim_multiplier", 1.0)
    if factor > _MAX_FACTOR:
        fields.refuse("block_ffn_dim_multiplier", f"must be at most {_MAX_FACTOR}")
    size = int(factor * size)
    return -(-size // multiple) * multiple


def gguf_kinds(fields: Fields) -> Mapping[str, object]:
    """Kinds of layers: those without heads of keys and values are convolutions."""
    heads = gguf_kv_heads(fields)
    kinds = [_ATTENTION if count else _CONV for count in heads]
    return {"layer_types": kinds, "block_auto_adjust_ff_dim": False}


GGUF_WIDTH = "shortconv.l_cache"
"""Metadata of a convolution's tokens."""
GGUF_LFM2 = replace(GGUF_NAMES, norm="token_embd_norm")
NAMES = TensorNames(
    norm="model.embedding_norm",
    attention_norm="operator_norm",
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
    attention_out="self_attn.out_proj",
    mlp_norm="ffn_norm",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
)
RENAMED = {"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"}
DEFAULTS = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
LFM2 = Family(
    "Lfm2ForCausalLM",
    "LFM2 350M, 700M, 1.2B and 2.6B, text of LFM2-VL",
    adapt_lfm2,
    names=NAMES,
    gguf=GgufFormat(
        "lfm2",
        names=GGUF_LFM2,
        keys={GGUF_WIDTH: "conv_L_cache"},
        values=gguf_kinds,
        required=frozenset({GGUF_WIDTH}),
    ),
    renamed={"block_ff_dim": "intermediate_size", **RENAMED},
    defaults=DEFAULTS,
    own_keys=frozenset({"full_attn_idxs"}),
    model_types={
        "lfm2": {
            **text_sizes(65_536, 2560, 12_288, 32, 32, 8, 128_000),
            "tie_word_embeddings": True,
        }
    },
)


# ---- LFM2 with experts, which are scored by sigmoids, behind some dense layers (Liquid AI 2025)


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    spec = adapt_lfm2(spec, fields)
    routing = ExpertRouting(
        *expert_counts(fields, "num_experts", (32, 4)),
        fields.flag("norm_topk_prob", True),
        scores="sigmoid",
        scaling_factor=fields.number("routed_scaling_factor", 1.0),
    )
    experts = ExpertsSpec(
        routing,
        fields.positive("moe_intermediate_size", 1792),
        correction=fields.flag("use_expert_bias", True),
    )
    first = fields.count("num_dense_layers", 2)
    return with_experts(spec, experts, range(first, spec.num_layers))


def _gguf_values(fields: Fields) -> Mapping[str, object]:
    fields.require("expert_gating_func", 2)  # a sigmoid
    return gguf_kinds(fields)


LFM2_MOE = Family(
    "Lfm2MoeForCausalLM",
    "LFM2-8B-A1B",
    _adapt,
    gguf=GgufFormat(
        "lfm2moe",
        names=GGUF_LFM2,
        keys={
            GGUF_WIDTH: "conv_L_cache",
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_weights_scale": "routed_scaling_factor",
            "leading_dense_block_count": "num_dense_layers",
        },
        values=_gguf_values,
        required=frozenset({GGUF_WIDTH}),
        read=frozenset({"expert_gating_func"}),
    ),
    names=replace(
        NAMES,
        router="feed_forward.gate",
        correction="feed_forward.expert_bias",
        expert_gate="feed_forward.experts.{expert}.w1",
        expert_up="feed_forward.experts.{expert}.w3",
        expert_down="feed_forward.experts.{expert}.w2",
    ),
    renamed=RENAMED,
    defaults={**DEFAULTS, "block_auto_adjust_ff_dim": False},
    own_keys=frozenset(
        {"num_dense_layers", "num_experts", "routed_scaling_factor", "use_expert_bias"}
    ),
)
