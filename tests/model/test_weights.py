# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pagoda.errors import ConfigError
from pagoda.model.weights import DummyWeights, open_checkpoint


def _read(directory: Path, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.empty(shape, dtype=dtype)
    with open_checkpoint(directory) as source:
        source.read_into(name, out)
    return out


def _refusal(directory: Path, name: str = "a", *shape: int) -> str:
    with pytest.raises(ConfigError) as caught:
        _read(directory, name, *shape)
    return str(caught.value)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_are_converted(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    weight = torch.randn(3, 5).to(stored)
    save_file({"a": weight}, tmp_path / "model.safetensors")
    assert torch.equal(_read(tmp_path, "a", 3, 5, dtype=wanted), weight.to(wanted))


def _write_shards(directory: Path) -> None:
    save_file({"a": torch.ones(2)}, directory / "one.safetensors")
    save_file({"b": torch.zeros(3)}, directory / "two.safetensors")
    _write_index(directory, {"a": "one.safetensors", "b": "two.safetensors"})


def _write_index(directory: Path, weight_map: object) -> None:
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


def test_shards(tmp_path: Path) -> None:
    _write_shards(tmp_path)
    assert _read(tmp_path, "a", 2).tolist() == [1, 1]
    assert _read(tmp_path, "b", 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("stored", "name", "shape", "sentence"),
    [
        (
            None,
            "a",
            (2,),
            "{} has no weights that Pagoda reads: neither model.safetensors nor "
            "model.safetensors.index.json.",
        ),
        (
            torch.ones(2, 3),
            "b",
            (2,),
            "{}: no file holds the tensor b, which config.json calls for.",
        ),
        (
            torch.ones(2, 3),
            "a",
            (3, 2),
            "{}/model.safetensors: tensor a has shape [2, 3], config.json calls for [3, 2].",
        ),
        (
            torch.ones(2, dtype=torch.int8),
            "a",
            (2,),
            "{}/model.safetensors: tensor a is stored as I8; Pagoda reads float32, bfloat16, float16.",
        ),
    ],
)
def test_what_a_file_lacks_is_one_sentence(
    stored: Tensor | None, name: str, shape: tuple[int, ...], sentence: str, tmp_path: Path
) -> None:
    if stored is not None:
        save_file({"a": stored}, tmp_path / "model.safetensors")
    assert _refusal(tmp_path, name, *shape) == sentence.format(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_truncated_files(kept: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(200)}, path)
    path.write_bytes(path.read_bytes()[:kept])
    refusal = _refusal(tmp_path, "a", 200)
    assert refusal.startswith(f"{path} is not a complete safetensors file")
    assert refusal.endswith("fetch it again.")


def test_truncated_shard(tmp_path: Path) -> None:
    _write_shards(tmp_path)
    path = tmp_path / "two.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    assert _read(tmp_path, "a", 2).tolist() == [1, 1]
    assert _refusal(tmp_path, "b", 3).startswith(f"{path} is not a complete safetensors file")


def test_bad_indexes(tmp_path: Path) -> None:
    _write_shards(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    _write_index(tmp_path, {"a": "three.safetensors"})
    assert _refusal(tmp_path) == f"{index} names 'three.safetensors', which is missing."
    _write_index(tmp_path, {"a": "../one.safetensors"})
    assert "must name files beside it, got '../one.safetensors'" in _refusal(tmp_path)
    _write_index(tmp_path, {"c": "one.safetensors"})
    assert _refusal(tmp_path, "c") == (
        f"{tmp_path / 'one.safetensors'} lacks the tensor c, which config.json calls for."
    )
    _write_index(tmp_path, [])
    assert _refusal(tmp_path) == f"{index} has no weight_map from tensor names to files."
    index.write_text("{")
    assert _refusal(tmp_path) == f"{index} is not valid JSON."


def test_dummy_weights_are_seeded_and_scaled() -> None:
    def make(seed: int, name: str, *shape: int) -> Tensor:
        out = torch.empty(shape)
        DummyWeights(seed).read_into(name, out)
        return out

    weight = make(0, "a.weight", 1500, 1024)
    assert float(weight.std()) == pytest.approx(1 / 32, rel=0.01)
    assert torch.equal(weight, make(0, "a.weight", 1500, 1024))
    assert not torch.equal(weight, make(1, "a.weight", 1500, 1024))
    assert not torch.equal(weight, make(0, "b.weight", 1500, 1024))
    assert make(0, "norm.weight", 4).tolist() == [1, 1, 1, 1]
    assert make(0, "q.bias", 4).tolist() == [0, 0, 0, 0]
