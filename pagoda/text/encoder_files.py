# SPDX-License-Identifier: Apache-2.0
"""Files beside a model whose encoder reads texts: tokens that its decoder begins with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagoda.checkpoints.config_json import read_model_config
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.text_encoder import TextEncoderSpec
from pagoda.errors import ConfigError
from pagoda.files import read_object


def read_decoder_prompt(directory: Path, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Tokens in front of answers of the model in a directory, whose generation_config.json is given: that which
    its decoder starts with, and the one that is said first, if there is one.

    None of a model without an encoder of texts, or whose config.json cannot be read, of which the worker says why.
    Raises ConfigError: files do not name the first token, or name one that is none."""
    try:
        spec = read_model_config(directory)
    except ConfigError:
        return ()
    if not isinstance(spec.cross_encoder, TextEncoderSpec):
        return ()
    path = directory / "config.json"
    told = {name: it for name, it in generation.items() if it is not None}
    fields = Fields({**read_object(path), **told}, str(path))
    names = ["decoder_start_token_id", "forced_bos_token_id"]
    if fields.values.get(names[0]) is None:
        names[0] = "bos_token_id"
    last = spec.vocab_size - 1
    found = (fields.count(name) for name in names if fields.values.get(name) is not None)
    prompt = tuple(found)
    if not prompt or max(prompt) > last:
        raise ConfigError(
            f"{path}: decoder_start_token_id and forced_bos_token_id must be from 0 to {last}, got {list(prompt)}."
        )
    return prompt
