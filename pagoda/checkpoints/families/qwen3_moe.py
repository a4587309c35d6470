# SPDX-License-Identifier: Apache-2.0
"""Qwen3-MoE: Qwen3 with experts in some or all layers."""

from __future__ import annotations

from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.checkpoints.families.shared import (
    expert_counts,
    sparse_layers,
    with_attention,
    with_experts,
)
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ExpertsSpec, ModelSpec


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    fields.require("use_qk_norm", True)
    windowed = fields.flag("use_sliding_window", False)
    window = fields.positive("sliding_window", 4096) if windowed else None
    spec = with_attention(spec, (window,) * spec.num_layers, qk_norm="head")
    # New files spell the field as Mixtral does.
    name = "num_local_experts" if "num_local_experts" in fields.values else "num_experts"
    if fields.values.get(name) == 0:
        return spec  # all layers are dense
    counts = expert_counts(fields, name, (128, 8))
    routing = ExpertRouting(*counts, fields.flag("norm_topk_prob", False))
    experts = ExpertsSpec(routing, fields.positive("moe_intermediate_size", 768))
    return with_experts(spec, experts, sparse_layers(fields, spec.num_layers))


QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
    _adapt,
    gguf=GgufFormat(
        "qwen3moe",
        keys={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        # Files do not say so: llama.cpp renormalizes in all models of this architecture.
        values=lambda _: {"norm_topk_prob": True},
    ),
    own_keys=frozenset({"num_experts", "num_local_experts", "use_qk_norm"}),
    defaults={"num_key_value_heads": 4},
)
