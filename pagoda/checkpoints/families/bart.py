# SPDX-License-Identifier: Apache-2.0
"""BART and its kind: encoder-decoders with learned or fixed positions (Lewis et al. 2019)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from pagoda.checkpoints.families.shared import (
    MAX_CODER_LAYERS,
    dense_mlp,
    encoder_names,
    with_attention,
    with_biases,
    with_cross_attention,
    with_layer_norm,
    with_position_table,
)
from pagoda.checkpoints.families.whisper import NAMES, TO_ENCODER, WHISPER
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.multipliers import Multipliers
from pagoda.checkpoints.pooling_spec import EncoderSpec
from pagoda.checkpoints.text_encoder import TextEncoderSpec

_FIRST = 2
"""Row of the first token's position in tables of learned ones."""


def _adapt(
    spec: ModelSpec,
    fields: Fields,
    *,
    pre_norm: bool,
    norms_embedding: bool = True,
    sinusoidal: bool = False,
) -> ModelSpec:
    """The model, whose norms are in front of attention and MLP and behind all layers, or of sums alone."""
    fields.require("encoder_attention_heads", spec.num_heads)
    fields.require("share_encoder_decoder_embeddings", True)
    fields.require("decoder_vocab_size", spec.vocab_size)
    first = 0 if sinusoidal else _FIRST
    spec = with_layer_norm(with_biases(spec), fields.updated({"layer_norm_eps": 1e-5}), bias=True)
    spec = with_position_table(spec, first, sinusoidal=sinusoidal)
    spec = with_attention(spec, rotary="none")
    if not pre_norm:
        layer = replace(spec.layers[0], pre_norm=False, post_norm=True, norms_sums=True)
        spec = replace(spec, layers=(layer,) * spec.num_layers)
    factor = spec.hidden_size**0.5 if fields.flag("scale_embedding", False) else 1.0
    spec = replace(
        spec,
        multipliers=Multipliers(embedding=factor),
        norms_embedding=norms_embedding,
        norms_last=pre_norm,
        head_bias=True,
    )
    seen = with_attention(spec, causal=False).layers[0]
    inner = fields.positive("encoder_ffn_dim")
    seen = replace(seen, mlp=replace(dense_mlp(seen), intermediate_size=inner))
    encoder = replace(
        spec,
        names=encoder_names(spec.names, TO_ENCODER),
        layers=(seen,) * fields.positive("encoder_layers", most=MAX_CODER_LAYERS),
        encoder=EncoderSpec(
            spec.max_position_embeddings + first,
            first,
            norms_embeddings=norms_embedding,
            norms_output=pre_norm,
            sinusoidal=sinusoidal,
        ),
        position_table=None,
        norms_embedding=False,
    )
    return replace(with_cross_attention(spec), cross_encoder=TextEncoderSpec(encoder))


BART = replace(
    WHISPER,
    architecture="BartForConditionalGeneration",
    models="BART, DistilBART (summaries)",
    adapt=partial(_adapt, pre_norm=False),
    names=replace(
        NAMES,
        embedding="model.shared",
        embedding_norm="model.decoder.layernorm_embedding",
        head="lm_head",
        head_bias="final_logits_bias",
        attention_post_norm="{half}_attn_layer_norm",
        mlp_post_norm="final_layer_norm",
    ),
    renamed={
        "d_model": "hidden_size",
        "decoder_attention_heads": "num_attention_heads",
        "decoder_ffn_dim": "intermediate_size",
        "activation_function": "hidden_act",
    },
    defaults={
        "vocab_size": 50265,
        "d_model": 1024,
        "decoder_layers": 12,
        "encoder_layers": 12,
        "decoder_attention_heads": 16,
        "encoder_attention_heads": 16,
        "decoder_ffn_dim": 4096,
        "encoder_ffn_dim": 4096,
        "max_position_embeddings": 1024,
        "activation_function": "gelu",
        "tie_word_embeddings": True,
    },
)
MBART = replace(
    BART,
    architecture="MBartForConditionalGeneration",
    models="mBART, mBART-50 (translations)",
    adapt=partial(_adapt, pre_norm=True),
)
PEGASUS = replace(
    BART,
    architecture="PegasusForConditionalGeneration",
    models="PEGASUS (summaries)",
    adapt=partial(_adapt, pre_norm=True, norms_embedding=False, sinusoidal=True),
)
MARIAN = replace(
    BART,
    architecture="MarianMTModel",
    models="OPUS-MT (translations)",
    adapt=partial(_adapt, pre_norm=False, norms_embedding=False, sinusoidal=True),
    defaults={**BART.defaults, "vocab_size": 58101},
)
