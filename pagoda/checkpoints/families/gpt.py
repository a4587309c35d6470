# SPDX-License-Identifier: Apache-2.0
"""GPT-2 and its kind: layer norms, plain MLPs and biases; GPT-NeoX, GPT-J, GPTBigCode and OPT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from pagoda.checkpoints.families.shared import (
    following_sizes,
    own_heads,
    with_alibi,
    with_attention_of,
    with_biases,
    with_layer_norm,
    with_position_table,
)
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.layer_spec import Activation
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.multipliers import Multipliers
from pagoda.checkpoints.tensor_names import GGUF_NAMES, TensorNames

_RENAMED = {
    "n_embd": "hidden_size",
    "n_positions": "max_position_embeddings",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "layer_norm_eps",
}
"""Keys of config.json as GPT-2 has them."""
_GELUS: frozenset[Activation] = frozenset({"gelu", "gelu_tanh", "relu", "silu"})
_JOINED = "attn.c_attn"
_NAMES = TensorNames(
    embedding="wte",
    positions="wpe",
    norm="ln_f",
    layers="h",
    attention_norm="ln_1",
    query=_JOINED,
    key=_JOINED,
    value=_JOINED,
    attention_out="attn.c_proj",
    mlp_norm="ln_2",
    up="mlp.c_fc",
    down="mlp.c_proj",
)


def _gguf_values(fields: Fields) -> Mapping[str, object]:
    return {"n_inner": fields.positive("feed_forward_length")}


_GGUF = GgufFormat(
    "gpt2",
    names=replace(GGUF_NAMES, positions="position_embd"),
    keys={"attention.layer_norm_epsilon": "layer_norm_eps"},
    values=_gguf_values,
)

# ---- GPT-2 (Radford et al. 2019): learned positions


def _adapt_gpt2(spec: ModelSpec, fields: Fields) -> ModelSpec:
    for name, usual in (
        *(("scale_attn_weights", True), ("add_cross_attention", False)),
        ("is_decoder", fields.values.get("is_decoder")),
    ):
        fields.require(name, usual)
    spec = with_layer_norm(with_biases(spec), fields, bias=True)
    return with_position_table(spec)


GPT2 = Family(
    "GPT2LMHeadModel",
    "GPT-2, DistilGPT-2, DialoGPT, Cerebras-GPT, GPT-SW3",
    _adapt_gpt2,
    names=replace(_NAMES, transposes=True),
    gguf=_GGUF,
    renamed=_RENAMED,
    values=partial(following_sizes, inner_name="n_inner"),
    defaults={"max_position_embeddings": 1024, "tie_word_embeddings": True},
    activation="gelu_tanh",
    other_activations=_GELUS,
    gated=False,
)


# ---- GPTBigCode: GPT-2 with one head of keys and values (Li et al. 2023)


def _bigcode_values(fields: Fields) -> Mapping[str, object]:
    heads = fields.positive("num_attention_heads")
    kv_heads = 1 if fields.flag("multi_query", True) else heads
    return {**following_sizes(fields, "n_inner"), "num_key_value_heads": kv_heads}


GPT_BIGCODE = replace(
    GPT2,
    architecture="GPTBigCodeForCausalLM",
    models="StarCoder, SantaCoder, Granite Code 20B",
    names=replace(_NAMES, joins_by_head=True),
    gguf=replace(_GGUF, architecture="starcoder"),
    values=_bigcode_values,
)


# ---- JAIS: GPT-2 with gated MLPs, scores by distance and factors of muP (Sengupta et al. 2023)


def _jais_values(fields: Fields) -> Mapping[str, object]:
    for name, usual, known in (
        ("activation_function", "gelu_new", "swiglu"),
        ("position_embedding_type", "learned", "alibi"),
    ):
        if fields.text(name, usual) != known:
            fields.refuse(name, f"must be {known!r}")
    fields.require("scale_attn_weights", True)
    return {**following_sizes(fields, "n_inner"), "hidden_act": "silu"}


def _adapt_jais(spec: ModelSpec, fields: Fields) -> ModelSpec:
    for name in ("add_cross_attention", "reorder_and_upcast_attn"):
        fields.require(name, False)
    fields.require("alibi_scaling", None)
    by_size = fields.flag("scale_qk_dot_by_d", fields.flag("mup_scale_qk_dot_by_d", False))
    spec = with_attention_of(with_alibi(spec), scale=spec.head_dim ** -(1.0 if by_size else 0.5))
    spec = with_layer_norm(with_biases(spec), fields, bias=True)
    logits = fields.number("mup_output_alpha", 1.0) * fields.number("mup_width_scale", 1.0)
    factors = Multipliers(
        embedding=fields.number("embeddings_scale", fields.number("mup_embeddings_scale", 1.0)),
        logits=fields.number("width_scale", logits),
    )
    return replace(spec, multipliers=factors)


def _gguf_jais(fields: Fields) -> Mapping[str, object]:
    """The form that llama.cpp always computes; factors of embeddings and logits are in the weights."""
    fields.require("attention.max_alibi_bias", 8.0)
    return {
        **_gguf_values(fields),
        "activation_function": "swiglu",
        "position_embedding_type": "alibi",
        "mup_scale_qk_dot_by_d": True,
    }


JAIS = replace(
    GPT2,
    architecture="JAISLMHeadModel",
    models="JAIS 13B and 30B, JAIS family 590M to 70B",
    adapt=_adapt_jais,
    names=replace(_NAMES, gate="mlp.c_fc2", transposes=True),
    values=_jais_values,
    activation="silu",
    other_activations=frozenset(),
    gated=True,
    gguf=GgufFormat(
        "jais",
        keys=_GGUF.keys,
        values=_gguf_jais,
        read=frozenset({"attention.max_alibi_bias"}),
    ),
)


# ---- GPT-NeoX (Black et al. 2022): attention and MLP side by side behind two norms


def _adapt_neox(spec: ModelSpec, fields: Fields) -> ModelSpec:
    bias, parallel = (fields.flag(it, True) for it in ("attention_bias", "use_parallel_residual"))
    spec = spec.with_layers(
        lambda _, layer: replace(layer, parallel=parallel, parallel_norms=parallel)
    )
    return with_layer_norm(with_biases(spec, qkv=bias, out=bias), fields, bias=True)


_PARALLEL = "use_parallel_residual"
_NEOX_JOINED = "attention.query_key_value"
GPT_NEOX = Family(
    "GPTNeoXForCausalLM",
    "Pythia, GPT-NeoX-20B, Dolly 2, StableLM alpha, RedPajama-INCITE",
    _adapt_neox,
    names=TensorNames(
        embedding="gpt_neox.embed_in",
        norm="gpt_neox.final_layer_norm",
        head="embed_out",
        layers="gpt_neox.layers",
        query=_NEOX_JOINED,
        key=_NEOX_JOINED,
        value=_NEOX_JOINED,
        attention_out="attention.dense",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        joins_by_head=True,
    ),
    gguf=GgufFormat(
        "gptneox",
        keys=_GGUF.keys,
        values=lambda fields: {"use_parallel_residual": fields.flag(_PARALLEL, True)},
        read=frozenset({_PARALLEL}),
    ),
    renamed={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
    values=own_heads,
    activation="gelu",
    other_activations=_GELUS,
    gated=False,
    partial_rotary=0.25,
    own_keys=frozenset({"use_parallel_residual"}),
)


# ---- GPT-J (Wang and Komatsuzaki 2021): attention and MLP side by side behind one norm


def _gptj_values(fields: Fields) -> Mapping[str, object]:
    head_dim = fields.positive("hidden_size") // fields.positive("num_attention_heads")
    rotated = fields.positive("rotary_dim", 64)
    if rotated > head_dim or rotated % 2:
        fields.refuse("rotary_dim", f"must be even and at most the {head_dim} of a head")
    return {**following_sizes(fields, "n_inner"), "partial_rotary_factor": rotated / head_dim}


def _adapt_gptj(spec: ModelSpec, fields: Fields) -> ModelSpec:
    spec = spec.with_layers(lambda _, layer: replace(layer, parallel=True))
    spec = with_biases(spec, qkv=False, out=False)
    return replace(with_layer_norm(spec, fields, bias=True), head_bias=True)


GPTJ = Family(
    "GPTJForCausalLM",
    "GPT-J 6B",
    _adapt_gptj,
    names=replace(
        _NAMES,
        query="attn.q_proj",
        key="attn.k_proj",
        value="attn.v_proj",
        attention_out="attn.out_proj",
        up="mlp.fc_in",
        down="mlp.fc_out",
        rotates_neighbours=True,
    ),
    renamed=_RENAMED,
    values=_gptj_values,
    defaults={"max_position_embeddings": 2048},
    activation="gelu_tanh",
    other_activations=_GELUS,
    gated=False,
    partial_rotary=1.0,
)


# ---- OPT (Zhang et al. 2022): learned positions, the first in the third row


def _adapt_opt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    for name, usual in (
        *(("do_layer_norm_before", True), ("_remove_final_layer_norm", False)),
        *(("layer_norm_elementwise_affine", True), ("word_embed_proj_dim", spec.hidden_size)),
    ):
        fields.require(name, usual)
    bias = fields.flag("enable_bias", True)
    spec = with_biases(spec, qkv=bias, out=bias, mlp=bias)
    return with_position_table(with_layer_norm(spec, fields, bias=True), first=2)


OPT = Family(
    "OPTForCausalLM",
    "OPT 125M and 1.3B to 66B",
    _adapt_opt,
    names=TensorNames(
        embedding="model.decoder.embed_tokens",
        positions="model.decoder.embed_positions",
        norm="model.decoder.final_layer_norm",
        layers="model.decoder.layers",
        attention_norm="self_attn_layer_norm",
        attention_out="self_attn.out_proj",
        mlp_norm="final_layer_norm",
        up="fc1",
        down="fc2",
    ),
    renamed={"activation_function": "hidden_act"},
    values=partial(following_sizes, inner_name="ffn_dim", usual=3072),
    defaults={"tie_word_embeddings": True, "max_position_embeddings": 2048},
    activation="relu",
    other_activations=_GELUS,
    gated=False,
)
