# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from pagoda.checkpoints.resolve import resolve_model
from pagoda.errors import ConfigError
from pagoda.text.model_text import load_text
from pagoda.text.text_files import (
    LEAST_TOKENS,
    MAX_WINDOWS,
    WINDOW_TOKENS,
    calibration_windows,
)

FILES = resolve_model(None)
FLAG = "--quantization-calibration"


def _windows(path: Path) -> list[list[int]]:
    return calibration_windows(path, FILES, FLAG)


def test_windows_are_spread_evenly_over_the_whole_text(tmp_path: Path) -> None:
    text = "".join(f"{number} is a number. " for number in range(9000))
    path = tmp_path / "text"
    path.write_text(text)
    windows = _windows(path)
    assert [len(window) for window in windows] == [WINDOW_TOKENS] * MAX_WINDOWS
    tokenizer = load_text(FILES, simulated=False, chat_template=None).tokenizer
    parts = [tokenizer.decode(window, skip_special_tokens=True) for window in windows]
    assert text.startswith(parts[0])
    assert text.endswith(parts[-1])
    places = [text.index(part) for part in parts]
    distances = [after - before for before, after in pairwise(places)]
    assert min(distances) > 0.7 * max(distances)


def test_a_short_text_has_as_many_windows_as_it_fills(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("What is the capital of France? Paris.\n" * 200)
    windows = _windows(path)
    assert 1 < len(windows) < MAX_WINDOWS
    assert {len(window) for window in windows} == {WINDOW_TOKENS}


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (None, "cannot read TEXT: No such file or directory."),
        (b" \n", "TEXT holds no text."),
        (b"", "TEXT holds no text."),
        (b"a\xff", "TEXT is not UTF-8 text: byte 1 is no part of a character."),
        (b"ELF\0\1", "TEXT is no text: it has a zero byte at 3."),
        (b"a", f"TEXT has 1 tokens; at least {LEAST_TOKENS} are needed, and 8192 are read."),
    ],
)
def test_a_mistake_is_one_sentence(data: bytes | None, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "text"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        _windows(path)
    assert str(caught.value) == f"{FLAG}: {sentence.replace('TEXT', str(path))}"


def test_a_directory_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*: Is a directory"):
        _windows(tmp_path)
