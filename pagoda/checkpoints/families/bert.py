# SPDX-License-Identifier: Apache-2.0
"""Encoders: BERT, RoBERTa and XLM-RoBERTa (Devlin et al. 2018; Liu et al. 2019; Conneau et al. 2019).

A token sees all of its text; positions are learned; norms are of sums; the MLP has no gate.
"""

from __future__ import annotations

from dataclasses import replace

from pagoda.checkpoints.families.shared import dense_mlp, with_head, with_layer_norm
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.layer_spec import LayerSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.pooling_spec import ClassifierSpec, EncoderSpec
from pagoda.checkpoints.rope import RotarySpec
from pagoda.checkpoints.tensor_names import GGUF_NAMES, TensorNames


def encoder(spec: ModelSpec, fields: Fields, first_position: int) -> ModelSpec:
    """The model as an encoder, whose positions begin with a row of their table."""
    fields.require("position_embedding_type", "absolute")
    for name in ("is_decoder", "add_cross_attention", "use_task_id"):
        fields.require(name, False)
    num_positions = spec.max_position_embeddings
    if num_positions <= first_position:
        fields.refuse("max_position_embeddings", f"must be above {first_position}")

    def change(_: int, layer: LayerSpec) -> LayerSpec:
        attention = replace(layer.attention, causal=False, qkv_bias=True, output_bias=True)
        mlp = replace(dense_mlp(layer), bias=True, gated=False)
        return LayerSpec(attention, mlp, pre_norm=False, post_norm=True, norms_sums=True)

    return replace(
        with_layer_norm(spec.with_layers(change), fields, bias=True),
        rotary={"default": RotarySpec(dim=0, theta=1.0)},
        max_position_embeddings=num_positions - first_position,
        tie_word_embeddings=True,
        encoder=EncoderSpec(num_positions, first_position, fields.count("type_vocab_size")),
    )


def _bert(spec: ModelSpec, fields: Fields) -> ModelSpec:
    return encoder(spec, fields, 0)


def _bert_ranker(spec: ModelSpec, fields: Fields) -> ModelSpec:
    return with_head(_bert(spec, fields), fields, ClassifierSpec(dense="pooler.dense"))


def _roberta(spec: ModelSpec, fields: Fields) -> ModelSpec:
    """Positions begin behind the number of the token that pads."""
    return encoder(spec, fields, fields.count("pad_token_id") + 1)


def _roberta_ranker(spec: ModelSpec, fields: Fields) -> ModelSpec:
    return with_head(_roberta(spec, fields), fields, TWO_LAYERS)


TWO_LAYERS = ClassifierSpec("classifier.out_proj", "classifier.dense")
"""Head that looks at the first token, as most have it."""
OF_TOKENS = {"ForTokenClassification": lambda _: ClassifierSpec(pooling="all")}
"""Head that looks at each token."""
NAMES = TensorNames(
    embedding="embeddings.word_embeddings",
    layers="encoder.layer",
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    attention_out="attention.output.dense",
    attention_post_norm="attention.output.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    mlp_post_norm="output.LayerNorm",
)
GGUF = GgufFormat(
    "bert",
    names=replace(
        GGUF_NAMES,
        positions="position_embd",
        token_types="token_types",
        embedding_norm="token_embd_norm",
        attention_post_norm="attn_output_norm",
        mlp_post_norm="layer_output_norm",
    ),
    keys={"attention.layer_norm_epsilon": "layer_norm_eps"},
    read=frozenset({"classifier.output_labels"}),
    causal=False,
)
"""Files in which positions begin with the first row: those of RoBERTa are cut there."""
_BERT_DEFAULTS = {"layer_norm_eps": 1e-12, "type_vocab_size": 2, "max_position_embeddings": 512}
BERT = Family(
    "BertModel",
    "BGE, E5, GTE and all-MiniLM (vectors), ERNIE",
    _bert,
    names=NAMES,
    gguf=GGUF,
    defaults=_BERT_DEFAULTS,
    activation="gelu",
    other_activations=frozenset({"gelu_tanh", "relu", "silu"}),
    aliases=frozenset(
        {"BertForMaskedLM", "HF_ColBERT", "ErnieModel", "ErnieForMaskedLM"}
        | {"BertSpladeSparseEmbeddingModel"}
    ),
    heads=OF_TOKENS,
    masked_head=(
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.bias",
    ),
)
BERT_RANKER = replace(
    BERT,
    architecture="BertForSequenceClassification",
    models="ms-marco-MiniLM (scores of pairs)",
    adapt=_bert_ranker,
    gguf=replace(GGUF, tensor="cls.output.weight"),
    aliases=frozenset({"ErnieForSequenceClassification"}),
)
XLM_ROBERTA = replace(
    BERT,
    architecture="XLMRobertaModel",
    models="multilingual E5, BGE-M3, all-distilroberta, CamemBERT (vectors)",
    adapt=_roberta,
    gguf=None,
    defaults={**_BERT_DEFAULTS, "pad_token_id": 1},
    masked_head=("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
    aliases=frozenset(
        {"RobertaModel", "RobertaForMaskedLM", "XLMRobertaForMaskedLM"}
        | {"CamembertModel", "CamembertForMaskedLM", "BgeM3EmbeddingModel"}
    ),
)
XLM_ROBERTA_RANKER = replace(
    XLM_ROBERTA,
    architecture="XLMRobertaForSequenceClassification",
    models="bge-reranker, bge-reranker-v2-m3, stsb-roberta (scores of pairs)",
    adapt=_roberta_ranker,
    aliases=frozenset({"RobertaForSequenceClassification", "CamembertForSequenceClassification"}),
)
