# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagoda.cli.main import EXIT_USAGE, main


def test_a_table_and_json_of_every_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, record = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "out.json"
    first.write_text("What is the capital of France? Paris.\n" * 3)
    second.write_text("1 + 1 = 2")
    command = f"bench quality --quantization int8 --text {first} --text {second} --json {record}"
    assert main([*command.split(), "--context-len", "32", "--threads", "1"]) == 0
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith("model pagoda-tiny: ") and "int8 weights" in line for line in said)
    assert any(line.startswith("reference pagoda-tiny: ") and "float32" in line for line in said)
    figures = json.loads(record.read_text())
    texts, overall = figures["texts"], figures["all"]
    assert [text["text"] for text in texts] == [str(first), str(second)]
    assert sum(text["positions"] for text in texts) == overall["positions"]
    assert 0 < overall["kl_top20"] < overall["kl_mean"] < overall["kl_max"]
    [row] = [line for line in said if line.startswith(f"{first} ")]
    assert f"{texts[0]['perplexity']:.3f}" in row
    assert f"{texts[0]['same_top_token']:.2%}" in row
    assert any(line.startswith("all ") for line in said)


@pytest.mark.parametrize(
    ("data", "flags", "sentence"),
    [
        (None, "", "--text: cannot read TEXT: No such file or directory."),
        (b" \n", "", "--text: TEXT holds no text."),
        (b"a\xff", "", "--text: TEXT is not UTF-8 text: byte 1 is no part of a character."),
        (b"hello there", "--context-len 9999", "--context-len must be at most 2048, the context"),
        (b"hello there", "--reference nowhere", "there is no model directory 'nowhere'"),
        (b"hello there", "--quantization-group-size 64", "-group-size needs --quantization int4."),
    ],
)
def test_a_mistake_is_one_sentence(
    data: bytes | None,
    flags: str,
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = tmp_path / "text"
    if data is not None:
        text.write_bytes(data)
    assert main(["bench", "quality", "--text", str(text), *flags.split()]) == EXIT_USAGE
    [line] = capsys.readouterr().err.splitlines()
    assert sentence.replace("TEXT", str(text)) in line


def test_models_of_other_tokens_do_not_compare(
    dummy_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.write_text("A sentence.")
    command = ["bench", "quality", "--text", str(text), "--reference", str(dummy_model)]
    assert main([*command, "--context-len", "32"]) == EXIT_USAGE
    [line] = capsys.readouterr().err.splitlines()
    assert "make different tokens of" in line
