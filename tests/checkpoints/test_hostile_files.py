# SPDX-License-Identifier: Apache-2.0
"""Directories of models in which a file is none: a pipe, a device, a directory, or one without an end."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pagoda import checkpoints, files
from pagoda.checkpoints.adapters import adapter_digest, read_adapter
from pagoda.checkpoints.checkpoint import read_index
from pagoda.checkpoints.config_json import read_model_config
from pagoda.checkpoints.fingerprint import model_digest, weights_digest
from pagoda.checkpoints.gguf.reader import is_gguf, read_gguf
from pagoda.checkpoints.resolve import ModelFiles
from pagoda.checkpoints.safetensors_header import read_header
from pagoda.checkpoints.sentence_modules import read_modules
from pagoda.errors import ConfigError
from pagoda.text.model_text import load_text
from pagoda.text.pooling_files import read_pooling

TINY = Path(checkpoints.__file__).parent / "pagoda_tiny"


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def long(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(files.MAX_TEXT_BYTES + 1)


def reads_of(directory: Path) -> list[Callable[[], object]]:
    """All that reads a directory of a model, before its weights are loaded."""
    model = ModelFiles(str(directory), directory, "m")
    config = read_model_config(TINY)
    return [
        lambda: model_digest(model),
        lambda: weights_digest(str(directory), "auto", 0),
        lambda: read_model_config(directory),
        lambda: load_text(model, simulated=False, chat_template=None),
        lambda: read_modules(directory),
        lambda: read_pooling(directory),
        lambda: read_header(directory / "model.safetensors"),
        lambda: read_index(directory / "model.safetensors.index.json"),
        lambda: read_adapter(directory, config, max_rank=64),
        lambda: adapter_digest(directory),
        lambda: read_gguf(directory / "m.gguf"),
        lambda: is_gguf(directory / "notes.txt"),
    ]


@pytest.mark.parametrize("make", [os.mkfifo, zeros, Path.mkdir, long])
def test_a_file_that_is_none_ends_in_a_sentence_and_hangs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None]
) -> None:
    monkeypatch.setattr(files, "MAX_TEXT_BYTES", 2**20)
    monkeypatch.setattr(files.read_regular, "__defaults__", (2**20,))
    needed = {"config.json": 2, "tokenizer.json": 3, "model.safetensors": 6}
    needed["chat_template.jinja"] = 3
    """The read that cannot do without the file."""
    names = [path.name for path in TINY.iterdir()]
    names += [
        "chat_template.jinja",
        "notes.txt",
        "modules.json",
        "chat_template.json",
        "1_Pooling",
        "m.gguf",
    ]
    names += ["adapter_config.json", "adapter_model.safetensors", "model.safetensors.index.json"]
    for name in names:
        directory = tmp_path / name
        shutil.copytree(TINY, directory)
        (directory / name).unlink(missing_ok=True)
        make(directory / name)
        refused: dict[int, str] = {}
        for number, read in enumerate(reads_of(directory)):
            try:
                read()
            except ConfigError as error:
                refused[number] = str(error)
        assert needed.get(name, 10) in refused, name
        assert all(text.endswith(".") and "\n" not in text for text in refused.values())
        shutil.rmtree(directory)


def test_a_decoder_that_makes_long_texts_of_tokens_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(TINY, directory)
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_bytes())
    replace = {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 300}
    growing = {"type": "Sequence", "decoders": [tokenizer["decoder"], replace, dict(replace)]}
    growing["decoders"][-1]["pattern"] = {"String": "b"}
    path.write_text(json.dumps(tokenizer | {"decoder": growing}))
    model = ModelFiles(str(directory), directory, "m")
    with pytest.raises(ConfigError, match="its decoder makes more than 65536 characters of a tok"):
        load_text(model, simulated=False, chat_template=None)
