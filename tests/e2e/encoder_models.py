# SPDX-License-Identifier: Apache-2.0
"""Tiny random encoders, and models with a head that scores texts, saved by transformers."""

from __future__ import annotations

from typing import Any

import torch
import transformers

_SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 162,
    "initializer_range": 0.3,
}
_DECODER = {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
_DEBERTA = {
    **{"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16},
    **{"share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False},
}

ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", {}),
    "bert-masked": ("BertForMaskedLM", {}),
    "roberta": ("RobertaModel", {"pad_token_id": 1}),
    "xlm-roberta": ("XLMRobertaModel", {"type_vocab_size": 1, "pad_token_id": 1}),
    "camembert": ("CamembertModel", {"pad_token_id": 1, "hidden_act": "gelu_new"}),
    "bert-relu": ("BertModel", {"hidden_act": "relu", "num_hidden_layers": 2}),
    "distilbert": ("DistilBertModel", {"hidden_dim": 90, "activation": "silu"}),
    "electra": ("ElectraModel", {"embedding_size": 24, "hidden_act": "gelu_pytorch_tanh"}),
    "mpnet": ("MPNetModel", {"pad_token_id": 1, "num_attention_heads": 2}),
    "deberta": ("DebertaV2Model", _DEBERTA),
    "deberta-own-maps": (
        "DebertaV2Model",
        {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 2}
        | {"max_relative_positions": 20},
    ),
    "modernbert": ("ModernBertModel", {"local_attention": 26, "pad_token_id": 0}),
    "modernbert-biases": (
        "ModernBertModel",
        {"local_attention": 128, "pad_token_id": 0, "attention_bias": True, "mlp_bias": True}
        | {"norm_bias": True, "hidden_activation": "gelu"},
    ),
    "eurobert": ("EuroBertModel", {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}),
    "nomic": ("NomicBertModel", {"intermediate_size": 72}),
    "gte": ("GteModel", {"num_attention_heads": 2, "pad_token_id": 0}),
    "gte-no-types": (
        "GteModel",
        {"type_vocab_size": 0, "intermediate_size": 70, "pad_token_id": 0},
    ),
    "jina-v3": ("JinaEmbeddingsV3Model", {"pad_token_id": 1}),
    "embedding-gemma": (
        "Gemma3TextModel",
        _DECODER
        | {"use_bidirectional_attention": True, "sliding_window": 30, "query_pre_attn_scalar": 16}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "qwen2-both-ways": ("Qwen2Model", {"num_key_value_heads": 2, "is_causal": False}),
}
RANKERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForSequenceClassification", {}),
    "roberta": ("RobertaForSequenceClassification", {}),
    "xlm-roberta": (
        "XLMRobertaForSequenceClassification",
        {"type_vocab_size": 1, "pad_token_id": 1},
    ),
    "qwen3": ("Qwen3ForSequenceClassification", _DECODER),
    "llama": ("LlamaForSequenceClassification", _DECODER),
}


MASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", {}),
    "distilbert": ("DistilBertForMaskedLM", {"hidden_dim": 90}),
    "roberta": ("RobertaForMaskedLM", {"pad_token_id": 1}),
    "mpnet": ("MPNetForMaskedLM", {"pad_token_id": 1}),
}
_MODERN = {"local_attention": 26, "pad_token_id": 0}
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForSequenceClassification", {}),
    "bert-tokens": ("BertForTokenClassification", {}),
    "roberta-tokens": ("RobertaForTokenClassification", {"pad_token_id": 1}),
    "distilbert": ("DistilBertForSequenceClassification", {"hidden_dim": 90}),
    "electra": ("ElectraForSequenceClassification", {"embedding_size": 24}),
    "electra-tokens": ("ElectraForTokenClassification", {"embedding_size": 24}),
    "mpnet": ("MPNetForSequenceClassification", {"pad_token_id": 1}),
    "deberta": ("DebertaV2ForSequenceClassification", _DEBERTA),
    "deberta-tokens": ("DebertaV2ForTokenClassification", _DEBERTA),
    "modernbert": ("ModernBertForSequenceClassification", _MODERN),
    "modernbert-mean": (
        "ModernBertForSequenceClassification",
        {**_MODERN, "classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True},
    ),
    "modernbert-tokens": ("ModernBertForTokenClassification", _MODERN),
    "eurobert": ("EuroBertForSequenceClassification", {"pad_token_id": 0}),
    "nomic": ("NomicBertForSequenceClassification", {}),
    "gte": ("GteForSequenceClassification", {"pad_token_id": 0}),
    "jina-v3": ("JinaEmbeddingsV3ForSequenceClassification", {"pad_token_id": 1}),
    "qwen2": ("Qwen2ForSequenceClassification", {"num_key_value_heads": 2, "pad_token_id": 0}),
    "qwen2-tokens": ("Qwen2ForTokenClassification", {"num_key_value_heads": 2}),
}


def make_encoder(kind: str, **options: Any) -> transformers.PreTrainedModel:
    """A model of a class of transformers, whose weights, biases and norms are all random."""
    model_class = getattr(transformers, kind)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**_SHAPE | options))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("bias"):
                value.normal_(0, 0.2)
            elif "norm" in name.lower():
                value.normal_(1, 0.2)
    model.eval()
    return model
