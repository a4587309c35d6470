# SPDX-License-Identifier: Apache-2.0
"""Tiny random encoder-decoders of texts."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    MT5Config,
    MT5ForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)

VOCABULARY = 331
_T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 40,
    "d_kv": 14,
    "d_ff": 72,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 3,
    "relative_attention_num_buckets": 12,
    "relative_attention_max_distance": 21,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": None,
}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "T5": (T5ForConditionalGeneration, T5Config, _T5),
    "Flan-T5, whose head is its own": (
        T5ForConditionalGeneration,
        T5Config,
        _T5 | {"tie_word_embeddings": False, "feed_forward_proj": "gated-gelu", "d_kv": 6},
    ),
    "mT5": (
        MT5ForConditionalGeneration,
        MT5Config,
        _T5 | {"num_layers": 1, "num_decoder_layers": 1, "d_kv": 66},
    ),
    "UMT5": (UMT5ForConditionalGeneration, UMT5Config, _T5 | {"num_decoder_layers": None}),
}
"""Classes of transformers, and sizes."""


def make_pair(name: str) -> Any:
    """A float32 model whose norms and biases are not all one and zero, the same every time."""
    make, config, sizes = MODELS[name]
    torch.manual_seed(3)
    model = make(config(**sizes)).float().eval()
    if "its own" in name:
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "layer_norm" in key or "layernorm" in key:
                parameter.normal_(mean=0 if key.endswith("bias") else 1, std=0.2)
            elif key.endswith("bias"):
                parameter.normal_(std=0.3)
            elif "lm_head" not in key:
                parameter.normal_(std=1.0 if "relative" in key or "shared" in key else 0.2)
    return model
