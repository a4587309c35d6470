# SPDX-License-Identifier: Apache-2.0
"""Alignment heads of generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from speech_models import save_speech_model

from pagoda.errors import ConfigError
from pagoda.text.model_text import load_model_text


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("speech")
    save_speech_model(directory)
    return directory


def _heads(directory: Path, value: object) -> tuple[tuple[int, int], ...]:
    path = directory / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"alignment_heads": value}))
    speech = load_model_text(directory).speech
    assert speech is not None
    return speech.alignment_heads


def test_heads_are_read(directory: Path) -> None:
    assert _heads(directory, [[0, 2], [1.0, 0]]) == ((0, 2), (1, 0))
    assert _heads(directory, None) == ()


@pytest.mark.parametrize("value", [[[2, 0]], [[0, 3]], [[-1, 0]], [[0]], [[0, 0.5]], "all", 7])
def test_what_are_no_heads_of_the_decoder_is_refused(directory: Path, value: object) -> None:
    with pytest.raises(ConfigError, match="must be pairs of a layer below 2 and a head below 3"):
        _heads(directory, value)
