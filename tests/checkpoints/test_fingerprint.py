# SPDX-License-Identifier: Apache-2.0
"""Fingerprints tell models apart that differ in their answers, and no others."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest

from pagoda.checkpoints.fingerprint import model_digest, weights_digest
from pagoda.checkpoints.resolve import ModelFiles, resolve_model
from pagoda.errors import ConfigError


def save(directory: Path, weights: bytes = b"\x01" * 8, vocabulary: str = "{}") -> ModelFiles:
    directory.mkdir()
    (directory / "config.json").write_text('{"hidden_size": 2}')
    (directory / "tokenizer.json").write_text(vocabulary)
    entry = {"dtype": "F32", "shape": [len(weights) // 4], "data_offsets": [0, len(weights)]}
    header = json.dumps({"w": entry}).encode()
    content = struct.pack("<Q", len(header)) + header + weights
    (directory / "model.safetensors").write_bytes(content)
    return resolve_model(str(directory))


def test_a_copy_is_the_same_model(tmp_path: Path) -> None:
    one = save(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert model_digest(resolve_model(str(tmp_path / "two"))) == model_digest(one)


def test_other_weights_are_another_model(tmp_path: Path) -> None:
    one, two = save(tmp_path / "one"), save(tmp_path / "two", b"\x01" * 7 + b"\x02")
    assert model_digest(one) != model_digest(two)
    assert weights_digest(one.model, "auto", 0) != weights_digest(two.model, "auto", 0)


@pytest.mark.parametrize("expert", range(8))
def test_one_expert_of_many_counts(tmp_path: Path, expert: int) -> None:
    """All are in one tensor, and each is no larger than half a megabyte."""
    weights = bytearray(8 * 2**19)
    one = save(tmp_path / "one", bytes(weights))
    weights[expert * 2**19 : (expert + 1) * 2**19] = b"\x01" * 2**19
    two = save(tmp_path / "two", bytes(weights))
    assert model_digest(one) != model_digest(two)
    assert weights_digest(one.model, "auto", 0) != weights_digest(two.model, "auto", 0)


@pytest.mark.parametrize("size", [2**20, 2**20 + 4, 2**12 + 4])
def test_the_first_and_the_last_row_count(tmp_path: Path, size: int) -> None:
    digests = set()
    for name, changed in (("none", None), ("first", 0), ("last", size - 1)):
        weights = bytearray(size)
        if changed is not None:
            weights[changed] = 1
        digests.add(model_digest(save(tmp_path / name, bytes(weights))))
    assert len(digests) == 3


def test_another_tokenizer_is_another_model_of_the_same_kv(tmp_path: Path) -> None:
    one, two = save(tmp_path / "one"), save(tmp_path / "two", vocabulary='{"a": 1}')
    assert model_digest(one) != model_digest(two)
    assert weights_digest(one.model, "auto", 0) == weights_digest(two.model, "auto", 0)


def test_a_directory_without_weights_has_a_text(tmp_path: Path) -> None:
    one = save(tmp_path / "one")
    (tmp_path / "one" / "model.safetensors").unlink()
    assert model_digest(one)
    assert weights_digest(one.model, "dummy", 0) != weights_digest(one.model, "dummy", 1)
    with pytest.raises(ConfigError, match="no weights"):
        weights_digest(one.model, "auto", 0)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x08" + bytes(7) + b"not json"])
def test_damaged_weights_are_named(tmp_path: Path, content: bytes) -> None:
    one = save(tmp_path / "one")
    path = tmp_path / "one" / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="not a complete safetensors file"):
        model_digest(one)
