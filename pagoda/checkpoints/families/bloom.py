# SPDX-License-Identifier: Apache-2.0
"""Bloom and MPT, which score by distance (ALiBi), and Falcon, whose attention and MLP lie side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagoda.checkpoints.families.shared import (
    following_sizes,
    with_alibi,
    with_attention,
    with_biases,
    with_layer_norm,
)
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.tensor_names import GGUF_NAMES, TensorNames

_JOINED = "self_attention.query_key_value"
_NAMES = TensorNames(
    embedding="word_embeddings",
    embedding_norm="word_embeddings_layernorm",
    norm="ln_f",
    layers="h",
    query=_JOINED,
    key=_JOINED,
    value=_JOINED,
    attention_out="self_attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    joins_by_head=True,
)
_RENAMED = {
    "n_embed": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "layer_norm_epsilon": "layer_norm_eps",
    "seq_length": "max_position_embeddings",
}

_GGUF_NORM = {"attention.layer_norm_epsilon": "layer_norm_eps"}

# ---- Bloom (Le Scao et al. 2022): normed embeddings


def _adapt_bloom(spec: ModelSpec, fields: Fields) -> ModelSpec:
    spec = with_layer_norm(with_biases(with_alibi(spec)), fields, bias=True)
    return replace(spec, norms_embedding=True)


BLOOM = Family(
    "BloomForCausalLM",
    "BLOOM, BLOOMZ",
    _adapt_bloom,
    names=_NAMES,
    gguf=GgufFormat(
        "bloom", names=replace(GGUF_NAMES, embedding_norm="token_embd_norm"), keys=_GGUF_NORM
    ),
    renamed=_RENAMED,
    values=following_sizes,
    defaults={"tie_word_embeddings": True, "max_position_embeddings": 2048},
    activation="gelu_tanh",
    gated=False,
    aliases=frozenset({"BloomModel"}),
)


# ---- Falcon (Almazrouei et al. 2023): one norm or two in front of attention and MLP, or one behind the other


def _falcon_values(fields: Fields) -> Mapping[str, object]:
    heads = fields.positive("num_attention_heads")
    groups = fields.flag("new_decoder_architecture", False)
    kv_heads = fields.positive("num_kv_heads", heads)
    if not groups and fields.flag("multi_query", True):
        kv_heads = 1
    return {**following_sizes(fields, "ffn_hidden_size"), "num_key_value_heads": kv_heads}


def _adapt_falcon(spec: ModelSpec, fields: Fields) -> ModelSpec:
    fields.require("alibi", False)  # its numbers are rounded as those of no other family are
    bias, groups = fields.flag("bias", False), fields.flag("new_decoder_architecture", False)
    parallel = fields.flag("parallel_attn", True) or groups
    norms = fields.positive("num_ln_in_parallel_attn", 2 if groups else 1)
    two = parallel and groups and norms == 2
    spec = spec.with_layers(lambda _, layer: replace(layer, parallel=parallel, parallel_norms=two))
    names = _NAMES
    if two:
        names = replace(names, attention_norm="ln_attn", mlp_norm="ln_mlp")
    spec = with_biases(replace(spec, names=names), qkv=bias, out=bias, mlp=bias)
    return with_layer_norm(spec, fields, bias=True)


def _gguf_falcon(fields: Fields) -> Mapping[str, object]:
    """Falcon 7B is the newer architecture with one head of keys and one norm."""
    return {
        "new_decoder_architecture": True,
        "num_kv_heads": fields.positive("attention.head_count_kv", 1),
        "ffn_hidden_size": fields.positive("feed_forward_length"),
    }


FALCON = Family(
    "FalconForCausalLM",
    "Falcon 7B, 40B, 180B and 11B",
    _adapt_falcon,
    names=_NAMES,
    gguf=GgufFormat(
        "falcon",
        keys=_GGUF_NORM,
        values=_gguf_falcon,
        shown=lambda names: {"num_ln_in_parallel_attn": 1 + ("blk.0.attn_norm_2.weight" in names)},
    ),
    renamed={**_RENAMED, "activation": "hidden_act"},
    values=_falcon_values,
    defaults={"tie_word_embeddings": True, "max_position_embeddings": 2048},
    activation="gelu",
    gated=False,
    aliases=frozenset({"RWForCausalLM"}),
    own_keys=frozenset({"parallel_attn"}),
)


# ---- MPT (MosaicML 2023): no biases


def _adapt_mpt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    for name, usual in (("no_bias", True), ("embedding_fraction", 1), ("expansion_ratio", 4)):
        fields.require(name, usual)
    own = fields.table("attn_config") or Fields({}, fields.source, "attn_config.")
    for name, neutral in (
        *(("alibi", True), ("alibi_bias_max", 8), ("qk_ln", False), ("prefix_lm", False)),
        ("attn_type", "multihead_attention"),
    ):
        own.require(name, neutral)
    scale = own.optional_number("softmax_scale") or spec.head_dim**-0.5
    spec = with_alibi(spec)
    spec = with_attention(spec, scale=scale, clip=own.optional_number("clip_qkv"))
    return with_layer_norm(spec, fields, bias=False)


def _mpt_values(fields: Fields) -> Mapping[str, object]:
    longest = fields.positive("max_seq_len", 2048)
    return {**following_sizes(fields), "max_position_embeddings": longest}


def _gguf_mpt(fields: Fields) -> Mapping[str, object]:
    clip = "attention.clamp_kqv"
    own = {
        "alibi": fields.amount(_BIAS, 0.0) > 0,
        "alibi_bias_max": fields.amount(_BIAS, 0.0),
        "clip_qkv": fields.number(clip) if fields.values.get(clip) else None,
    }
    return {"attn_config": own, "max_seq_len": fields.positive("context_length")}


_BIAS = "attention.max_alibi_bias"
_WQKV = "attn.Wqkv"
MPT = Family(
    "MptForCausalLM",
    "MPT 7B and 30B",
    _adapt_mpt,
    names=TensorNames(
        embedding="wte",
        norm="norm_f",
        layers="blocks",
        attention_norm="norm_1",
        query=_WQKV,
        key=_WQKV,
        value=_WQKV,
        attention_out="attn.out_proj",
        mlp_norm="norm_2",
        up="ffn.up_proj",
        down="ffn.down_proj",
    ),
    gguf=GgufFormat(
        "mpt",
        keys=_GGUF_NORM,
        values=_gguf_mpt,
        read=frozenset({_BIAS, "attention.clamp_kqv"}),
    ),
    renamed={
        "d_model": "hidden_size",
        "n_heads": "num_attention_heads",
        "n_layers": "num_hidden_layers",
        "layer_norm_epsilon": "layer_norm_eps",
    },
    values=_mpt_values,
    defaults={"tie_word_embeddings": True},
    activation="gelu",
    gated=False,
    aliases=frozenset({"MPTForCausalLM"}),
)
