"""Gemma 2 and 3: norms before and behind, scaled embeddings, and windows in all but some layers.

Gemma 2 caps scores of attention and logits (Gemma Team 2024). Gemma 3 norms queries and keys instead, and rotates
layers with a window by a table of their own (Gemma Team 2025).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from pagoda.checkpoints.families.shared import (
    WINDOW_PATTERN,
    every_nth_full,
    gguf_windows,
    with_attention,
    with_local_rotary,
)
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ModelSpec, Multipliers
from pagoda.checkpoints.tensor_names import TensorNames


def _adapt_second(spec: ModelSpec, fields: Fields) -> ModelSpec:
    return _adapt(spec, fields, every=2, scores_cap=50.0, logits_cap=30.0)


def _adapt_third(spec: ModelSpec, fields: Fields) -> ModelSpec:
    spec = _adapt(spec, fields, every=6, scores_cap=None, logits_cap=None)
    spec = spec.with_layers(
        lambda _, layer: replace(layer, attention=replace(layer.attention, qk_norm="head"))
    )
    spec = with_local_rotary(spec, fields, fields.number("rope_local_base_freq", 10_000.0))
    # The length includes what the scaling of the other layers adds.
    return replace(spec, max_position_embeddings=fields.positive("max_position_embeddings"))


def _adapt(
    spec: ModelSpec,
    fields: Fields,
    *,
    every: int,
    scores_cap: float | None,
    logits_cap: float | None,
) -> ModelSpec:
    """Changes that both have in common; caps are those where the file is silent."""
    spec = with_attention(
        spec.with_layers(lambda _, layer: replace(layer, post_norm=True)),
        every_nth_full(fields, spec.num_layers, every),
        scale=fields.number("query_pre_attn_scalar") ** -0.5,
        softcap=_cap(fields, "attn_logit_softcapping", scores_cap),
    )
    multipliers = Multipliers(
        embedding=math.sqrt(spec.hidden_size),
        logits_softcap=_cap(fields, "final_logit_softcapping", logits_cap),
    )
    return replace(spec, multipliers=multipliers)


def _cap(fields: Fields, name: str, usual: float | None) -> float | None:
    """The cap in the field `name`; null and 0 say that there is none."""
    return fields.number(name, usual) if fields.values.get(name, usual) else None


def _gguf_values(fields: Fields, largest: int) -> Mapping[str, object]:
    """The scale of scores, which files do not say: only the largest model, by its layers, has another one."""
    scalar: float = fields.positive("attention.key_length", 256)
    if fields.positive("block_count") == largest:
        scalar = fields.positive("embedding_length") / fields.positive("attention.head_count")
    return {"query_pre_attn_scalar": scalar, **gguf_windows(fields)}


_NAMES = TensorNames(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    norm_offset=1.0,
)
_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window",
}
_KNOWN = frozenset({"attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"})

GEMMA2 = Family(
    "Gemma2ForCausalLM",
    "Gemma 2",
    _adapt_second,
    names=_NAMES,
    gguf=GgufFormat(
        "gemma2",
        keys=_CAPS,
        values=lambda fields: _gguf_values(fields, 46),
        read=frozenset({WINDOW_PATTERN}),
    ),
    defaults=_DEFAULTS,
    activation="gelu_tanh",
    own_keys=_KNOWN,
)
GEMMA3 = Family(
    "Gemma3ForCausalLM",
    "Gemma 3, text of its models that see",
    _adapt_third,
    names=_NAMES,
    gguf=GgufFormat(
        "gemma3",
        keys={**_CAPS, "rope.freq_base_swa": "rope_local_base_freq"},
        values=lambda fields: _gguf_values(fields, 62),
        read=frozenset({WINDOW_PATTERN}),
    ),
    defaults={
        **_DEFAULTS,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
    },
    activation="gelu_tanh",
    model_types=frozenset({"gemma3_text"}),
    own_keys=_KNOWN,
)
