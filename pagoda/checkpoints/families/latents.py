# SPDX-License-Identifier: Apache-2.0
"""Latent attention, as config.json and GGUF files of several families spell it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagoda.checkpoints.families.shared import NEXT_LAYERS, gguf_layers, with_attention
from pagoda.checkpoints.family import GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.latent_attention import LatentSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.rope import YarnScaling
from pagoda.checkpoints.tensor_names import GGUF_LATENTS

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
_LOG_SCALE = 0.1
"""Factor of `mscale_all_dim` in files with latent attention (llama.cpp's src/llama-model.cpp)."""


def with_latents(spec: ModelSpec, fields: Fields, usual_query_rank: int = 1536) -> ModelSpec:
    """The model with latent attention (DeepSeek-V2), whose `head_dim` so far is the rotated part of heads.

    `usual_query_rank` is `q_lora_rank` where the file is silent."""
    fields.require("attention_bias", False)
    is_direct = "q_lora_rank" in fields and fields.values["q_lora_rank"] is None
    latent = LatentSpec(
        rank=fields.positive("kv_lora_rank", 512),
        rope_dim=spec.head_dim,
        nope_dim=fields.positive("qk_nope_head_dim", 128),
        value_dim=fields.positive("v_head_dim", 128),
        query_rank=None if is_direct else fields.positive("q_lora_rank", usual_query_rank),
    )
    head_dim = latent.nope_dim + latent.rope_dim
    scaling, temperature = spec.rotary["default"].scaling, 1.0
    if isinstance(scaling, YarnScaling) and scaling.mscale_all_dim is not None:
        temperature = scaling.temperature(scaling.mscale_all_dim)
    spec = with_attention(spec, latent=latent, scale=head_dim**-0.5 * temperature**2)
    return replace(spec, head_dim=head_dim, num_kv_heads=1)


def gguf_latents(fields: Fields) -> Mapping[str, object]:
    """Values of config.json of files with latent attention; `deepseek2` is their architecture.

    Older files have the lengths of a head's keys and values where newer ones have those of latent vectors."""
    lengths = ("attention.key_length", "attention.value_length")
    key, value = (fields.positive(f"{name}_mla", fields.positive(name)) for name in lengths)
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
