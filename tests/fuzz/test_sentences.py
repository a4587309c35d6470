# SPDX-License-Identifier: Apache-2.0
"""Findings of the fuzzer whose sentence is checked, not only that there is one."""

from __future__ import annotations

import base64
import json
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from pagoda.checkpoints.config_json import parse_model_config
from pagoda.checkpoints.presets import PRESETS
from pagoda.checkpoints.safetensors_header import read_header
from pagoda.errors import ConfigError, PagodaError
from pagoda.text.tokenizers.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer
from pagoda.text.tokenizers.tokenizer_checks import growth


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
            "more than 512 times",
        ),
        (
            {
                "type": "Sequence",
                "normalizers": [{"type": "Replace", "pattern": {"Regex": "x*"}, "content": "xx"}]
                * 20,
            },
            "more than 512 times",
        ),
        (
            {
                "type": "Sequence",
                "normalizers": [
                    {"type": "Replace", "pattern": {"String": "\u0644"}, "content": "\ufdfa"},
                    {"type": "NFKC"},
                ]
                * 8,
            },
            "more than 512 times",
        ),
        (
            {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "x"}] * 20},
            "more than 512 times",
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


def test_a_pre_tokenizer_that_multiplies_texts_is_refused(tmp_path: Path) -> None:
    step = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    many = {"type": "Sequence", "pretokenizers": [step] * 20}
    spec = {**json.loads(byte_tokenizer().spec()), "pre_tokenizer": many}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    with pytest.raises(ConfigError, match="pre-tokenizer makes texts more than 512 times"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_with_many_steps_that_lengthen_nothing_is_read() -> None:
    """The normalizer of ALBERT, whose forms of Unicode are counted once, and many expressions."""
    charsmap = base64.b64encode(struct.pack("<I", 4) + bytes(4) + b"abc\0" * 3).decode()
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "``"}, "content": '"'},
        {"type": "NFKD"},
        {"type": "StripAccents"},
        {"type": "Lowercase"},
        {"type": "Precompiled", "precompiled_charsmap": charsmap},
        *[{"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}] * 20,
    ]
    assert growth({"type": "Sequence", "normalizers": steps}) == 54


def test_what_was_made_of_other_files_is_checked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = {"type": "Replace", "pattern": {"String": "a"}, "content": "x" * 1000}
    spec = json.dumps({**json.loads(byte_tokenizer().spec()), "normalizer": replace})
    done = subprocess.CompletedProcess([], 0, stdout=spec)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(ConfigError, match=r"made of .* its normalizer makes texts more than"):
        load_tokenizer(tmp_path)


def test_tokens_that_the_library_cannot_decode_fail_one_request() -> None:
    with pytest.raises(PagodaError, match="fails with tokens of this text"):
        Tokenizer(Backend(BPE(vocab={"a": 0}, merges=[]))).decode([2**40])


@pytest.mark.parametrize("factor", [1e300, 1025.0])
def test_a_factor_out_of_proportion_is_named(factor: float) -> None:
    values = {
        **PRESETS["qwen3-0.6b"],
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "block_ffn_dim_multiplier": factor,
    }
    with pytest.raises(ConfigError, match="block_ffn_dim_multiplier must be at most 1024"):
        parse_model_config(values, source="config.json")


def test_files_of_which_no_tokenizer_comes_in_time_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], *, timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ConfigError, match="none was made of its files within 300 s"):
        load_tokenizer(tmp_path)
