# SPDX-License-Identifier: Apache-2.0
"""GLM-4, dense and with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagoda.checkpoints.families.deepseek import (
    DEEPSEEK_V3,
    DEEPSEEK_V3_GGUF,
    INDEX_KEYS,
    KEYS,
    with_indexer,
    with_latents,
)
from pagoda.checkpoints.families.shared import (
    NEXT_LAYERS,
    gguf_layers,
    layers_behind_dense,
    sigmoid_experts,
    sparse_by_kind,
    with_attention,
    with_experts,
    with_next_token,
)
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.tensor_names import (
    GGUF_LATENTS,
    GGUF_NAMES,
    GGUF_NEIGHBOURS,
    TensorNames,
)

# ---- GLM-4: half of every head is rotated, in pairs of neighbours; from GLM-4-0414 on with norms behind, too


def _adapt_first(spec: ModelSpec, fields: Fields) -> ModelSpec:
    """GLM-4-9B: biases of queries, keys and values, none behind."""
    return with_attention(spec, qkv_bias=fields.flag("attention_bias", True), output_bias=False)


def _adapt_glm4(spec: ModelSpec, fields: Fields) -> ModelSpec:
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
    adapt=_adapt_glm4,
    gguf=GgufFormat("glm4", names=GGUF_NEIGHBOURS),
)


# ---- GLM-4.5: experts scored by sigmoids behind some dense layers, and one for all tokens (Zeng et al. 2025)

_SIZES_GLM4_MOE = {"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408}


def _adapt_glm4_moe(spec: ModelSpec, fields: Fields) -> ModelSpec:
    qk_norm = "head" if fields.flag("use_qk_norm", False) else None
    spec = with_attention(spec, qk_norm=qk_norm, output_bias=False)
    experts = sigmoid_experts(fields, _SIZES_GLM4_MOE, scale=1.0)
    spec = with_experts(spec, experts, layers_behind_dense(fields, spec.num_layers, 1))
    return with_next_token(spec, fields)


def _gguf_values(fields: Fields) -> Mapping[str, object]:
    if fields.count("expert_gating_func", 2) != 2:
        fields.refuse("expert_gating_func", "must be 2, a sigmoid")
    return {
        **gguf_layers(fields),
        "norm_topk_prob": fields.flag("expert_weights_norm", True),
        "first_k_dense_replace": fields.count(_DENSE, 0),
    }


_DENSE = "leading_dense_block_count"


GLM4_MOE = Family(
    "Glm4MoeForCausalLM",
    "GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7",
    _adapt_glm4_moe,
    gguf=GgufFormat(
        "glm4moe",
        names=replace(GGUF_NAMES, mlp_norm="post_attention_norm"),
        keys={
            "expert_count": "n_routed_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_shared_count": "n_shared_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_weights_scale": "routed_scaling_factor",
            "expert_gating_func": "expert_gating_func",
        },
        values=_gguf_values,
        shown=lambda names: {"use_qk_norm": "blk.0.attn_q_norm.weight" in names},
        read=frozenset({NEXT_LAYERS, _DENSE}),
    ),
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    partial_rotary=0.5,
    own_keys=frozenset(
        {"first_k_dense_replace", "n_group", "n_routed_experts", "n_shared_experts"}
        | {"routed_scaling_factor", "scoring_func", "topk_group", "use_qk_norm"}
    ),
)


# ---- GLM-4.7-Flash: latent attention and experts as in DeepSeek-V3, of other sizes (Z.ai 2026)

_SIZES_GLM4_MOE_LITE = {
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
}


def _adapt_glm4_moe_lite(spec: ModelSpec, fields: Fields) -> ModelSpec:
    fields.require("rope_interleave", True)
    experts = sigmoid_experts(fields, _SIZES_GLM4_MOE_LITE, scale=1.8)
    spec = with_latents(spec, fields, usual_query_rank=768)
    spec = with_experts(spec, experts, sparse_by_kind(fields, spec.num_layers))
    return with_next_token(spec, fields)


GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    architecture="Glm4MoeLiteForCausalLM",
    models="GLM-4.7-Flash",
    adapt=_adapt_glm4_moe_lite,
    own_keys=KEYS,
    gguf=None,  # files are of DeepSeek's architecture, and name sizes
    defaults={
        "head_dim": 64,  # of the rotated part
        "rms_norm_eps": 1e-5,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
    },
    model_types={},
)


# ---- GLM-5: DeepSeek-V3.2 of other sizes, whose indexer rotates neighbours (Z.ai 2026)

_SIZES_GLM5 = {"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048}


def _adapt_glm5(spec: ModelSpec, fields: Fields) -> ModelSpec:
    fields.require("rope_interleave", True)
    fields.require("index_topk_freq", 1)
    fields.require("index_topk_pattern", None)
    fields.require("indexer_rope_interleave", True)
    kinds = fields.values.get("indexer_types")
    if kinds is not None and kinds != ["full"] * spec.num_layers:
        fields.refuse(
            "indexer_types", "must be full for all layers; none may share the choice of another"
        )
    experts = sigmoid_experts(fields, _SIZES_GLM5, scale=2.5)
    spec = with_latents(spec, fields, usual_query_rank=2048)
    spec = with_experts(spec, experts, sparse_by_kind(fields, spec.num_layers, 3))
    return with_next_token(with_indexer(spec, fields, 32, rotates_neighbours=True), fields)


GLM_MOE_DSA = replace(
    GLM4_MOE_LITE,
    architecture="GlmMoeDsaForCausalLM",
    models="GLM-5",
    adapt=_adapt_glm5,
    gguf=replace(
        DEEPSEEK_V3_GGUF,
        architecture="glm-dsa",
        names=replace(
            GGUF_LATENTS,
            index_query="indexer.attn_q_b",
            index_key="indexer.attn_k",
            index_norm="indexer.k_norm",
            index_weights="indexer.proj",
        ),
        keys={
            **DEEPSEEK_V3_GGUF.keys,
            "attention.indexer.head_count": "index_n_heads",
            "attention.indexer.key_length": "index_head_dim",
            "attention.indexer.top_k": "index_topk",
        },
    ),
    defaults={**GLM4_MOE_LITE.defaults, "qk_rope_head_dim": 64},
    own_keys=GLM4_MOE_LITE.own_keys | INDEX_KEYS,
)
