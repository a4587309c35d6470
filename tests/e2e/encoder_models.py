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

ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", {}),
    "bert-masked": ("BertForMaskedLM", {}),
    "roberta": ("RobertaModel", {"pad_token_id": 1}),
    "xlm-roberta": ("XLMRobertaModel", {"type_vocab_size": 1, "pad_token_id": 1}),
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
