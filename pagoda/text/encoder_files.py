# SPDX-License-Identifier: Apache-2.0
"""Files beside a model whose encoder reads texts: tokens that its answers begin with, and those that they lack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagoda.checkpoints.config_json import read_model_config
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.text_encoder import TextEncoderSpec
from pagoda.errors import ConfigError
from pagoda.files import read_object
from pagoda.messages.audio import SpeechRules
from pagoda.messages.encoder_input import EncoderInput, text_input
from pagoda.messages.sampling_params import MAX_TOKEN_LIST


@dataclass(frozen=True)
class DecoderText:
    """Tokens around answers to texts that a model's encoder reads."""

    prompt: tuple[int, ...]
    """Tokens in front of each answer: that which the decoder starts with, and the one that is to be first."""
    rules: SpeechRules | None = None
    """Tokens that are never said (OPUS-MT's padding)."""

    def begin(self, token_ids: list[int]) -> tuple[list[int], EncoderInput]:
        """The decoder's prompt of a text of these tokens, and what its encoder is given."""
        return [*self.prompt], text_input(token_ids)


def read_decoder_text(directory: Path, generation: Mapping[str, Any]) -> DecoderText | None:
    """Tokens around answers of the model in a directory, whose generation_config.json is given.

    None of a model without an encoder of texts, or whose config.json cannot be read, of which the worker says why.
    Raises ConfigError: files do not name the first token, or name one that is none."""
    try:
        spec = read_model_config(directory)
    except ConfigError:
        return None
    if not isinstance(spec.cross_encoder, TextEncoderSpec):
        return None
    path = directory / "config.json"
    told = {name: it for name, it in generation.items() if it is not None}
    fields = Fields({**read_object(path), **told}, str(path))
    names = ["decoder_start_token_id", "forced_bos_token_id"]
    if fields.values.get(names[0]) is None:
        names[0] = "bos_token_id"
    last = spec.vocab_size - 1
    named = (fields.count(name) for name in names if fields.values.get(name) is not None)
    prompt = tuple(named)
    if not prompt or max(prompt) > last:
        raise ConfigError(
            f"{path}: decoder_start_token_id and forced_bos_token_id must be from 0 to {last}, got {list(prompt)}."
        )
    told_bad = fields.values.get("bad_words_ids")
    never = told_bad if isinstance(told_bad, list) else []
    single = [it[0] for it in never if isinstance(it, list) and len(it) == 1]
    suppressed = tuple(i for i in single if type(i) is int and 0 <= i <= last)[:MAX_TOKEN_LIST]
    return DecoderText(prompt, SpeechRules(suppressed) if suppressed else None)
