# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3: latent attention, and experts scored by sigmoids behind some dense layers (DeepSeek-AI 2024).

Layers that predict several tokens at once, which lie behind the others in files, are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagoda.checkpoints.families.latents import GGUF, gguf_latents, with_latents
from pagoda.checkpoints.families.shared import (
    layers_behind_dense,
    sigmoid_experts,
    text_sizes,
    with_experts,
)
from pagoda.checkpoints.family import Family
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.tensor_names import TensorNames

_SIZES = {"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048}
_GATING = "expert_gating_func"


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    fields.require("rope_interleave", True)
    experts = sigmoid_experts(fields, _SIZES, scale=2.5, groups=(8, 4))
    return with_experts(
        with_latents(spec, fields), experts, layers_behind_dense(fields, spec.num_layers, 3)
    )


def _gguf_values(fields: Fields) -> Mapping[str, object]:
    """Values of all files with latent attention; experts are in one group where files do not say otherwise."""
    if fields.count(_GATING) != 2:
        fields.refuse(_GATING, "must be 2, a sigmoid")
    return {"n_group": 1, "topk_group": 1, **gguf_latents(fields)}


DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM",
    "DeepSeek-V3, V3.1, R1; Kimi K2, text of Kimi K2.5, Moonlight",
    _adapt,
    names=TensorNames(rotates_neighbours=True),
    gguf=replace(
        GGUF, values=_gguf_values, read=GGUF.read | {_GATING}, required=frozenset({_GATING})
    ),
    renamed={"qk_rope_head_dim": "head_dim"},
    defaults={"qk_rope_head_dim": 64},
    model_types={
        "deepseek_v3": text_sizes(129_280, 7168, 18_432, 61, 128, 128, 4096),
        "kimi_k2": {},
    },
    own_keys=frozenset(
        {"first_k_dense_replace", "kv_lora_rank", "n_group", "n_routed_experts"}
        | {"n_shared_experts", "q_lora_rank", "rope_interleave", "routed_scaling_factor"}
        | {"scoring_func", "topk_group", "topk_method"}
    ),
)
