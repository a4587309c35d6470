# SPDX-License-Identifier: Apache-2.0
"""EXAONE 4: norms behind instead of before, and layers of full attention that do not tell positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagoda.checkpoints.families.shared import (
    WINDOW_PATTERN,
    every_nth_full,
    gguf_windows,
    with_attention,
    without_rotation,
)
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.tensor_names import TensorNames


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    spec = spec.with_layers(lambda _, layer: replace(layer, pre_norm=False, post_norm=True))
    windows = every_nth_full(fields, spec.num_layers, 4)
    spec = with_attention(spec, windows, qk_norm="head")
    if fields.values.get("sliding_window", 4096) is None:
        return spec
    return without_rotation(spec, [window is None for window in windows])


def _gguf_values(fields: Fields) -> Mapping[str, object]:
    """Kinds of layers; files of models without windows are silent on them."""
    return {"sliding_window": None, **gguf_windows(fields)}


EXAONE4 = Family(
    "Exaone4ForCausalLM",
    "EXAONE 4.0",
    _adapt,
    names=TensorNames(attention_post_norm="post_attention_layernorm"),
    gguf=GgufFormat(
        "exaone4",
        keys={"attention.sliding_window": "sliding_window"},
        values=_gguf_values,
        read=frozenset({WINDOW_PATTERN}),
    ),
    defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5},
)
