# SPDX-License-Identifier: Apache-2.0
"""PLaMo 3: norms on both sides of attention and MLP, with offsets of their own (Preferred Networks 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagoda.checkpoints.families.shared import (
    every_nth_full,
    with_attention,
    with_local_rotary,
)
from pagoda.checkpoints.family import Family
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.tensor_names import TensorNames

_QKV, _GATE_UP = "mixer.qkv_proj", "mlp.gate_up_proj"
_NAMES = TensorNames(
    layers="model.layers.layers",
    attention_norm="pre_mixer_norm",
    query=_QKV,
    key=_QKV,
    value=_QKV,
    query_norm="mixer.q_norm",
    key_norm="mixer.k_norm",
    attention_out="mixer.o_proj",
    attention_post_norm="post_mixer_norm",
    mlp_norm="pre_mlp_norm",
    mlp_post_norm="post_mlp_norm",
    gate=_GATE_UP,
    up=_GATE_UP,
    norm_offset=1.0,
    norm_offsets={"post_mixer_norm": 1 / 5, "post_mlp_norm": 5**-1.5},
)

# ---- PLaMo 3: windows in most layers, with a rotary table of their own


def _values(fields: Fields) -> Mapping[str, object]:
    """The window, which older files tell layer by layer, and the table of layers that see all."""
    found: dict[str, object] = {}
    windows = fields.values.get("sliding_window")
    if isinstance(windows, list):
        found["sliding_window"] = next((it for it in windows if it is not None), None)
    factor = fields.number("rope_scaling_factor", 1.0)
    if factor != 1:
        original = fields.positive("initial_context_length")
        found["rope_parameters"] = {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": fields.number("rope_theta", 150_000.0),
                "factor": factor,
                "original_max_position_embeddings": original,
                "truncate": False,
            }
        }
    return found


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    fields.require("scale_embedding", False)
    spec = spec.with_layers(lambda _, layer: replace(layer, post_norm=True))
    windows = every_nth_full(fields, spec.num_layers, 8, 2048)
    spec = with_attention(spec, windows, qk_norm="head")
    return with_local_rotary(spec, fields, fields.number("rope_local_theta", 10_000.0))


PLAMO3 = Family(
    "Plamo3ForCausalLM",
    "PLaMo 3 NICT 2B, 8B and 31B",
    _adapt,
    names=_NAMES,
    renamed={"window_size": "sliding_window", "rope_global_theta": "rope_theta"},
    values=_values,
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 128,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
    },
)
