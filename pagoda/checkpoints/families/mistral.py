# SPDX-License-Identifier: Apache-2.0
"""Mistral 7B and Nemo: Llama with a sliding window."""

from __future__ import annotations

from pagoda.checkpoints.families.shared import text_sizes, with_attention
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.tensor_names import GGUF_NEIGHBOURS


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    # An absent field means 4096 (the first Mistral), an explicit null means none.
    if fields.values.get("sliding_window", 4096) is None:
        return spec
    window = fields.positive("sliding_window", 4096)
    return with_attention(spec, (window,) * spec.num_layers)


_WINDOW = "attention.sliding_window"
MISTRAL = Family(
    "MistralForCausalLM",
    "Mistral 7B, Nemo, Small 3; text of Idefics2",
    _adapt,
    gguf=GgufFormat(
        "llama",
        keys={_WINDOW: "sliding_window"},
        required=frozenset({_WINDOW}),
        names=GGUF_NEIGHBOURS,
    ),
    model_types={"mistral": text_sizes(32_000, 4096, 14_336, 32, 32, 8, 131_072)},
    defaults={"num_key_value_heads": 8},
)
