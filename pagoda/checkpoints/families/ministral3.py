# SPDX-License-Identifier: Apache-2.0
"""Ministral 3: Mistral whose queries are scaled by their positions (Mistral AI 2025)."""

from __future__ import annotations

from collections.abc import Mapping

from pagoda.checkpoints.families.shared import text_sizes, with_attention
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ModelSpec, TemperatureSpec
from pagoda.checkpoints.rope import rope_table
from pagoda.checkpoints.tensor_names import GGUF_NEIGHBOURS


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    has_window = fields.values.get("sliding_window") is not None
    window = fields.positive("sliding_window") if has_window else None
    rope = rope_table(fields)
    temperature = None
    if rope is not None and rope.values.get("llama_4_scaling_beta"):
        temperature = TemperatureSpec(
            period=rope.number("original_max_position_embeddings"),
            factor=rope.number("llama_4_scaling_beta"),
            offset=0.0,
        )
    return with_attention(spec, (window,) * spec.num_layers, temperature=temperature)


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
    _adapt,
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
