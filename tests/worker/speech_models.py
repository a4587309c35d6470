# SPDX-License-Identifier: Apache-2.0
"""Tiny random Whispers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

BINS, POSITIONS = 17, 75
FRAMES = 2 * POSITIONS
_SIZES: dict[str, Any] = {
    "vocab_size": 331,
    "d_model": 48,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 72,
    "num_mel_bins": BINS,
    "max_source_positions": POSITIONS,
    "max_target_positions": 61,
    "init_std": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
    "begin_suppress_tokens": None,
}


def make_whisper(**sizes: Any) -> WhisperForConditionalGeneration:
    """A float32 model with biases that are not all zero, the same every time; `sizes` are other than usual."""
    torch.manual_seed(3)
    model = WhisperForConditionalGeneration(WhisperConfig(**_SIZES | sizes)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif "layer_norm" in name:
                parameter.normal_(mean=1, std=0.2)
    return model
