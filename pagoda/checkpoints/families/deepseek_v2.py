# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V2: latent attention, and experts scored by a softmax, chosen within groups (Liu et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.checkpoints.families.latents import GGUF, gguf_latents, with_latents
from pagoda.checkpoints.families.shared import (
    expert_counts,
    expert_groups,
    layers_behind_dense,
    with_experts,
)
from pagoda.checkpoints.family import Family
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ExpertsSpec, ModelSpec
from pagoda.checkpoints.tensor_names import TensorNames

_METHODS = ("greedy", "group_limited_greedy")


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
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


def _gguf_values(fields: Fields) -> Mapping[str, object]:
    """Values of all files with latent attention, and the choice of experts, within groups if there are any."""
    has_groups = fields.count("expert_group_count", 1) > 1
    return {**gguf_latents(fields), "topk_method": _METHODS[has_groups]}


DEEPSEEK_V2 = Family(
    "DeepseekV2ForCausalLM",
    "DeepSeek-V2, V2.5, V2-Lite and their Coder models",
    _adapt,
    names=TensorNames(rotates_neighbours=True),
    gguf=replace(GGUF, values=_gguf_values),
    renamed={"qk_rope_head_dim": "head_dim"},
    defaults={"qk_rope_head_dim": 64},
    own_keys=frozenset(
        {"first_k_dense_replace", "kv_lora_rank", "n_group", "n_routed_experts"}
        | {"n_shared_experts", "q_lora_rank", "routed_scaling_factor", "topk_group", "topk_method"}
    ),
)
