# SPDX-License-Identifier: Apache-2.0
"""LFM2 with experts, which are scored by sigmoids, behind some dense layers (Liquid AI 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.checkpoints.families.lfm2 import (
    DEFAULTS,
    GGUF_LFM2,
    GGUF_WIDTH,
    NAMES,
    RENAMED,
    adapt_lfm2,
    gguf_kinds,
)
from pagoda.checkpoints.families.shared import expert_counts, with_experts
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ExpertsSpec, ModelSpec


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
