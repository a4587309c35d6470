# SPDX-License-Identifier: Apache-2.0
"""Gemma 3: Gemma 2 with norms of queries and keys, not caps, and a rotary table of windows (Gemma Team 2025)."""

from __future__ import annotations

from dataclasses import replace

from pagoda.checkpoints.families.gemma2 import (
    CAPS,
    DEFAULTS,
    GGUF,
    KNOWN,
    NAMES,
    adapt,
    gguf_values,
)
from pagoda.checkpoints.families.shared import text_sizes, with_local_rotary
from pagoda.checkpoints.family import Family
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ModelSpec


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    spec = adapt(spec, fields, every=6, caps=(None, None), qk_norm="head")
    spec = with_local_rotary(spec, fields, fields.number("rope_local_base_freq", 10_000.0))
    # The length includes what the scaling of the other layers adds.
    return replace(spec, max_position_embeddings=fields.positive("max_position_embeddings"))


GEMMA3 = Family(
    "Gemma3ForCausalLM",
    "Gemma 3, text of its models that see",
    _adapt,
    names=NAMES,
    gguf=replace(
        GGUF,
        architecture="gemma3",
        keys={**CAPS, "rope.freq_base_swa": "rope_local_base_freq"},
        values=lambda fields: gguf_values(fields, 62),
    ),
    defaults={
        **DEFAULTS,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "rope_theta": 1e6,
    },
    activation="gelu_tanh",
    model_types={"gemma3_text": text_sizes(262_208, 2304, 9216, 26, 8, 4, 131_072)},
    own_keys=KNOWN,
)
