# SPDX-License-Identifier: Apache-2.0
"""Texts of models that fill gaps."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from pagoda.text.model_text import ModelText, synthetic_model_text
from pagoda.text.tokenizers.tokenizer import IM_END, IM_START, Tokenizer, byte_level_alphabet

QWEN_MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def fim_text(marks: Sequence[str] = QWEN_MARKS) -> ModelText:
    """A model of bytes with tokens besides."""
    backend = Backend(BPE(vocab=byte_level_alphabet(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(mark, normalized=False) for mark in (IM_START, IM_END)])
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    text = synthetic_model_text()
    return ModelText(Tokenizer(backend), text.chat_template, text.eos_token_ids)
