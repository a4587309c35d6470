"""Findings of the fuzzer whose sentence is checked, not only that there is one."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from pagoda.checkpoints.config_json import parse_model_config
from pagoda.checkpoints.presets import PRESETS
from pagoda.checkpoints.safetensors_header import read_header
from pagoda.errors import ConfigError
from pagoda.frontend.tokenizer import byte_tokenizer, load_tokenizer


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"vocab_size": 2**63}, "vocab_size must be at most 2147483647"),
        ({"num_hidden_layers": 999_999}, "num_hidden_layers must be at most 4096"),
        ({"num_attention_heads": 2**40}, "num_attention_heads must be at most"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 1e308}},
            "max_position_embeddings and the factor",
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 2.0,
                    "original_max_position_embeddings": 2**64,
                }
            },
            "original_max_position_embeddings must be at most",
        ),
    ],
)
def test_numbers_out_of_proportion_are_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        parse_model_config({**PRESETS["qwen3-0.6b"], **changes}, source="config.json")


@pytest.mark.parametrize("offsets", [[0, 65], [0, 2**62], [-1, 4], [8, 4], ["0", "4"], [0]])
def test_a_header_that_promises_what_the_file_lacks_is_refused(
    tmp_path: Path, offsets: list[Any]
) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [16], "data_offsets": offsets}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    with pytest.raises(ConfigError, match="not a complete safetensors file"):
        read_header(path)


def test_a_header_is_read(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    tensors, start = read_header(path)
    assert tensors["a"].shape == (16,)
    assert start == 8 + len(header)


@pytest.mark.parametrize(
    ("normalizer", "reason"),
    [
        (
            {"type": "Replace", "pattern": {"String": ""}, "content": "x" * 1000},
            "more than 256 times",
        ),
        (
            {
                "type": "Sequence",
                "normalizers": [{"type": "Replace", "pattern": {"Regex": "x*"}, "content": "xx"}]
                * 20,
            },
            "more than 256 times",
        ),
    ],
)
def test_a_tokenizer_that_multiplies_texts_is_refused(
    tmp_path: Path, normalizer: dict[str, Any], reason: str
) -> None:
    spec = {**json.loads(byte_tokenizer().spec()), "normalizer": normalizer}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    with pytest.raises(ConfigError, match=reason):
        load_tokenizer(tmp_path)
