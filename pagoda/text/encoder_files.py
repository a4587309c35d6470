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
from pagoda.messages.encoder_input import EncoderInput, text_input
from pagoda.messages.sampling_params import MAX_ALLOWED_TOKENS


@dataclass(frozen=True)
class DecoderText:
    """Tokens around answers to texts that a model's encoder reads."""

    prompt: tuple[int, ...]
    """Tokens in front of each answer: that which the decoder starts with, and the one that is to be first."""
    never: tuple[int, ...] = ()
    """Tokens that are never said (OPUS-MT's padding)."""

    def begin(self, token_ids: list[int]) -> tuple[list[int], EncoderInput]:
        """The decoder's prompt of a text of these tokens, and what its encoder is given."""
        return [*self.prompt], text_input(token_ids)

    def check_room(self, max_model_len: int) -> None:
        """Raises ConfigError: a context of so many tokens has no room for an answer."""
        count = len(self.prompt)
        if max_model_len <= count:
            raise ConfigError(
                f"--max-model-len must be at least {count + 1} for a model whose answers begin behind "
                f"{count} of its own tokens, got {max_model_len}."
            )


def read_decoder_text(directory: Path, generation: Mapping[str, Any]) -> DecoderText | None:
    """Tokens around answers of the model in a directory, whose generation_config.json is given.

    Where there is no such file, config.json counts.
    None of a model without an encoder of texts, or whose config.json cannot be read, of which the worker says why.
    Raises ConfigError: files do not name the first token, or name one that is none."""
    try:
        spec = read_model_config(directory)
    except ConfigError:
        return None
    if not isinstance(spec.cross_encoder, TextEncoderSpec):
        return None
    config = read_object(directory / "config.json")
    path = directory / "generation_config.json"
    if not path.exists():  # as in transformers, the model's own file speaks of answers only then
        path, generation = directory / "config.json", config
    names = ["decoder_start_token_id", "forced_bos_token_id"]
    if generation.get(names[0]) is None:
        names[0] = "bos_token_id"
    if generation.get(names[0]) is None:
        names[0] = "decoder_start_token_id"
        generation = {**generation, names[0]: config.get(names[0])}
    fields, last = Fields(generation, str(path)), spec.vocab_size - 1
    prompt = tuple(fields.count(name) for name in names if generation.get(name) is not None)
    if not prompt or max(prompt) > last:
        raise ConfigError(
            f"{path}: decoder_start_token_id and forced_bos_token_id must be from 0 to {last}, got {list(prompt)}."
        )
    return DecoderText(prompt, _never(generation, last))


def _never(generation: Mapping[str, Any], last: int) -> tuple[int, ...]:
    """Tokens up to `last` that are words of their own among those that answers lack, but for ends of answers."""
    told, ends = generation.get("bad_words_ids"), generation.get("eos_token_id")
    words = told if isinstance(told, list) else []
    single = {it[0] for it in words if isinstance(it, list) and len(it) == 1 and type(it[0]) is int}
    kept = ends if isinstance(ends, list) else [ends]
    return tuple(sorted(i for i in single if 0 <= i <= last and i not in kept))[:MAX_ALLOWED_TOKENS]
