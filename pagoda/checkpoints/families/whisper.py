# SPDX-License-Identifier: Apache-2.0
"""Whisper: a decoder that attends to what an encoder gives of audio (Radford et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagoda.checkpoints.audio import AudioSpec
from pagoda.checkpoints.families.shared import (
    MAX_CODER_LAYERS,
    dense_mlp,
    encoder_names,
    own_heads,
    with_attention,
    with_biases,
    with_cross_attention,
    with_layer_norm,
    with_position_table,
)
from pagoda.checkpoints.family import Family
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.pooling_spec import EncoderSpec
from pagoda.checkpoints.tensor_names import TensorNames

NAMES = TensorNames(
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    norm="model.decoder.layer_norm",
    head="proj_out",
    layers="model.decoder.layers",
    attention_norm="{half}_attn_layer_norm",
    query="{half}_attn.q_proj",
    key="{half}_attn.k_proj",
    value="{half}_attn.v_proj",
    attention_out="{half}_attn.out_proj",
    mlp_norm="final_layer_norm",
    up="fc1",
    down="fc2",
    halves=("self", "encoder"),
)
"""Names of a decoder, each of whose layers is two here: one sees the text, the next one the audio."""

TO_ENCODER = {"model.decoder": "model.encoder", "{half}": "self"}
"""Parts of names that the encoder spells otherwise."""


def _values(fields: Fields) -> Mapping[str, object]:
    layers = fields.positive("decoder_layers", most=MAX_CODER_LAYERS)
    return {"num_hidden_layers": 2 * layers, **own_heads(fields)}


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    fields.require("encoder_attention_heads", spec.num_heads)
    for name in ("scale_embedding", "use_weighted_layer_sum"):
        fields.require(name, False)
    positions = fields.positive("max_source_positions")
    if positions < spec.max_position_embeddings:
        fields.refuse(
            "max_source_positions",
            f"must be at least the {spec.max_position_embeddings} of max_target_positions",
        )
    spec = with_layer_norm(with_biases(spec), fields.updated({"layer_norm_eps": 1e-5}), bias=True)
    spec = with_attention(with_position_table(spec), key_bias=False, rotary="none")
    audio = AudioSpec(_encoder(spec, fields, positions), fields.positive("num_mel_bins"), positions)
    return replace(with_cross_attention(spec), cross_encoder=audio)


def _encoder(spec: ModelSpec, fields: Fields, positions: int) -> ModelSpec:
    """The encoder, whose layers are those of a decoder that sees all of a text."""
    layer = with_attention(spec, causal=False).layers[0]
    inner = fields.positive("encoder_ffn_dim")
    layer = replace(layer, mlp=replace(dense_mlp(layer), intermediate_size=inner))
    return replace(
        spec,
        names=encoder_names(NAMES, TO_ENCODER),
        layers=(layer,) * fields.positive("encoder_layers", most=MAX_CODER_LAYERS),
        position_table=None,
        encoder=EncoderSpec(norms_embeddings=False, norms_output=True),
        max_position_embeddings=positions,
    )


WHISPER = Family(
    "WhisperForConditionalGeneration",
    "Whisper, Distil-Whisper, CrisperWhisper (transcripts of audio)",
    _adapt,
    names=NAMES,
    renamed={
        "d_model": "hidden_size",
        "decoder_attention_heads": "num_attention_heads",
        "decoder_ffn_dim": "intermediate_size",
        "max_target_positions": "max_position_embeddings",
        "activation_function": "hidden_act",
    },
    defaults={
        "d_model": 384,
        "decoder_layers": 4,
        "encoder_layers": 4,
        "decoder_attention_heads": 6,
        "encoder_attention_heads": 6,
        "decoder_ffn_dim": 1536,
        "encoder_ffn_dim": 1536,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "num_mel_bins": 80,
        "tie_word_embeddings": True,
    },
    values=_values,
    activation="gelu",
    other_activations=frozenset({"gelu_tanh", "relu", "silu"}),
    gated=False,
)
