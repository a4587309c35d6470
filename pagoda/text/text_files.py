# SPDX-License-Identifier: Apache-2.0
"""Files of text that a model reads: to be measured on, or to be rounded by."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pagoda.checkpoints.resolve import ModelFiles
from pagoda.errors import ConfigError
from pagoda.files import read_file
from pagoda.text.model_text import load_text
from pagoda.text.tokenizers.tokenizer import Tokenizer

WINDOW_TOKENS = 512
"""Tokens of a window of a calibration text."""
MAX_WINDOWS = 16
"""Windows of a calibration text that are read, spread evenly over it."""
LEAST_TOKENS = 512
"""Tokens that a calibration text needs at least."""


class Tokenized(NamedTuple):
    prefix: list[int]
    """Token ids that the tokenizer puts in front of a text."""
    ids: list[int]


def read_text(path: Path, flag: str) -> str:
    """Raises ConfigError: the file cannot be read, or holds no UTF-8 text."""
    try:
        text = read_file(path, flag).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{flag}: {path} is not UTF-8 text: byte {error.start} is no part of a character."
        ) from None
    if "\0" in text:
        raise ConfigError(f"{flag}: {path} is no text: it has a zero byte at {text.index(chr(0))}.")
    if not text.strip():
        raise ConfigError(f"{flag}: {path} holds no text.")
    return text


def tokenize(tokenizer: Tokenizer, text: str) -> Tokenized:
    ids = tokenizer.encode(text, add_special_tokens=False)
    around = tokenizer.encode(text, add_special_tokens=True)
    return Tokenized(
        around[: max(0, len(around) - len(ids))] if around[-len(ids) :] == ids else [], ids
    )


def calibration_windows(path: Path, files: ModelFiles, flag: str) -> list[list[int]]:
    """Windows of a text, as the model that is to be rounded reads them.

    Raises ConfigError: the file cannot be read, holds no UTF-8 text, or too little of it.
    """
    text = read_text(path, flag)
    tokenizer = load_text(files, simulated=False, chat_template=None).tokenizer
    prefix, ids = tokenize(tokenizer, text)
    if len(ids) < LEAST_TOKENS:
        raise ConfigError(
            f"{flag}: {path} has {len(ids)} tokens; at least {LEAST_TOKENS} are needed, and "
            f"{MAX_WINDOWS * WINDOW_TOKENS} are read."
        )
    length = WINDOW_TOKENS - len(prefix)
    count = min(MAX_WINDOWS, len(ids) // length)
    starts = [index * (len(ids) - length) // max(1, count - 1) for index in range(count)]
    return [[*prefix, *ids[start : start + length]] for start in starts]
