# SPDX-License-Identifier: Apache-2.0
"""Tiny random encoder-decoders of texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GenerationConfig,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    MT5Config,
    MT5ForConditionalGeneration,
    PegasusConfig,
    PegasusForConditionalGeneration,
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
_BART: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 42,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 72,
    "max_position_embeddings": 99,
    "decoder_start_token_id": 2,
    "pad_token_id": 1,
    "bos_token_id": None,
    "eos_token_id": None,
    "forced_eos_token_id": None,
}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "T5": (T5ForConditionalGeneration, T5Config, _T5),
    "Flan-T5, whose head is its own": (
        T5ForConditionalGeneration,
        T5Config,
        _T5 | {"tie_word_embeddings": False, "feed_forward_proj": "gated-gelu", "d_kv": 6},
    ),
    "MT5": (
        MT5ForConditionalGeneration,
        MT5Config,
        _T5 | {"num_layers": 1, "num_decoder_layers": 1, "d_kv": 66},
    ),
    "UMT5": (UMT5ForConditionalGeneration, UMT5Config, _T5 | {"num_decoder_layers": None}),
    "Bart": (BartForConditionalGeneration, BartConfig, _BART),
    "MBart": (
        MBartForConditionalGeneration,
        MBartConfig,
        _BART | {"scale_embedding": True, "activation_function": "relu"},
    ),
    "Pegasus": (
        PegasusForConditionalGeneration,
        PegasusConfig,
        _BART | {"encoder_layers": 1, "decoder_layers": 1, "scale_embedding": True},
    ),
    "MarianMTModel": (MarianMTModel, MarianConfig, _BART | {"activation_function": "swish"}),
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
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_(std=0.5)
        for key, parameter in model.named_parameters():
            if "layer_norm" in key or "layernorm" in key:
                parameter.normal_(mean=0 if key.endswith("bias") else 1, std=0.2)
            elif key.endswith("bias"):
                parameter.normal_(std=0.3)
            elif "lm_head" not in key and parameter.requires_grad:
                is_table = "relative" in key or "shared" in key
                parameter.normal_(std=(1.0 if "d_kv" in sizes else 0.4) if is_table else 0.2)
    return model


END, START, FIRST = 256, 257, 258
"""Tokens of the model that `save_text_pair` saves: what ends texts, and what answers begin with."""


def save_text_pair(directory: Path) -> Any:
    """Saves a BART with all that belongs to it, whose tokens of text are bytes."""
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(["</s>", "<start>", "<first>"])
    tokenizer.post_processor = TemplateProcessing("$A </s>", None, [("</s>", END)])
    model = make_pair("Bart")
    with torch.no_grad():  # printable ASCII alone is said
        said = [i for i, it in enumerate(alphabet) if len(it.encode()) == 1]
        model.final_logits_bias.fill_(-100)[:, said] = 0
        model.final_logits_bias[:, START] = 100
    model.generation_config = GenerationConfig(
        eos_token_id=END,
        decoder_start_token_id=START,
        forced_bos_token_id=FIRST,
        bad_words_ids=[[START], [1, 2]],
    )
    model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    return model
