# SPDX-License-Identifier: Apache-2.0
"""Encoders whose queries and keys are rotated: ModernBERT, EuroBERT, Nomic, GTE and Jina v3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagoda.checkpoints.families.bert import GGUF, OF_TOKENS, TWO_LAYERS
from pagoda.checkpoints.families.shared import (
    both_ways,
    dense_mlp,
    head_pooling,
    typed_windows,
    with_attention,
    with_layer_norm,
    with_local_rotary,
)
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.layer_spec import Activation, LayerSpec, MlpSpec, NormSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.pooling_spec import ClassifierSpec, EncoderSpec, HeadPooling
from pagoda.checkpoints.tensor_names import TensorNames

# ---- ModernBERT: most layers have a window, norms are in front, the MLP has a gate (Warner et al. 2024)


def _modern(spec: ModelSpec, fields: Fields) -> ModelSpec:
    every = fields.positive("global_attn_every_n_layers", 3)
    kinds = ("full_attention", "sliding_attention")
    usual = [kinds[layer % every > 0] for layer in range(spec.num_layers)]
    near = fields.positive("local_attention", 128) // 2 + 1
    windows = typed_windows(fields.updated({"sliding_window": near}), spec.num_layers, usual)
    has_bias = fields.flag("mlp_bias", False)

    def change(index: int, layer: LayerSpec) -> LayerSpec:
        return replace(layer, mlp=_with_biases(layer, has_bias), bare_attention=index == 0)

    spec = with_attention(spec.with_layers(change), windows, causal=False)
    spec = with_local_rotary(spec, fields, fields.number("local_rope_theta", 10_000.0))
    norm = NormSpec(fields.number("norm_eps", 1e-5), "layer", fields.flag("norm_bias", False))
    encoder = EncoderSpec(norms_output=True)
    return replace(spec, norm=norm, tie_word_embeddings=True, encoder=encoder)


def _with_biases(layer: LayerSpec, bias: bool, down_bias: bool | None = None) -> MlpSpec:
    """The MLP of a layer, which is dense, with biases or without."""
    return replace(dense_mlp(layer), bias=bias, down_bias=down_bias)


def _modern_head(fields: Fields) -> ClassifierSpec:
    pooling = head_pooling(fields, "classifier_pooling", "cls", {"cls": "first", "mean": "mean"})
    return _modern_layers(fields, pooling)


def _modern_layers(fields: Fields, pooling: HeadPooling) -> ClassifierSpec:
    fields.require("classifier_activation", "gelu")
    return ClassifierSpec(
        dense="head.dense",
        activation="gelu",
        norm="head.norm",
        dense_bias=fields.flag("classifier_bias", False),
        pooling=pooling,
    )


MODERN_BERT = Family(
    "ModernBertModel",
    "ModernBERT, GTE and Granite R2 made of it (vectors)",
    _modern,
    names=TensorNames(
        embedding="model.embeddings.tok_embeddings",
        embedding_norm="model.embeddings.norm",
        norm="model.final_norm",
        attention_norm="attn_norm",
        query="attn.Wqkv",
        key="attn.Wqkv",
        value="attn.Wqkv",
        attention_out="attn.Wo",
        mlp_norm="mlp_norm",
        gate="mlp.Wi",
        up="mlp.Wi",
        down="mlp.Wo",
    ),
    gguf=GgufFormat(
        "modern-bert",
        names=replace(GGUF.names, attention_norm="attn_norm"),
        keys={
            "attention.layer_norm_epsilon": "norm_eps",
            "attention.sliding_window": "local_attention",
            "attention.sliding_window_pattern": "global_attn_every_n_layers",
            "rope.freq_base_swa": "local_rope_theta",
        },
        causal=False,
    ),
    renamed={"global_rope_theta": "rope_theta"},
    defaults={"max_position_embeddings": 8192, "rope_theta": 160_000.0},
    activation="gelu",
    own_keys=frozenset({"mlp_bias"}),
    aliases=frozenset({"ModernBertForMaskedLM", "ColBERTModernBertModel"}),
    heads={
        "ForSequenceClassification": _modern_head,
        "ForTokenClassification": lambda fields: _modern_layers(fields, "all"),
    },
)

# ---- EuroBERT: Llama both ways (Boizard et al. 2025)


def _euro(spec: ModelSpec, fields: Fields) -> ModelSpec:
    has_bias = fields.flag("mlp_bias", False)
    spec = spec.with_layers(lambda _, layer: replace(layer, mlp=_with_biases(layer, has_bias)))
    return both_ways(spec)


def _euro_head(fields: Fields) -> ClassifierSpec:
    known: dict[str, HeadPooling] = {"bos": "first", "mean": "mean", "late": "late"}
    pooling = head_pooling(fields, "classifier_pooling", "late", known)
    return ClassifierSpec(dense="dense", activation="gelu", pooling=pooling)


EURO_BERT = Family(
    "EuroBertModel",
    "EuroBERT (vectors)",
    _euro,
    gguf=GgufFormat("eurobert", causal=False),
    defaults={"max_position_embeddings": 8192, "rms_norm_eps": 1e-5},
    own_keys=frozenset({"mlp_bias"}),
    aliases=frozenset({"EuroBertForMaskedLM"}),
    heads={**OF_TOKENS, "ForSequenceClassification": _euro_head},
)

# ---- Norms of sums, as BERT has them, without learned positions


def _of_sums(spec: ModelSpec, fields: Fields, mlp: MlpSpec, *, bias: bool) -> ModelSpec:
    """An encoder with an MLP, whose norms are of sums; `bias` is that of attention."""
    for name in ("is_decoder", "add_cross_attention"):
        fields.require(name, False)

    def change(_: int, layer: LayerSpec) -> LayerSpec:
        attention = replace(layer.attention, causal=False, qkv_bias=bias, output_bias=bias)
        return LayerSpec(attention, mlp, pre_norm=False, post_norm=True, norms_sums=True)

    return replace(
        with_layer_norm(spec.with_layers(change), fields, bias=True),
        tie_word_embeddings=True,
        encoder=EncoderSpec(num_token_types=fields.count("type_vocab_size")),
    )


def _pooler_head(_: Fields) -> ClassifierSpec:
    return ClassifierSpec(dense="pooler.dense")


_DEFAULTS = {"layer_norm_eps": 1e-12, "type_vocab_size": 2}
_NAMES = TensorNames(
    embedding="embeddings.word_embeddings",
    embedding_norm="emb_ln",
    layers="encoder.layers",
    query="attn.Wqkv",
    key="attn.Wqkv",
    value="attn.Wqkv",
    attention_out="attn.out_proj",
    attention_post_norm="norm1",
    up="mlp.fc1",
    down="mlp.fc2",
    mlp_post_norm="norm2",
)

# ---- Nomic: a gated MLP without biases, or a plain one (Nussbaum et al. 2024)

_TRAINED = 2048
"""Tokens of the longest text of training; beyond them frequencies would have to be scaled anew for each text."""


def _nomic(spec: ModelSpec, fields: Fields) -> ModelSpec:
    for name in ("prenorm", "parallel_block", "use_rms_norm", "rotary_emb_interleaved", "causal"):
        fields.require(name, False)
    for name in ("num_experts", "moe_every_n_layers", "rotary_emb_scale_base"):
        fields.require(name, 0)
    for name in ("rotary_emb_fraction", "rotary_scaling_factor", "mup_embed_scale"):
        fields.require(name, 1.0)
    kind = fields.text("activation_function", "")
    own = dense_mlp(spec.layers[0]).activation
    gates: Mapping[str, Activation] = {"swiglu": "silu", "geglu": "gelu", "": own}
    if kind not in (*gates, "gelu"):
        fields.refuse("activation_function", "must be swiglu, geglu or gelu")
    mlp = replace(
        _with_biases(spec.layers[0], fields.flag("mlp_fc1_bias", False)),
        down_bias=fields.flag("mlp_fc2_bias", False),
        activation=gates.get(kind, "gelu"),
        gated=kind != "gelu",
    )
    spec = _of_sums(spec, fields, mlp, bias=fields.flag("qkv_proj_bias", False))
    if kind == "gelu":
        spec = replace(spec, names=replace(spec.names, up="mlp.fc1"))
    if "n_positions" not in fields:
        return spec
    longest = min(spec.max_position_embeddings, fields.positive("max_trained_positions", _TRAINED))
    return replace(spec, max_position_embeddings=longest)


NOMIC_BERT = Family(
    "NomicBertModel",
    "nomic-embed-text v1 and v1.5 (vectors)",
    _nomic,
    names=replace(_NAMES, gate="mlp.fc12", up="mlp.fc11"),
    gguf=replace(GGUF, architecture="nomic-bert"),
    renamed={
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
        "n_inner": "intermediate_size",
        "n_positions": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps",
        "rotary_emb_base": "rope_theta",
    },
    defaults={**_DEFAULTS, "max_position_embeddings": 2048, "rope_theta": 1000.0},
    own_keys=frozenset({"num_experts"}),
    aliases=frozenset({"NomicBertForMaskedLM"}),
    heads={**OF_TOKENS, "ForSequenceClassification": _pooler_head},
)

# ---- GTE: a gated MLP whose map back has a bias (Zhang et al. 2024)


def _gte(spec: ModelSpec, fields: Fields) -> ModelSpec:
    fields.require("position_embedding_type", "rope")
    fields.require("layer_norm_type", "layer_norm")
    fields.require("logn_attention_scale", False)
    fields.require("pack_qkv", True)
    mlp = _with_biases(spec.layers[0], False, down_bias=True)
    return _of_sums(spec, fields, mlp, bias=True)


GTE = Family(
    "GteModel",
    "gte-multilingual-base, gte-large-en-v1.5, snowflake-arctic-embed-m-v2 (vectors)",
    _gte,
    names=replace(
        _NAMES,
        embedding_norm="embeddings.LayerNorm",
        layers="encoder.layer",
        query="attention.qkv_proj",
        key="attention.qkv_proj",
        value="attention.qkv_proj",
        attention_out="attention.o_proj",
        attention_post_norm="attn_ln",
        gate="mlp.up_gate_proj",
        up="mlp.up_gate_proj",
        down="mlp.down_proj",
        mlp_post_norm="mlp_ln",
        up_first=True,
    ),
    defaults={**_DEFAULTS, "type_vocab_size": 1, "max_position_embeddings": 8192}
    | {"rope_theta": 160_000.0},
    activation="gelu",
    other_activations=frozenset({"silu", "gelu_tanh"}),
    aliases=frozenset(
        {"NewModel", "GteNewModel", "NewForMaskedLM", "GteForMaskedLM", "NewForTokenClassification"}
    ),  # the last one is gte-multilingual-base, which gives vectors
    heads={**OF_TOKENS, "ForSequenceClassification": _pooler_head},
)

# ---- Jina v3: RoBERTa with rotated queries and keys (Sturua et al. 2024)


def _jina(spec: ModelSpec, fields: Fields) -> ModelSpec:
    mlp = replace(_with_biases(spec.layers[0], True), gated=False)
    return _of_sums(spec, fields, mlp, bias=True)


JINA_V3 = Family(
    "JinaEmbeddingsV3Model",
    "jina-embeddings-v3 without its adapters, jina-colbert-v2 (vectors)",
    _jina,
    names=replace(
        _NAMES,
        query="mixer.Wqkv",
        key="mixer.Wqkv",
        value="mixer.Wqkv",
        attention_out="mixer.out_proj",
    ),
    gguf=replace(GGUF, architecture="jina-bert-v3"),
    defaults={"layer_norm_eps": 1e-5, "type_vocab_size": 1, "rope_theta": 20_000.0},
    activation="gelu",
    other_activations=frozenset({"gelu_tanh", "relu", "silu"}),
    renamed={"rotary_emb_base": "rope_theta"},
    aliases=frozenset({"JinaEmbeddingsV3ForMaskedLM", "ColBERTJinaRobertaModel"}),
    heads={**OF_TOKENS, "ForSequenceClassification": lambda _: TWO_LAYERS},
)
