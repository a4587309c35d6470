# SPDX-License-Identifier: Apache-2.0
"""Tiny random Whispers."""

from __future__ import annotations

import io
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

BINS, POSITIONS, VOCABULARY = 17, 75, 331
FRAMES = 2 * POSITIONS
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
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


END, FIRST_TIME = 256, 266
"""Tokens of the model that `save_speech_model` saves; the latter is that of the time 0."""
RATE, PIECE_S = 16_000, 1.5
"""Samples a second, and seconds of a piece of audio."""
_AROUND = (
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>"),
    *("<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)


def save_speech_model(directory: Path) -> WhisperForConditionalGeneration:
    """Saves a model with all that belongs to it, whose tokens of text are bytes; it says printable ASCII alone."""
    alphabet = sorted(ByteLevel.alphabet())
    times = [f"<|{step / 50:.2f}|>" for step in range(POSITIONS + 1)]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([*_AROUND])
    tokenizer.add_tokens([AddedToken(time, special=False) for time in times])
    said = {*map(chr, range(33, 127)), "Ġ"}
    model = make_whisper(vocab_size=tokenizer.get_vocab_size(), init_std=0.5)
    model.generation_config = GenerationConfig(
        eos_token_id=END,
        decoder_start_token_id=END + 1,
        is_multilingual=True,
        no_timestamps_token_id=FIRST_TIME - 1,
        max_initial_timestamp_index=20,
        suppress_tokens=[i for i, it in enumerate(alphabet) if it not in said]
        + [*range(END + 1, FIRST_TIME - 1)],
        begin_suppress_tokens=[alphabet.index("Ġ"), END],
        alignment_heads=[[0, 1], [1, 0], [1, 2]],
    )
    model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    feature_extractor().save_pretrained(directory)
    return model


def feature_extractor() -> WhisperFeatureExtractor:
    extractor = WhisperFeatureExtractor(feature_size=BINS, chunk_length=1)
    extractor.n_samples, extractor.nb_max_frames = int(PIECE_S * RATE), FRAMES
    return extractor


def sound(seconds: float, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int16]]:
    """Samples [n] int16 that are no silence."""
    time = np.arange(int(seconds * RATE)) / RATE
    tones = np.sin(2 * np.pi * (300 + 200 * seed) * time * (1 + time))
    noise = np.random.default_rng(seed).normal(0, 0.1, len(time))
    return ((tones * 0.4 + noise) * 2**14).astype(np.int16)


def wav(samples: np.ndarray[Any, np.dtype[np.int16]]) -> bytes:
    """A WAV file of one channel."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes(samples.tobytes())
    return file.getvalue()
