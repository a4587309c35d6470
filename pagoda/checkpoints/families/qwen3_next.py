"""Qwen3-Next: layers as in Qwen3.5, with experts and one more by its own score, as in Qwen2-MoE (Qwen 2025)."""

from __future__ import annotations

from dataclasses import replace

from pagoda.checkpoints.families.qwen3_5 import (
    GGUF_DELTA,
    GGUF_KEYS,
    GGUF_READ,
    NAMES,
    adapt_delta,
    gguf_values,
)
from pagoda.checkpoints.families.shared import expert_counts, sparse_layers, with_experts
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ExpertsSpec, ModelSpec


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    spec = adapt_delta(spec, fields)
    if fields.values.get("num_experts") == 0:
        return spec
    num_experts, per_token = expert_counts(fields, "num_experts", (512, 10))
    experts = ExpertsSpec(
        num_experts,
        per_token,
        fields.positive("moe_intermediate_size", 512),
        fields.flag("norm_topk_prob", True),
        shared_size=fields.positive("shared_expert_intermediate_size", 512),
        scores_shared=True,
    )
    return with_experts(spec, experts, sparse_layers(fields, spec.num_layers))


QWEN3_NEXT = Family(
    "Qwen3NextForCausalLM",
    "Qwen3-Next-80B-A3B",
    _adapt,
    names=replace(
        NAMES,
        state_in="linear_attn.in_proj_qkvz",
        shared_gate="mlp.shared_expert.gate_proj",
        shared_up="mlp.shared_expert.up_proj",
        shared_down="mlp.shared_expert.down_proj",
        shared_router="mlp.shared_expert_gate",
    ),
    gguf=GgufFormat(
        "qwen3next",
        names=GGUF_DELTA,
        keys={
            **GGUF_KEYS,
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        values=gguf_values,
        read=GGUF_READ,
    ),
    defaults={"head_dim": 256},
    partial_rotary=0.25,
    own_keys=frozenset({"num_experts", "shared_expert_intermediate_size"}),
)
