# SPDX-License-Identifier: Apache-2.0
"""`pagoda quantize`: a directory that appears whole or not at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from small_disk import missing_for_a_small_disk, on_a_small_disk

from pagoda.checkpoints.resolve import resolve_model
from pagoda.cli.main import EXIT_INTERRUPTED, EXIT_USAGE, main

TINY = resolve_model(None).model


def _command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "pagoda", "quantize", *map(str, arguments)]


def test_the_result_is_served_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["quantize", TINY, str(out), "--format", "w8a16", "--threads", "1"]) == 0
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "format compressed-tensors, w8a16 in groups of 32" in said
    assert f"serve it pagoda serve {out}" in said
    assert os.listdir(tmp_path) == ["out"]
    modes = {path.stat().st_mode & 0o777 for path in out.iterdir()}
    assert len(modes) == 1
    text, record = tmp_path / "text", tmp_path / "record"
    text.write_text("What is the capital of France?\n" * 4)
    command = ["bench", "quality", str(out), "--reference", TINY, "--text", str(text)]
    assert main([*command, "--context-len", "64", "--json", str(record)]) == 0
    assert json.loads(record.read_text())["all"]["kl_mean"] < 0.01


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    with subprocess.Popen(
        _command(TINY, tmp_path / "out", "--format", "w8a8"),
        stdout=subprocess.DEVNULL,
        # Of a shell's background job, whose children would ignore the signal, tests may be a part.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    ) as process:
        while not psutil.Process(process.pid).children():  # the job, which imports torch first
            assert process.poll() is None
        assert [path.suffix for path in tmp_path.iterdir()] == [".partial"]
        process.send_signal(number)
        assert process.wait(60) == EXIT_INTERRUPTED
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_sentence_and_leaves_nothing_behind(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    missing = missing_for_a_small_disk(disk)
    if missing is not None:
        pytest.skip(missing)
    script = f"{' '.join(_command(TINY, disk / 'out', '--format', 'w8a8'))}; echo $?; ls -A {disk}"
    done = on_a_small_disk("64k", disk, ["sh", "-c", script])
    assert done.stdout.split() == [str(EXIT_USAGE)]
    assert done.stderr == "pagoda: the disk is full: free some space, or write to another one.\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("TINY OUT", "requires an argument"),
        ("TINY OUT --format q9", "--format"),
        ("TINY . --format w8a8", "OUT '.' exists already; name a directory that does not."),
        ("TINY nowhere/out --format w8a8", "OUT 'nowhere/out' cannot be made: No such file"),
        ("nowhere OUT --format w8a8", "there is no model directory 'nowhere'"),
        ("qwen3-0.6b OUT --format w8a8", "is a shape preset without weights"),
        ("TINY OUT --format w8a8 --group-size 64", "--group-size needs --format w8a16 or w4a16"),
        ("TINY OUT --format w4a16 --group-size 7", "--group-size"),
        ("TINY OUT --format w4a16 --max-shard-size big", "--max-shard-size takes an amount of"),
        (
            "TINY OUT --format w4a16 --quantization-calibration nowhere",
            "--quantization-calibration: cannot read nowhere: No such file or directory.",
        ),
    ],
)
def test_a_mistake_is_one_sentence_and_writes_nothing(
    arguments: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = arguments.replace("TINY", TINY).replace("OUT", str(tmp_path / "out")).split()
    assert main(["quantize", *words]) == EXIT_USAGE
    [line] = capsys.readouterr().err.splitlines()
    assert sentence in line
    assert list(tmp_path.iterdir()) == []


def test_a_text_rounds_weights_and_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "text", tmp_path / "out"
    text.write_text("".join(f"What is {number} plus 1? " for number in range(200)))
    flags = ["--format", "w4a16", "--quantization-calibration", str(text), "--threads", "1"]
    assert main(["quantize", TINY, str(out), *flags]) == 0
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    [row] = [line for line in said if line.startswith("rounded by ")]
    assert row.endswith(" tokens of a calibration text")


def test_a_quantized_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    once = tmp_path / "once"
    assert main(["quantize", TINY, str(once), "--format", "w8a8"]) == 0
    assert main(["quantize", str(once), str(tmp_path / "twice"), "--format", "w8a8"]) == EXIT_USAGE
    [line] = capsys.readouterr().err.splitlines()
    assert "is quantized already" in line
    assert [path.name for path in tmp_path.iterdir()] == ["once"]
