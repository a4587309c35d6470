# SPDX-License-Identifier: Apache-2.0
"""GLM-4.7-Flash: latent attention and experts as in DeepSeek-V3, of other sizes (Z.ai 2026)."""

from __future__ import annotations

from dataclasses import replace

from pagoda.checkpoints.families.deepseek_v3 import DEEPSEEK_V3
from pagoda.checkpoints.families.latents import with_latents
from pagoda.checkpoints.families.shared import layers_behind_dense, sigmoid_experts, with_experts
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ModelSpec

_SIZES = {"n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536}
_KINDS = "mlp_layer_types"


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    fields.require("rope_interleave", True)
    experts = sigmoid_experts(fields, _SIZES, scale=1.8)
    spec = with_latents(spec, fields, usual_query_rank=768)
    return with_experts(spec, experts, _sparse_layers(fields, spec.num_layers))


def _sparse_layers(fields: Fields, num_layers: int) -> list[int]:
    if fields.values.get(_KINDS) is None:
        return layers_behind_dense(fields, num_layers, 1)
    kinds = fields.texts(_KINDS)
    if len(kinds) != num_layers or set(kinds) - {"dense", "sparse"}:
        fields.refuse(_KINDS, f"must be a list of {num_layers} of dense, sparse")
    return [layer for layer, kind in enumerate(kinds) if kind == "sparse"]


GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    architecture="Glm4MoeLiteForCausalLM",
    models="GLM-4.7-Flash",
    adapt=_adapt,
    gguf=None,  # files are of DeepSeek's architecture, and name sizes
    defaults={
        "head_dim": 64,  # of the rotated part
        "rms_norm_eps": 1e-5,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
    },
    model_types={},
)
