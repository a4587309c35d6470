# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V2 and V3: latent attention and experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.checkpoints.families.mistral import temperature
from pagoda.checkpoints.families.shared import (
    NEXT_LAYERS,
    expert_counts,
    expert_groups,
    gguf_layers,
    layers_behind_dense,
    sigmoid_experts,
    sparse_by_kind,
    text_sizes,
    with_attention,
    with_attention_of,
    with_experts,
    with_next_token,
)
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.latent_attention import IndexSpec, LatentSpec
from pagoda.checkpoints.layer_spec import ExpertsSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.rope import YarnScaling
from pagoda.checkpoints.tensor_names import GGUF_LATENTS, TensorNames
from pagoda.errors import ConfigError

# ---- Latent attention, as config.json and GGUF files of several families spell it

GGUF = GgufFormat(
    "deepseek2",
    names=GGUF_LATENTS,
    keys={
        "attention.kv_lora_rank": "kv_lora_rank",
        "expert_count": "n_routed_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
    },
    read=frozenset(
        {"attention.q_lora_rank", "attention.key_length_mla", "attention.value_length_mla"}
        | {"expert_shared_count", "expert_weights_scale", "leading_dense_block_count", NEXT_LAYERS}
    ),
    scales_yarn=True,
)
"""The form that all families with latent attention share."""
_MOST = 65_536
"""Elements of latent vectors, and of keys of indexers, at most: their order is a tuple."""
_MOST_MSCALE = 1024
_LOG_SCALE = 0.1
"""Factor of `mscale_all_dim` in files with latent attention (llama.cpp's src/llama-model.cpp)."""


def with_latents(spec: ModelSpec, fields: Fields, usual_query_rank: int = 1536) -> ModelSpec:
    """The model with latent attention (DeepSeek-V2), whose `head_dim` so far is the rotated part of heads.

    `usual_query_rank` is `q_lora_rank` where the file is silent."""
    fields.require("attention_bias", False)
    is_direct = "q_lora_rank" in fields and fields.values["q_lora_rank"] is None
    latent = LatentSpec(
        rank=fields.positive("kv_lora_rank", 512, most=_MOST),
        rope_dim=spec.head_dim,
        nope_dim=fields.positive("qk_nope_head_dim", 128),
        value_dim=fields.positive("v_head_dim", 128),
        query_rank=None if is_direct else fields.positive("q_lora_rank", usual_query_rank),
    )
    head_dim = latent.nope_dim + latent.rope_dim
    scaling, temperature = spec.rotary["default"].scaling, 1.0
    if isinstance(scaling, YarnScaling) and scaling.mscale_all_dim is not None:
        if scaling.mscale_all_dim > _MOST_MSCALE:
            raise ConfigError(f"{fields.source}: mscale_all_dim must be at most {_MOST_MSCALE}.")
        temperature = scaling.temperature(scaling.mscale_all_dim)
    spec = with_attention(spec, latent=latent, scale=head_dim**-0.5 * temperature**2)
    return replace(spec, head_dim=head_dim, num_kv_heads=1)


def gguf_latents(fields: Fields) -> Mapping[str, object]:
    """Values of config.json of files with latent attention; `deepseek2` is their architecture.

    Older files have the lengths of a head's keys and values where newer ones have those of latent vectors."""
    lengths = ("attention.key_length", "attention.value_length")
    own = (f"{name}_mla" if f"{name}_mla" in fields else name for name in lengths)
    key, value = (fields.positive(name) for name in own)
    rotated = fields.positive("rope.dimension_count")
    if key <= rotated:
        fields.refuse("rope.dimension_count", f"must be below the {key} elements of a head's keys")
    query_rank = "attention.q_lora_rank"
    mscale = fields.below("rope.scaling.").amount("yarn_log_multiplier", 0.0) / _LOG_SCALE
    return {
        **gguf_layers(fields),
        "q_lora_rank": fields.positive(query_rank) if query_rank in fields else None,
        "qk_nope_head_dim": key - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value,
        "first_k_dense_replace": fields.count("leading_dense_block_count", 0),
        "n_shared_experts": fields.count("expert_shared_count", 0),
        "routed_scaling_factor": fields.number("expert_weights_scale", 1.0),
        "norm_topk_prob": fields.flag("expert_weights_norm", False),
        "rope_scaling": {"mscale": mscale, "mscale_all_dim": mscale} if mscale else {},
    }


# ---- DeepSeek-V2: latent attention, and experts scored by a softmax, chosen within groups (Liu et al. 2024)

_METHODS = ("greedy", "group_limited_greedy")


def _adapt_deepseek_v2(spec: ModelSpec, fields: Fields) -> ModelSpec:
    # The makers' own code scales weights only where it does not norm them, others do both: no model says so.
    fields.require("norm_topk_prob", False)
    method = fields.text("topk_method", "greedy")
    if method not in _METHODS:
        fields.refuse("topk_method", f"must be one of {', '.join(_METHODS)}")
    counts = expert_counts(fields, "n_routed_experts", (64, 6))
    if method == "greedy":
        for name in ("n_group", "topk_group"):
            fields.require(name, 1)
    num_groups, chosen = expert_groups(fields, *counts, (1, 1), least=1)
    routing = ExpertRouting(
        *counts,
        renormalize=False,
        num_groups=num_groups,
        groups_per_token=chosen,
        scaling_factor=fields.number("routed_scaling_factor", 1.0),
    )
    inner = fields.positive("moe_intermediate_size", 1407)
    experts = ExpertsSpec(routing, inner, shared_size=fields.count("n_shared_experts", 2) * inner)
    layers = layers_behind_dense(fields, spec.num_layers, 0)
    return with_experts(with_latents(spec, fields), experts, layers)


def _gguf_values_deepseek_v2(fields: Fields) -> Mapping[str, object]:
    """Values of all files with latent attention, and the choice of experts, within groups if there are any."""
    has_groups = fields.count("expert_group_count", 1) > 1
    return {**gguf_latents(fields), "topk_method": _METHODS[has_groups]}


DEEPSEEK_V2 = Family(
    "DeepseekV2ForCausalLM",
    "DeepSeek-V2, V2.5, V2-Lite and their Coder models",
    _adapt_deepseek_v2,
    names=TensorNames(rotates_neighbours=True),
    gguf=replace(GGUF, values=_gguf_values_deepseek_v2),
    renamed={"qk_rope_head_dim": "head_dim"},
    defaults={"qk_rope_head_dim": 64},
    own_keys=frozenset(
        {"first_k_dense_replace", "kv_lora_rank", "n_group", "n_routed_experts"}
        | {"n_shared_experts", "q_lora_rank", "routed_scaling_factor", "topk_group", "topk_method"}
    ),
)


# ---- DeepSeek-V3: latent attention, and experts scored by sigmoids behind some dense layers (DeepSeek-AI 2024)

_SIZES = {"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048}
_GATING = "expert_gating_func"


def _adapt_deepseek_v3(spec: ModelSpec, fields: Fields) -> ModelSpec:
    fields.require("rope_interleave", True)
    experts = sigmoid_experts(fields, _SIZES, scale=2.5, groups=(8, 4))
    layers = layers_behind_dense(fields, spec.num_layers, 3)
    spec = with_experts(with_latents(spec, fields), experts, layers)
    return with_next_token(with_attention_of(spec, temperature=temperature(fields)), fields)


def _gguf_values_deepseek_v3(fields: Fields) -> Mapping[str, object]:
    """Values of all files with latent attention; experts are in one group where files do not say otherwise."""
    if fields.count(_GATING) != 2:
        fields.refuse(_GATING, "must be 2, a sigmoid")
    return {"n_group": 1, "topk_group": 1, **gguf_latents(fields)}


DEEPSEEK_V3_GGUF = replace(
    GGUF,
    values=_gguf_values_deepseek_v3,
    read=GGUF.read | {_GATING},
    required=frozenset({_GATING}),
)
KEYS = frozenset(
    {"first_k_dense_replace", "kv_lora_rank", "n_group", "n_routed_experts"}
    | {"n_shared_experts", "q_lora_rank", "rope_interleave", "routed_scaling_factor"}
    | {"scoring_func", "topk_group", "topk_method"}
)
DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM",
    "DeepSeek-V3, V3.1, R1; Kimi K2, text of Kimi K2.5, Moonlight",
    _adapt_deepseek_v3,
    names=TensorNames(rotates_neighbours=True),
    gguf=DEEPSEEK_V3_GGUF,
    renamed={"qk_rope_head_dim": "head_dim"},
    defaults={"qk_rope_head_dim": 64},
    model_types={
        "deepseek_v3": text_sizes(129_280, 7168, 18_432, 61, 128, 128, 4096),
        "kimi_k2": {},
    },
    own_keys=KEYS | {"llama_4_scaling", "llama_4_scaling_beta"},
)


# ---- DeepSeek-V3.2: an indexer chooses the tokens that a token attends to (DeepSeek-AI 2025)

INDEX_KEYS = frozenset({"index_topk"})


def with_indexer(
    spec: ModelSpec, fields: Fields, usual_heads: int, *, rotates_neighbours: bool
) -> ModelSpec:
    """The model with latent attention to the tokens that an indexer of each layer chooses.

    `usual_heads` is `index_n_heads` where the file is silent."""
    latent = spec.latent
    if latent is None or latent.query_rank is None:
        fields.refuse(
            "q_lora_rank", "must be a number, as an indexer's queries are made of its vector"
        )
    index = IndexSpec(
        heads=fields.positive("index_n_heads", usual_heads),
        dim=fields.positive("index_head_dim", 128, most=_MOST),
        most=fields.positive("index_topk", 2048),
        rotates_neighbours=rotates_neighbours,
    )
    if index.dim < latent.rope_dim:
        fields.refuse("index_head_dim", f"must be at least qk_rope_head_dim ({latent.rope_dim})")
    return with_attention(spec, latent=replace(latent, index=index))


def _adapt_deepseek_v32(spec: ModelSpec, fields: Fields) -> ModelSpec:
    fields.require("rope_interleave", True)
    experts = sigmoid_experts(fields, _SIZES, scale=2.5, groups=(8, 4))
    spec = with_experts(
        with_latents(spec, fields), experts, sparse_by_kind(fields, spec.num_layers, 3)
    )
    return with_next_token(with_indexer(spec, fields, 64, rotates_neighbours=False), fields)


DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    architecture="DeepseekV32ForCausalLM",
    models="DeepSeek-V3.2 and V3.2-Exp",
    adapt=_adapt_deepseek_v32,
    gguf=None,
    model_types={},
    own_keys=KEYS | INDEX_KEYS,
)
