# SPDX-License-Identifier: Apache-2.0
"""T5 and its kind: encoder-decoders whose scores depend on distances of tokens (Raffel et al. 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from pagoda.checkpoints.distances import DistanceBuckets
from pagoda.checkpoints.families.shared import (
    MAX_CODER_LAYERS,
    dense_mlp,
    encoder_names,
    with_attention,
    with_cross_attention,
    without_rotation,
)
from pagoda.checkpoints.family import Family
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.multipliers import Multipliers
from pagoda.checkpoints.pooling_spec import EncoderSpec
from pagoda.checkpoints.tensor_names import TensorNames
from pagoda.checkpoints.text_encoder import TextEncoderSpec

_LONGEST = 4096
"""Tokens of the longest text, which files do not bound: the largest block of KV."""
_PROJECTIONS = {"relu": "relu", "gated-gelu": "gelu_new", "gated-silu": "silu"}
"""Activations by the values of `feed_forward_proj`."""
_BIAS = "layer.0.SelfAttention.relative_attention_bias"
_NAMES = TensorNames(
    embedding="shared",
    distances=f"decoder.block.0.{_BIAS}",
    norm="decoder.final_layer_norm",
    layers="decoder.block",
    attention_norm="layer.{half}.layer_norm",
    query="layer.{half}.{part}.q",
    key="layer.{half}.{part}.k",
    value="layer.{half}.{part}.v",
    attention_out="layer.{half}.{part}.o",
    mlp_norm="layer.2.layer_norm",
    gate="layer.2.DenseReluDense.wi_0",
    up="layer.2.DenseReluDense.wi_1",
    down="layer.2.DenseReluDense.wo",
    halves=("0", "1"),
)
"""Names of a decoder, each of whose layers is two here: one sees its own tokens, the next one the text."""
_PARTS = ("SelfAttention", "EncDecAttention")
_TO_ENCODER = {
    **{"decoder": "encoder", "{part}": _PARTS[0]},
    **{"{half}": "0", "layer.2": "layer.1"},
}
"""Parts of names that the encoder spells otherwise."""


def _layers(fields: Fields) -> int:
    """Layers of the decoder, which are as many as the encoder's where files do not say."""
    return fields.positive(
        "num_decoder_layers", fields.positive("num_layers"), most=MAX_CODER_LAYERS
    )


def _values(fields: Fields) -> Mapping[str, object]:
    kind = fields.text("feed_forward_proj")
    if kind not in _PROJECTIONS:
        fields.refuse("feed_forward_proj", f"must be one of {', '.join(_PROJECTIONS)}")
    heads = fields.positive("num_attention_heads")
    sizes = {"num_hidden_layers": 2 * _layers(fields), "num_key_value_heads": heads}
    return {**sizes, "hidden_act": _PROJECTIONS[kind]}


def _distances(fields: Fields) -> DistanceBuckets:
    count = fields.positive("relative_attention_num_buckets", 32)
    if count % 4:
        fields.refuse("relative_attention_num_buckets", "must be a multiple of 4")
    farthest = fields.positive("relative_attention_max_distance", 128)
    if farthest <= count // 2:
        fields.refuse("relative_attention_max_distance", f"must be above {count // 2}")
    return DistanceBuckets(count, farthest)


def _adapt(spec: ModelSpec, fields: Fields, *, scales: bool = True) -> ModelSpec:
    """The model; with `scales`, logits of heads that files call tied are scaled, as transformers has it."""
    is_tied = fields.flag("tie_word_embeddings", True)
    names, is_gated = spec.names, fields.text("feed_forward_proj").startswith("gated")
    if not is_gated:
        names = replace(names, up=names.up.removesuffix("_1"))
    spec = without_rotation(spec, [True] * spec.num_layers)
    spec = with_attention(spec, scale=1.0, distances=_distances(fields))
    layer = replace(spec.layers[0], mlp=replace(dense_mlp(spec.layers[0]), gated=is_gated))
    spec = replace(spec, names=names, layers=(layer,) * spec.num_layers)
    seen = replace(layer, attention=replace(layer.attention, causal=False))
    encoder = replace(
        spec,
        names=encoder_names(names, _TO_ENCODER),
        layers=(seen,) * fields.positive("num_layers", most=MAX_CODER_LAYERS),
        encoder=EncoderSpec(norms_embeddings=False, norms_output=True),
    )
    if scales and fields.flag("scale_decoder_outputs", is_tied):
        spec = replace(spec, multipliers=Multipliers(logits=spec.hidden_size**-0.5))
    return replace(
        with_cross_attention(spec),
        names=replace(names, parts=_PARTS * _layers(fields)),
        cross_encoder=TextEncoderSpec(encoder),
        usual_length=min(_LONGEST, fields.positive("n_positions", 512)),
    )


T5 = Family(
    "T5ForConditionalGeneration",
    "T5, T5 v1.1, Flan-T5, CodeT5 (texts made of texts)",
    _adapt,
    names=_NAMES,
    renamed={
        "d_model": "hidden_size",
        "d_kv": "head_dim",
        "d_ff": "intermediate_size",
        "num_heads": "num_attention_heads",
        "layer_norm_epsilon": "rms_norm_eps",
    },
    defaults={
        "vocab_size": 32128,
        "d_model": 512,
        "d_kv": 64,
        "d_ff": 2048,
        "num_layers": 6,
        "num_heads": 8,
        "feed_forward_proj": "relu",
        "max_position_embeddings": _LONGEST,
        "tie_word_embeddings": True,
    },
    values=_values,
    activation="relu",
    other_activations=frozenset({"gelu_tanh", "silu"}),
    aliases=frozenset({"T5WithLMHeadModel"}),
)
_NEWER = {
    "vocab_size": 250112,
    "d_ff": 1024,
    "num_layers": 8,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
}
MT5 = replace(
    T5,
    architecture="MT5ForConditionalGeneration",
    models="mT5, mT0",
    adapt=partial(_adapt, scales=False),
    defaults={**T5.defaults, **_NEWER},
    aliases=frozenset(),
)
UMT5 = replace(
    MT5,
    architecture="UMT5ForConditionalGeneration",
    models="UMT5",
    adapt=_adapt,
    names=replace(_NAMES, distances=f"decoder.block.{{layer}}.{_BIAS}"),
)
