# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5 with experts in all layers, and one more that every token goes through by its own score (Qwen 2025)."""

from __future__ import annotations

from dataclasses import replace

from pagoda.checkpoints.families.qwen2_moe import (
    GGUF_EXPERTS,
    SHARED_NAMES,
    with_shared_expert,
)
from pagoda.checkpoints.families.qwen3_5 import (
    GGUF_KEYS,
    GGUF_READ,
    GGUF_TILED,
    QWEN3_5,
    adapt_delta,
    gguf_values,
)
from pagoda.checkpoints.families.shared import text_sizes
from pagoda.checkpoints.family import GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ModelSpec


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    fields.require("norm_topk_prob", True)
    return with_shared_expert(
        adapt_delta(spec, fields), fields, counts=(256, 8), inner=512, shared=512, renormalize=True
    )


QWEN3_5_MOE = replace(
    QWEN3_5,
    architecture="Qwen3_5MoeForCausalLM",
    models="Qwen3.5 with experts: 35B-A3B to 397B-A17B",
    adapt=_adapt,
    names=replace(QWEN3_5.names, **SHARED_NAMES),
    gguf=GgufFormat(
        "qwen35moe",
        names=GGUF_TILED,
        keys={**GGUF_KEYS, **GGUF_EXPERTS},
        values=gguf_values,
        read=GGUF_READ,
    ),
    # No layer is dense, and files do not say how large one would be.
    defaults={
        **QWEN3_5.defaults,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        "norm_topk_prob": True,
    },
    model_types={"qwen3_5_moe_text": text_sizes(248_320, 2048, 512, 40, 16, 2, 32_768)},
    own_keys=frozenset({"num_experts", "shared_expert_intermediate_size"}),
    joins_experts=True,
)
