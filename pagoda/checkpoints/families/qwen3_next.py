# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next: layers as in Qwen3.5, with experts and one more by its own score, as in Qwen2-MoE (Qwen 2025)."""

from __future__ import annotations

from dataclasses import replace

from pagoda.checkpoints.families.qwen2_moe import (
    GGUF_EXPERTS,
    SHARED_NAMES,
    with_shared_expert,
)
from pagoda.checkpoints.families.qwen3_5 import (
    GGUF_DELTA,
    GGUF_KEYS,
    GGUF_READ,
    NAMES,
    adapt_delta,
    gguf_values,
)
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ModelSpec


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    return with_shared_expert(
        adapt_delta(spec, fields), fields, counts=(512, 10), inner=512, shared=512, renormalize=True
    )


QWEN3_NEXT = Family(
    "Qwen3NextForCausalLM",
    "Qwen3-Next-80B-A3B",
    _adapt,
    names=replace(NAMES, state_in="linear_attn.in_proj_qkvz", **SHARED_NAMES),
    gguf=GgufFormat(
        "qwen3next",
        names=GGUF_DELTA,
        keys={**GGUF_KEYS, **GGUF_EXPERTS},
        values=gguf_values,
        read=GGUF_READ,
    ),
    defaults={"num_key_value_heads": 2, "head_dim": 256},
    partial_rotary=0.25,
    own_keys=frozenset({"num_experts", "shared_expert_intermediate_size"}),
)
