"""Qwen3-MoE: Qwen3 with experts in some or all layers."""

from __future__ import annotations

from dataclasses import replace

from pagoda.checkpoints.families.shared import expert_counts
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_config import ExpertsConfig, Family, ModelConfig


def _adapt(config: ModelConfig, fields: Fields) -> ModelConfig:
    windowed = fields.flag("use_sliding_window", False)
    window = fields.positive("sliding_window", 4096) if windowed else None
    return replace(
        config,
        qk_norm=True,
        sliding_windows=(window,) * config.num_layers,
        experts=_experts(fields, config.num_layers),
    )


def _experts(fields: Fields, num_layers: int) -> ExpertsConfig | None:
    # New files spell the field as Mixtral does.
    name = "num_local_experts" if "num_local_experts" in fields.values else "num_experts"
    if fields.values.get(name) == 0:
        return None  # all layers are dense
    num_experts, per_token = expert_counts(fields, name, (128, 8))
    return ExpertsConfig(
        num_experts,
        per_token,
        intermediate_size=fields.positive("moe_intermediate_size", 768),
        renormalize=fields.flag("norm_topk_prob", False),
        layers=_sparse_layers(fields, num_layers),
    )


def _sparse_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    """Every `decoder_sparse_step`-th layer but those in `mlp_only_layers`."""
    step = fields.positive("decoder_sparse_step", 1)
    dense = fields.values.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or any(
        not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < num_layers
        for layer in dense
    ):
        fields.refuse("mlp_only_layers", f"must be a list of layers from 0 to {num_layers - 1}")
    return frozenset(range(step - 1, num_layers, step)) - frozenset(dense)


QWEN3_MOE = Family("Qwen3MoeForCausalLM", _adapt, default_head_dim=128)
