# SPDX-License-Identifier: Apache-2.0
"""OLMoE: experts in every layer, and one norm for the queries of all heads (Muennighoff et al. 2024)."""

from __future__ import annotations

from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.checkpoints.families.shared import expert_counts, with_attention, with_experts
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ExpertsSpec, ModelSpec


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    counts = expert_counts(fields, "num_experts", (64, 8))
    routing = ExpertRouting(*counts, fields.flag("norm_topk_prob", False))
    experts = ExpertsSpec(routing, fields.positive("intermediate_size"))
    spec = with_attention(spec, qk_norm="all")
    return with_experts(spec, experts, range(spec.num_layers))


OLMOE = Family(
    "OlmoeForCausalLM",
    "OLMoE 1B-7B",
    _adapt,
    gguf=GgufFormat(
        "olmoe",
        keys={"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
        # Files do not say so: llama.cpp never renormalizes in models of this architecture.
        values=lambda _: {"norm_topk_prob": False},
    ),
    defaults={"rms_norm_eps": 1e-5},
    own_keys=frozenset({"num_experts"}),
)
