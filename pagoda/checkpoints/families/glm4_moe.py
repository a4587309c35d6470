# SPDX-License-Identifier: Apache-2.0
"""GLM-4.5: experts scored by sigmoids behind some dense layers, and one for all tokens (Zeng et al. 2025).

Layers for the prediction of several tokens at once, which lie behind the others in files, are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagoda.checkpoints.families.shared import (
    NEXT_LAYERS,
    gguf_layers,
    layers_behind_dense,
    sigmoid_experts,
    with_attention,
    with_experts,
)
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.tensor_names import GGUF_NAMES

_SIZES = {"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408}


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    qk_norm = "head" if fields.flag("use_qk_norm", False) else None
    spec = with_attention(spec, qk_norm=qk_norm, output_bias=False)
    experts = sigmoid_experts(fields, _SIZES, scale=1.0)
    return with_experts(spec, experts, layers_behind_dense(fields, spec.num_layers, 1))


def _gguf_values(fields: Fields) -> Mapping[str, object]:
    if fields.count("expert_gating_func", 2) != 2:
        fields.refuse("expert_gating_func", "must be 2, a sigmoid")
    return {**gguf_layers(fields), "norm_topk_prob": fields.flag("expert_weights_norm", True)}


GLM4_MOE = Family(
    "Glm4MoeForCausalLM",
    "GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7",
    _adapt,
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
            "leading_dense_block_count": "first_k_dense_replace",
        },
        values=_gguf_values,
        read=frozenset({NEXT_LAYERS}),
    ),
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    partial_rotary=0.5,
    own_keys=frozenset(
        {"first_k_dense_replace", "n_group", "n_routed_experts", "n_shared_experts"}
        | {"routed_scaling_factor", "scoring_func", "topk_group", "use_qk_norm"}
    ),
)
