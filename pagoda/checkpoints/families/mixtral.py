# SPDX-License-Identifier: Apache-2.0
"""Mixtral: Mistral with experts in every layer (Jiang et al. 2024)."""

from __future__ import annotations

from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.checkpoints.families.shared import expert_counts, with_attention, with_experts
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ExpertsSpec, ModelSpec
from pagoda.checkpoints.tensor_names import GGUF_NEIGHBOURS, TensorNames


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    has_window = fields.values.get("sliding_window") is not None
    window = fields.positive("sliding_window") if has_window else None
    counts = expert_counts(fields, "num_local_experts", (8, 2))
    routing = ExpertRouting(*counts, renormalize=True)
    experts = ExpertsSpec(routing, fields.positive("intermediate_size"))
    windowed = with_attention(spec, (window,) * spec.num_layers)
    return with_experts(windowed, experts, range(spec.num_layers))


MIXTRAL = Family(
    "MixtralForCausalLM",
    "Mixtral 8x7B, 8x22B",
    _adapt,
    names=TensorNames(
        router="block_sparse_moe.gate",
        expert_gate="block_sparse_moe.experts.{expert}.w1",
        expert_up="block_sparse_moe.experts.{expert}.w3",
        expert_down="block_sparse_moe.experts.{expert}.w2",
    ),
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    own_keys=frozenset({"num_local_experts"}),
    gguf=GgufFormat(
        "llama",
        keys={
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "attention.sliding_window": "sliding_window",
        },
        required=frozenset({"expert_count"}),
        names=GGUF_NEIGHBOURS,
    ),
)
