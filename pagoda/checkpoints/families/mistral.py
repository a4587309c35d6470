# SPDX-License-Identifier: Apache-2.0
"""Mistral, Ministral and Mixtral."""

from __future__ import annotations

from collections.abc import Mapping

from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.checkpoints.families.shared import (
    expert_counts,
    text_sizes,
    typed_windows,
    with_attention,
    with_experts,
    with_given_window,
)
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.layer_spec import ExpertsSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.rope import TemperatureSpec, rope_table
from pagoda.checkpoints.tensor_names import GGUF_NEIGHBOURS, TensorNames

# ---- Mistral 7B and Nemo: Llama with a sliding window


def _adapt_mistral(spec: ModelSpec, fields: Fields) -> ModelSpec:
    # An absent field means 4096 (the first Mistral), an explicit null means none.
    if fields.values.get("sliding_window", 4096) is None:
        return spec
    window = fields.positive("sliding_window", 4096)
    return with_attention(spec, (window,) * spec.num_layers)


_WINDOW = "attention.sliding_window"
MISTRAL = Family(
    "MistralForCausalLM",
    "Mistral 7B, Nemo, Small 3, GritLM 7B; text of Idefics2",
    _adapt_mistral,
    gguf=GgufFormat(
        "llama",
        keys={_WINDOW: "sliding_window"},
        required=frozenset({_WINDOW}),
        names=GGUF_NEIGHBOURS,
    ),
    model_types={"mistral": text_sizes(32_000, 4096, 14_336, 32, 32, 8, 131_072)},
    defaults={"num_key_value_heads": 8},
    aliases=frozenset({"GritLM"}),
)


# ---- Ministral: Mistral in which some layers have a window and others see all


def _adapt_ministral(spec: ModelSpec, fields: Fields) -> ModelSpec:
    usual = ["sliding_attention"] * spec.num_layers
    if fields.values.get("sliding_window", 4096) is None:
        return spec
    return with_attention(spec, typed_windows(fields, spec.num_layers, usual))


MINISTRAL = Family(
    "MinistralForCausalLM",
    "Ministral 8B",
    _adapt_ministral,
    defaults={"num_key_value_heads": 8},
    model_types={"ministral": text_sizes(32_000, 4096, 14_336, 32, 32, 8, 131_072)},
)


# ---- Ministral 3: Mistral whose queries are scaled by their positions (Mistral AI 2025)


def _adapt_ministral3(spec: ModelSpec, fields: Fields) -> ModelSpec:
    has_window = fields.values.get("sliding_window") is not None
    window = fields.positive("sliding_window") if has_window else None
    return with_attention(spec, (window,) * spec.num_layers, temperature=temperature(fields))


def temperature(fields: Fields) -> TemperatureSpec | None:
    """Scale of queries by their positions, of a table of its own (Mistral Large 3) or of a rotary table."""
    own, rope = fields.table("llama_4_scaling"), rope_table(fields)
    if own is not None:
        period = own.number("original_max_position_embeddings")
        return TemperatureSpec(period, factor=own.number("beta"), offset=0.0)
    if rope is None or not rope.values.get("llama_4_scaling_beta"):
        return None
    period = rope.number("original_max_position_embeddings")
    return TemperatureSpec(period, factor=rope.number("llama_4_scaling_beta"), offset=0.0)


def _gguf_values(fields: Fields) -> Mapping[str, object]:
    """The rotary table with its scale, which is one if both factors of it are, and the scale of queries."""
    rope = fields.below("rope.scaling.")
    scales = {"mscale": 1.0, "mscale_all_dim": rope.amount("yarn_log_multiplier", 0.0) or None}
    beta = fields.amount("attention.temperature_scale", 0.0)
    return {"rope_scaling": {**scales, "llama_4_scaling_beta": beta}}


_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
MINISTRAL3 = Family(
    "Ministral3ForCausalLM",
    "Ministral 3 (3B, 8B, 14B), text of its models that see",
    _adapt_ministral3,
    gguf=GgufFormat(
        "mistral3",
        names=GGUF_NEIGHBOURS,
        keys={
            "attention.sliding_window": "sliding_window",
            "attention.temperature_scale": "temperature_scale",
        },
        values=_gguf_values,
        scales_yarn=True,
    ),
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _ROPE,
    },
    model_types={"ministral3": text_sizes(131_072, 4096, 14_336, 34, 32, 8, 262_144)},
    own_keys=frozenset({"llama_4_scaling_beta"}),
)


# ---- Mixtral: Mistral with experts in every layer (Jiang et al. 2024)


def _adapt_mixtral(spec: ModelSpec, fields: Fields) -> ModelSpec:
    windowed = with_given_window(spec, fields)
    counts = expert_counts(fields, "num_local_experts", (8, 2))
    routing = ExpertRouting(*counts, renormalize=True)
    experts = ExpertsSpec(routing, fields.positive("intermediate_size"))
    return with_experts(windowed, experts, range(spec.num_layers))


MIXTRAL = Family(
    "MixtralForCausalLM",
    "Mixtral 8x7B, 8x22B",
    _adapt_mixtral,
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
