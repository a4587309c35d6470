# SPDX-License-Identifier: Apache-2.0
"""Decoders like Llama whose MLPs have no gates: Phi, StarCoder 2, Nemotron, Arcee, Jais 2, Persimmon, Apertus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagoda.checkpoints.families.shared import (
    dense_mlp,
    own_heads,
    with_attention,
    with_biases,
    with_given_window,
    with_layer_norm,
)
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.layer_spec import XIELU
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.tensor_names import GGUF_NEIGHBOURS, TensorNames

_LAYER_NORM = {"attention.layer_norm_epsilon": "layer_norm_eps"}

# ---- Phi-1, 1.5 and 2: attention and MLP side by side, half of every head rotated (Gunasekar et al. 2023)


def _adapt_phi(spec: ModelSpec, fields: Fields) -> ModelSpec:
    spec = spec.with_layers(lambda _, layer: replace(layer, parallel=True))
    return replace(with_layer_norm(with_biases(spec), fields, bias=True), head_bias=True)


PHI = Family(
    "PhiForCausalLM",
    "Phi-1, Phi-1.5, Phi-2",
    _adapt_phi,
    names=TensorNames(
        norm="model.final_layernorm", attention_out="self_attn.dense", up="mlp.fc1", down="mlp.fc2"
    ),
    gguf=GgufFormat("phi2", keys=_LAYER_NORM),
    activation="gelu_tanh",
    gated=False,
    partial_rotary=0.5,
)


# ---- StarCoder 2: layer norms and biases (Lozhkov et al. 2024)


def _adapt_starcoder2(spec: ModelSpec, fields: Fields) -> ModelSpec:
    bias = fields.flag("use_bias", True)
    spec = with_biases(with_given_window(spec, fields), qkv=bias, out=bias, mlp=bias)
    return with_layer_norm(spec, fields, bias=True)


STARCODER2 = Family(
    "Starcoder2ForCausalLM",
    "StarCoder 2",
    _adapt_starcoder2,
    names=TensorNames(up="mlp.c_fc", down="mlp.c_proj"),
    gguf=GgufFormat("starcoder2", keys=_LAYER_NORM),
    renamed={"norm_epsilon": "layer_norm_eps"},
    defaults={"num_key_value_heads": 2, "tie_word_embeddings": True},
    activation="gelu_tanh",
    gated=False,
)


# ---- Nemotron: squared ReLU, and weights of layer norms less one (Parmar et al. 2024)


def _adapt_own_biases(spec: ModelSpec, fields: Fields) -> ModelSpec:
    attention = fields.flag("attention_bias", False)
    return with_biases(spec, qkv=attention, out=attention, mlp=fields.flag("mlp_bias", False))


def _adapt_nemotron(spec: ModelSpec, fields: Fields) -> ModelSpec:
    return with_layer_norm(_adapt_own_biases(spec, fields), fields, bias=True)


NEMOTRON = Family(
    "NemotronForCausalLM",
    "Nemotron-4, Minitron",
    _adapt_nemotron,
    names=TensorNames(norm_offset=1.0),
    gguf=GgufFormat("nemotron", keys=_LAYER_NORM),
    renamed={"norm_eps": "layer_norm_eps"},
    activation="relu2",
    gated=False,
    partial_rotary=0.5,
    own_keys=frozenset({"mlp_bias"}),
)


# ---- Arcee: Llama with squared ReLU (Arcee 2025)


ARCEE = Family(
    "ArceeForCausalLM",
    "AFM 4.5B",
    _adapt_own_biases,
    gguf=GgufFormat("arcee", names=GGUF_NEIGHBOURS),
    defaults={"rms_norm_eps": 1e-5},
    activation="relu2",
    gated=False,
    own_keys=frozenset({"mlp_bias"}),
)


# ---- Jais 2: layer norms, biases and squared ReLU (G42 2025)


JAIS2 = replace(
    NEMOTRON,
    architecture="Jais2ForCausalLM",
    models="Jais 2",
    names=TensorNames(),
    gguf=GgufFormat("jais2", keys=_LAYER_NORM),
    renamed={},
    defaults={"attention_bias": True, "mlp_bias": True},
    partial_rotary=None,
)


# ---- Persimmon: layer norms of heads (Elsen et al. 2023)

_JOINED = "self_attn.query_key_value"


def _adapt_persimmon(spec: ModelSpec, fields: Fields) -> ModelSpec:
    norm = "layer" if fields.flag("qk_layernorm", True) else None
    spec = with_attention(with_biases(spec), qkv_bias=True, output_bias=True, qk_norm=norm)
    return with_layer_norm(spec, fields, bias=True)


PERSIMMON = Family(
    "PersimmonForCausalLM",
    "Persimmon 8B",
    _adapt_persimmon,
    names=TensorNames(
        norm="model.final_layernorm",
        query=_JOINED,
        key=_JOINED,
        value=_JOINED,
        query_norm="self_attn.q_layernorm",
        key_norm="self_attn.k_layernorm",
        attention_out="self_attn.dense",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        joins_by_head=True,
        head_norms="shared",
    ),
    values=own_heads,
    activation="relu2",
    gated=False,
    partial_rotary=0.5,
    own_keys=frozenset({"qk_layernorm"}),
)


# ---- Apertus: norms of queries and keys, and xIELU (Hernandez-Cano et al. 2025)


def _adapt_apertus(spec: ModelSpec, fields: Fields) -> ModelSpec:
    told = fields.table(_NUMBERS)
    if told is not None:
        lists = [told.numbers(name) for name in XIELU]
        if {len(it) for it in lists} != {spec.num_layers}:
            fields.refuse(_NUMBERS, f"must have {spec.num_layers} numbers of each kind")
        spec = spec.with_layers(
            lambda index, layer: replace(
                layer, mlp=replace(dense_mlp(layer), numbers=tuple(it[index] for it in lists))
            )
        )
    return with_attention(spec, qk_norm="head")


def _gguf_apertus(fields: Fields) -> Mapping[str, object]:
    """Numbers of xIELU, which files have in their metadata."""
    return {_NUMBERS: {name: fields.values.get(f"xielu.{name}") for name in XIELU}}


_NUMBERS = "xielu"


_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
APERTUS = Family(
    "ApertusForCausalLM",
    "Apertus 8B and 70B",
    _adapt_apertus,
    names=TensorNames(attention_norm="attention_layernorm", mlp_norm="feedforward_layernorm"),
    gguf=GgufFormat(
        "apertus",
        values=_gguf_apertus,
        read=frozenset(f"{_NUMBERS}.{name}" for name in XIELU),
    ),
    defaults={"rms_norm_eps": 1e-5, "rope_parameters": _ROPE},
    activation="xielu",
    gated=False,
)
