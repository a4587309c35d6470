# SPDX-License-Identifier: Apache-2.0
"""Phi-3, Phi-3.5 and Phi-4: Llama with joined maps, and factors of frequencies for long contexts."""

from __future__ import annotations

from pagoda.checkpoints.families.shared import with_attention
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.tensor_names import TensorNames


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    if fields.values.get("sliding_window") is None:
        return spec
    window = fields.positive("sliding_window")
    return with_attention(spec, (window,) * spec.num_layers)


_JOINED = "self_attn.qkv_proj"
PHI3 = Family(
    "Phi3ForCausalLM",
    "Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
    _adapt,
    names=TensorNames(
        query=_JOINED, key=_JOINED, value=_JOINED, gate="mlp.gate_up_proj", up="mlp.gate_up_proj"
    ),
    gguf=GgufFormat("phi3", keys={"attention.sliding_window": "sliding_window"}),
    defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    partial_rotary=1.0,
)
