# SPDX-License-Identifier: Apache-2.0
"""Gemma 1, 2 and 3."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from pagoda.checkpoints.families.shared import (
    WINDOW_PATTERN,
    both_ways,
    every_nth_full,
    gguf_windows,
    text_sizes,
    with_attention,
    with_local_rotary,
)
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.multipliers import Multipliers
from pagoda.checkpoints.tensor_names import TensorNames

# ---- Gemma: Llama with scaled embeddings, GELU, and weights of norms less one (Gemma Team 2024)


def _adapt_gemma(spec: ModelSpec, _: Fields) -> ModelSpec:
    return replace(spec, multipliers=Multipliers(embedding=math.sqrt(spec.hidden_size)))


def _gemma_values(fields: Fields) -> Mapping[str, object]:
    """The activation, which files of its makers call by a name of another."""
    usual = fields.values.get("hidden_act") in (None, "gelu")
    return {"hidden_act": "gelu_pytorch_tanh"} if usual else {}


GEMMA = Family(
    "GemmaForCausalLM",
    "Gemma, CodeGemma, text of PaliGemma",
    _adapt_gemma,
    names=TensorNames(norm_offset=1.0),
    gguf=GgufFormat("gemma"),
    defaults={"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True},
    values=_gemma_values,
    activation="gelu_tanh",
    model_types={
        "gemma": {
            **text_sizes(256_000, 3072, 24_576, 28, 16, 16, 8192),
            "tie_word_embeddings": True,
        }
    },
)

# ---- Gemma 2: norms before and behind, scaled embeddings, capped scores and logits (Gemma Team 2024)
# All but some layers have a window. Gemma 3 has most of it in common.


def _adapt_second(spec: ModelSpec, fields: Fields) -> ModelSpec:
    return adapt(spec, fields, every=2, caps=(50.0, 30.0))


def adapt(
    spec: ModelSpec,
    fields: Fields,
    *,
    every: int,
    caps: tuple[float | None, float | None],
    qk_norm: str | None = None,
) -> ModelSpec:
    """The part that Gemma 2 and 3 share; `caps` are those of scores and of logits where the file is silent.

    Without a cap of scores the file's is ignored: transformers' class of Gemma 3 has the field, and no use of it.
    """
    spec = with_attention(
        spec.with_layers(lambda _, layer: replace(layer, post_norm=True)),
        every_nth_full(fields, spec.num_layers, every),
        scale=fields.number("query_pre_attn_scalar") ** -0.5,
        softcap=None if caps[0] is None else _cap(fields, "attn_logit_softcapping", caps[0]),
        qk_norm=qk_norm,
    )
    multipliers = Multipliers(
        embedding=math.sqrt(spec.hidden_size),
        logits_softcap=_cap(fields, "final_logit_softcapping", caps[1]),
    )
    return replace(spec, multipliers=multipliers)


def _cap(fields: Fields, name: str, usual: float | None) -> float | None:
    """The cap in the field `name`; null and 0 say that there is none."""
    return fields.number(name, usual) if fields.values.get(name, usual) else None


def gguf_values(fields: Fields, largest: int) -> Mapping[str, object]:
    """The scale of scores, which files do not say: only the largest model, by its layers, has another one."""
    scalar: float = fields.positive("attention.key_length", 256)
    if fields.positive("block_count") == largest:
        scalar = fields.positive("embedding_length") / fields.positive("attention.head_count")
    return {"query_pre_attn_scalar": scalar, **gguf_windows(fields)}


NAMES = TensorNames(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    norm_offset=1.0,
)
DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window",
}
KNOWN = frozenset({"attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"})
GGUF = GgufFormat(
    "gemma2",
    keys=CAPS,
    values=lambda fields: gguf_values(fields, 46),
    read=frozenset({WINDOW_PATTERN}),
)

GEMMA2 = Family(
    "Gemma2ForCausalLM",
    "Gemma 2",
    _adapt_second,
    names=NAMES,
    gguf=GGUF,
    defaults=DEFAULTS,
    activation="gelu_tanh",
    own_keys=KNOWN,
)


# ---- Gemma 3: Gemma 2 with norms of queries and keys, not caps, and a rotary table of windows (Gemma Team 2025)


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    is_encoder = fields.flag("use_bidirectional_attention", False)
    if is_encoder and fields.values.get("sliding_window") is not None:
        fields = fields.updated({"sliding_window": fields.positive("sliding_window") // 2 + 1})
    spec = adapt(spec, fields, every=6, caps=(None, None), qk_norm="head")
    spec = with_local_rotary(spec, fields, fields.number("rope_local_base_freq", 10_000.0))
    # The length includes what the scaling of the other layers adds.
    spec = replace(spec, max_position_embeddings=fields.positive("max_position_embeddings"))
    return both_ways(spec) if is_encoder else spec


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
    own_keys=KNOWN | {"use_bidirectional_attention"},
)
EMBEDDING_GEMMA = replace(
    GEMMA3,
    architecture="Gemma3TextModel",
    models="EmbeddingGemma (vectors)",
    gguf=GgufFormat(
        "gemma-embedding",
        keys={"attention.sliding_window": "sliding_window"}
        | {"rope.freq_base_swa": "rope_local_base_freq"},
        values=lambda fields: {**gguf_values(fields, 62), "use_bidirectional_attention": True},
        read=frozenset(
            {WINDOW_PATTERN, "dense_2_feat_in", "dense_2_feat_out"}
            | {"dense_3_feat_in", "dense_3_feat_out"}
        ),
        causal=False,
    ),
    model_types={},
)
