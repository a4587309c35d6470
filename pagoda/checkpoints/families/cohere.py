# SPDX-License-Identifier: Apache-2.0
"""Command R and Command A: attention and MLP side by side behind one layer norm, and scaled logits."""

from __future__ import annotations

from dataclasses import replace

from pagoda.checkpoints.families.shared import (
    WINDOW_PATTERN,
    every_nth_full,
    gguf_windows,
    text_sizes,
    with_attention,
    with_layer_norm,
    without_rotation,
)
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.multipliers import Multipliers
from pagoda.checkpoints.tensor_names import GGUF_NEIGHBOURS, TensorNames


def _adapt_first(spec: ModelSpec, fields: Fields) -> ModelSpec:
    spec = with_layer_norm(spec, fields, bias=False)
    spec = spec.with_layers(lambda _, layer: replace(layer, parallel=True))
    if fields.flag("use_qk_norm", False):
        spec = with_attention(spec, qk_norm="layer")
    multipliers = Multipliers(logits=fields.number("logit_scale", 0.0625))
    return replace(spec, multipliers=multipliers)


def _adapt_second(spec: ModelSpec, fields: Fields) -> ModelSpec:
    """Three of four layers have a window, others do not tell positions (Cohere 2025)."""
    windows = every_nth_full(fields, spec.num_layers, 4)
    spec = with_attention(_adapt_first(spec, fields), windows)
    return without_rotation(spec, [window is None for window in windows])


_NAMES = TensorNames(rotates_neighbours=True)
_KEYS = {"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"}
COHERE = Family(
    "CohereForCausalLM",
    "Command R, Command R+, Aya 23",
    _adapt_first,
    names=_NAMES,
    gguf=GgufFormat("command-r", names=GGUF_NEIGHBOURS, keys=_KEYS),
    defaults={"tie_word_embeddings": True, "rope_theta": 5e5},
    own_keys=frozenset({"logit_scale", "use_qk_norm"}),
)
COHERE2 = Family(
    "Cohere2ForCausalLM",
    "Command R7B, Command A, text of Command A Vision",
    _adapt_second,
    names=_NAMES,
    gguf=GgufFormat(
        "cohere2",
        names=GGUF_NEIGHBOURS,
        keys={**_KEYS, "attention.sliding_window": "sliding_window"},
        values=gguf_windows,
        read=frozenset({WINDOW_PATTERN}),
    ),
    defaults={"tie_word_embeddings": True},
    own_keys=frozenset({"logit_scale"}),
    model_types={
        "cohere2": {
            **text_sizes(256_000, 8192, 22_528, 40, 64, None, 8192),
            "tie_word_embeddings": True,
        }
    },
)
