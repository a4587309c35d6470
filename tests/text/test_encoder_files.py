# SPDX-License-Identifier: Apache-2.0
"""Tokens around answers are those that transformers begins with and leaves out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagoda.errors import ConfigError
from pagoda.text.encoder_files import DecoderText, read_decoder_text

CONFIG = {
    "architectures": ["BartForConditionalGeneration"],
    "vocab_size": 100,
    "decoder_start_token_id": 2,
    "forced_bos_token_id": 5,
    "bos_token_id": 3,
    "bad_words_ids": [[7]],
}


def _read(directory: Path, generation: dict[str, Any] | None) -> DecoderText | None:
    (directory / "config.json").write_text(json.dumps(CONFIG))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return read_decoder_text(directory, generation or {})


@pytest.mark.parametrize(
    ("generation", "prompt", "never"),
    [
        (None, (2, 5), (7,)),
        ({"decoder_start_token_id": 4}, (4,), ()),
        ({"decoder_start_token_id": 4, "forced_bos_token_id": None}, (4,), ()),
        ({"decoder_start_token_id": None, "bos_token_id": 6, "forced_bos_token_id": 9}, (6, 9), ()),
        ({}, (2,), ()),
        (
            {"bos_token_id": 6, "eos_token_id": [8], "bad_words_ids": [[9], [8], [1, 2], [100], 4]},
            (6,),
            (9,),
        ),
    ],
)
def test_config_counts_where_nothing_else_tells_of_answers(
    generation: dict[str, Any] | None,
    prompt: tuple[int, ...],
    never: tuple[int, ...],
    tmp_path: Path,
) -> None:
    assert _read(tmp_path, generation) == DecoderText(prompt, never)


def test_tokens_that_are_none_and_contexts_without_room_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be from 0 to 99, got \\[100\\]"):
        _read(tmp_path, {"decoder_start_token_id": 100})
    text = DecoderText((2, 5))
    text.check_room(3)
    with pytest.raises(ConfigError, match=r"--max-model-len must be at least 3 .* got 2"):
        text.check_room(2)
