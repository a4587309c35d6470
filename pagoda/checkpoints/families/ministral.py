# SPDX-License-Identifier: Apache-2.0
"""Ministral: Mistral in which some layers have a window and others see all."""

from __future__ import annotations

from pagoda.checkpoints.families.shared import text_sizes, typed_windows, with_attention
from pagoda.checkpoints.family import Family
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ModelSpec


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    usual = ["sliding_attention"] * spec.num_layers
    if fields.values.get("sliding_window", 4096) is None:
        return spec
    return with_attention(spec, typed_windows(fields, spec.num_layers, usual))


MINISTRAL = Family(
    "MinistralForCausalLM",
    "Ministral 8B",
    _adapt,
    defaults={"num_key_value_heads": 8},
    model_types={"ministral": text_sizes(32_000, 4096, 14_336, 32, 32, 8, 131_072)},
)
