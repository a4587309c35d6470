# SPDX-License-Identifier: Apache-2.0
"""Llama 4: chunks of attention, full layers that do not tell positions, experts that weigh inputs (Meta 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.checkpoints.families.shared import (
    expert_counts,
    text_sizes,
    unrotated_layers,
    with_experts,
    without_rotation,
)
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.layer_spec import ExpertsSpec, LayerSpec, MlpSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.rope import TemperatureSpec
from pagoda.checkpoints.tensor_names import GGUF_NEIGHBOURS, TensorNames

_KINDS = ("full_attention", "chunked_attention")


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    still = unrotated_layers(fields, spec.num_layers)
    kinds = fields.texts("layer_types", [_KINDS[not is_still] for is_still in still])
    if len(kinds) != spec.num_layers or any(kind not in _KINDS for kind in kinds):
        fields.refuse("layer_types", f"must be a list of {spec.num_layers} of {', '.join(_KINDS)}")
    has_chunks = fields.values.get("attention_chunk_size", 8192) is not None
    chunk = fields.positive("attention_chunk_size", 8192) if has_chunks else None
    norm: Literal["unit"] | None = "unit" if fields.flag("use_qk_norm", True) else None
    period, factor = fields.number("floor_scale", 8192.0), fields.number("attn_scale", 0.1)
    temperature = TemperatureSpec(period, factor, offset=1.0)
    tuned = temperature if _tunes_temperature(fields) else None
    mlp = MlpSpec(fields.positive("intermediate_size_mlp", 16_384))

    def change(index: int, layer: LayerSpec) -> LayerSpec:
        attention = replace(
            layer.attention,
            chunk=chunk if kinds[index] == "chunked_attention" else None,
            qk_norm=None if still[index] else norm,
            temperature=tuned if still[index] else None,
        )
        return replace(layer, attention=attention, mlp=mlp)

    counts = expert_counts(fields, "num_local_experts", (16, 1))
    routing = ExpertRouting(*counts, renormalize=False, scores="sigmoid", weighs_inputs=True)
    inner = fields.positive("intermediate_size")
    experts = ExpertsSpec(routing, inner, shared_size=inner)
    spec = without_rotation(spec.with_layers(change), still)
    return with_experts(spec, experts, _sparse_layers(fields, spec.num_layers))


def _tunes_temperature(fields: Fields) -> bool:
    """The flag, which older files write as 4."""
    name = "attn_temperature_tuning"
    return (
        fields.count(name) > 0 if type(fields.values.get(name)) is int else fields.flag(name, True)
    )


def _sparse_layers(fields: Fields, num_layers: int) -> list[int]:
    if fields.values.get("moe_layers") is None:
        step = fields.positive("interleave_moe_layer_step", 1)
        return list(range(step - 1, num_layers, step))
    layers = fields.integers("moe_layers")
    if any(not 0 <= layer < num_layers for layer in layers):
        fields.refuse("moe_layers", f"must be a list of layers from 0 to {num_layers - 1}")
    return layers


def _gguf_values(fields: Fields) -> Mapping[str, object]:
    """Values that files do not say: the larger model, of 128 experts, has no norms of queries and keys."""
    return {
        "use_qk_norm": fields.count("expert_count", 16) != 128,
        "intermediate_size_mlp": fields.positive("feed_forward_length"),
    }


LLAMA4 = Family(
    "Llama4ForCausalLM",
    "Llama 4 Scout and Maverick, text",
    _adapt,
    names=TensorNames(
        gate="feed_forward.gate_proj",
        up="feed_forward.up_proj",
        down="feed_forward.down_proj",
        router="feed_forward.router",
        expert_gate="feed_forward.experts.gate_up_proj",
        expert_up="feed_forward.experts.gate_up_proj",
        expert_down="feed_forward.experts.down_proj",
        shared_gate="feed_forward.shared_expert.gate_proj",
        shared_up="feed_forward.shared_expert.up_proj",
        shared_down="feed_forward.shared_expert.down_proj",
        expert_layout="transposed",
        rotates_neighbours=True,
    ),
    gguf=GgufFormat(
        "llama4",
        names=GGUF_NEIGHBOURS,
        keys={
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
            "expert_gating_func": "expert_gating_func",
        },
        values=_gguf_values,
    ),
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
    },
    model_types={"llama4_text": text_sizes(202_048, 5120, 8192, 48, 40, 8, 131_072)},
    own_keys=frozenset(
        {"attention_chunk_size", "attn_temperature_tuning", "no_rope_layer_interval"}
        | {"no_rope_layers", "num_local_experts", "use_qk_norm"}
    ),
)
