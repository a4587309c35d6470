"""Mixtral: Mistral with experts in every layer (Jiang et al. 2024)."""

from __future__ import annotations

from dataclasses import replace

from pagoda.checkpoints.families.shared import expert_counts
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_config import ExpertsConfig, Family, ModelConfig, TensorNames


def _adapt(config: ModelConfig, fields: Fields) -> ModelConfig:
    has_window = fields.values.get("sliding_window") is not None
    window = fields.positive("sliding_window") if has_window else None
    num_experts, per_token = expert_counts(fields, "num_local_experts", (8, 2))
    return replace(
        config,
        sliding_windows=(window,) * config.num_layers,
        experts=ExpertsConfig(
            num_experts,
            per_token,
            intermediate_size=config.intermediate_size,
            renormalize=True,
            layers=frozenset(range(config.num_layers)),
        ),
    )


MIXTRAL = Family(
    "MixtralForCausalLM",
    _adapt,
    names=TensorNames(
        router="block_sparse_moe.gate",
        experts="block_sparse_moe.experts",
        expert_gate="w1",
        expert_up="w3",
        expert_down="w2",
    ),
)
