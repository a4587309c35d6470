# SPDX-License-Identifier: Apache-2.0
"""Encoders near BERT: DistilBERT, ELECTRA, MPNet and DeBERTa."""

from __future__ import annotations

from dataclasses import replace

from pagoda.checkpoints.distances import Disentangled, DistanceBuckets
from pagoda.checkpoints.families.bert import BERT, NAMES, OF_TOKENS, TWO_LAYERS, encoder
from pagoda.checkpoints.families.shared import with_attention
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.pooling_spec import ClassifierSpec, VectorActivation

# ---- DistilBERT: BERT without token types (Sanh et al. 2019)


def _distilbert(spec: ModelSpec, fields: Fields) -> ModelSpec:
    return encoder(spec, fields.updated({"layer_norm_eps": 1e-12, "type_vocab_size": 0}), 0)


DISTILBERT = replace(
    BERT,
    architecture="DistilBertModel",
    models="DistilBERT, and sentence models made of it (vectors)",
    adapt=_distilbert,
    names=replace(
        NAMES,
        layers="layer",
        query="attention.q_lin",
        key="attention.k_lin",
        value="attention.v_lin",
        attention_out="attention.out_lin",
        attention_post_norm="sa_layer_norm",
        up="ffn.lin1",
        down="ffn.lin2",
        mlp_post_norm="output_layer_norm",
    ),
    gguf=None,
    defaults={**BERT.defaults, "hidden_dim": 3072},
    renamed={
        "dim": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "hidden_dim": "intermediate_size",
        "activation": "hidden_act",
    },
    aliases=frozenset({"DistilBertForMaskedLM"}),
    masked_head=("vocab_transform", "vocab_layer_norm", "vocab_projector.bias"),
    heads={
        **OF_TOKENS,
        "ForSequenceClassification": lambda _: ClassifierSpec(
            dense="pre_classifier", activation="relu"
        ),
    },
)

# ---- ELECTRA: BERT whose embeddings may be narrower than hidden states (Clark et al. 2020)


def _electra(spec: ModelSpec, fields: Fields) -> ModelSpec:
    spec = encoder(spec, fields, 0)
    size = fields.positive("embedding_size")
    if spec.encoder is None or size == spec.hidden_size:
        return spec
    return replace(spec, encoder=replace(spec.encoder, embedding_size=size))


ELECTRA = replace(
    BERT,
    architecture="ElectraModel",
    models="ELECTRA (vectors)",
    adapt=_electra,
    gguf=None,
    defaults={**BERT.defaults, "embedding_size": 128},
    masked_head=None,
    aliases=frozenset({"ElectraForPreTraining"}),
    heads={
        **OF_TOKENS,
        "ForSequenceClassification": lambda _: replace(TWO_LAYERS, activation="gelu"),
    },
)

# ---- MPNet: RoBERTa with a number of each head and distance in scores (Song et al. 2020)

_DISTANCES = DistanceBuckets(32, 128)
_PAD = 1
"""Token that pads, whatever config.json says: transformers' class has it so."""


def _mpnet(spec: ModelSpec, fields: Fields) -> ModelSpec:
    fields.require("relative_attention_num_buckets", _DISTANCES.count)
    spec = encoder(spec, fields.updated({"type_vocab_size": 0}), _PAD + 1)
    return with_attention(spec, distances=_DISTANCES)


MPNET = replace(
    BERT,
    architecture="MPNetModel",
    models="all-mpnet-base-v2, multi-qa-mpnet (vectors)",
    adapt=_mpnet,
    names=replace(
        NAMES,
        query="attention.attn.q",
        key="attention.attn.k",
        value="attention.attn.v",
        attention_out="attention.attn.o",
        attention_post_norm="attention.LayerNorm",
    ),
    gguf=None,
    aliases=frozenset({"MPNetForMaskedLM"}),
    masked_head=("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
    heads={**OF_TOKENS, "ForSequenceClassification": lambda _: TWO_LAYERS},
)

# ---- DeBERTa v2 and v3: scores of contents with places, and of places with contents (He et al. 2020, 2021)


def _deberta(spec: ModelSpec, fields: Fields) -> ModelSpec:
    for name in ("conv_kernel_size", "z_steps"):
        fields.require(name, 0)
    fields.require("embedding_size", spec.hidden_size)
    fields.require("attention_head_size", spec.head_dim)
    said = fields.values.get("pos_att_type") or []
    kinds = said.split("|") if isinstance(said, str) else said
    if not isinstance(kinds, list):
        fields.refuse("pos_att_type", "must be a list")
    known = {str(kind).strip().lower() for kind in kinds}
    is_relative = fields.flag("relative_attention", False)
    if known != {"c2p", "p2c"} and (is_relative or known):
        fields.refuse("pos_att_type", "must be c2p and p2c, or absent without relative_attention")
    spec = with_attention(
        encoder(spec, fields, 0),
        scale=((1 + len(known)) * spec.head_dim) ** -0.5,
        distances=_disentangled(spec, fields) if is_relative else None,
    )
    if spec.encoder is None or fields.flag("position_biased_input", True):
        return spec
    return replace(spec, encoder=replace(spec.encoder, num_positions=0))


def _disentangled(spec: ModelSpec, fields: Fields) -> Disentangled:
    longest = _at_least_one(fields, "max_relative_positions") or spec.max_position_embeddings
    buckets = _at_least_one(fields, "position_buckets")
    norms = fields.text("norm_rel_ebd", "none").lower().split("|")
    return Disentangled(
        buckets or longest,
        longest if buckets else None,
        fields.flag("share_att_key", False),
        any(norm.strip() == "layer_norm" for norm in norms),
    )


def _deberta_head(fields: Fields) -> ClassifierSpec:
    known: dict[str, VectorActivation] = {"gelu": "gelu", "tanh": "tanh", "relu": "relu"}
    activation = fields.text("pooler_hidden_act", "gelu")
    if activation not in known:
        fields.refuse("pooler_hidden_act", f"must be one of {', '.join(known)}")
    return ClassifierSpec(dense="pooler.dense", activation=known[activation])


def _at_least_one(fields: Fields, name: str) -> int | None:
    """The number in the field `name`; None where it says that there is none, as -1 does."""
    return None if fields.values.get(name) in (None, -1, 0) else fields.positive(name)


DEBERTA = replace(
    BERT,
    architecture="DebertaV2Model",
    models="DeBERTa v3, mDeBERTa (vectors)",
    adapt=_deberta,
    names=replace(
        NAMES,
        query="attention.self.query_proj",
        key="attention.self.key_proj",
        value="attention.self.value_proj",
    ),
    gguf=None,
    defaults={**BERT.defaults, "layer_norm_eps": 1e-7, "type_vocab_size": 0},
    aliases=frozenset({"DebertaV2ForMaskedLM"}),
    masked_head=None,
    heads={**OF_TOKENS, "ForSequenceClassification": _deberta_head},
)
