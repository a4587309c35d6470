# SPDX-License-Identifier: Apache-2.0
"""Agents that write programs, as they are installed: a turn with a tool call and its result, on default flags.

Their prompts have 10,000 to 70,000 tokens of the embedded model's vocabulary, so a small model of random weights
with a long context is served, and says what is written in coding_agents.json; all else is the server's own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from conftest import ROOT, Server, serving

_HERE = Path(__file__).parent
_BIN = _HERE / "node" / "node_modules" / ".bin"
_TINY = ROOT / "pagoda" / "checkpoints" / "pagoda_tiny"
_SIZES = {
    "max_position_embeddings": 131072,
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
_LIMIT_S = 600
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the model that says what is written."""
    directory = tmp_path_factory.mktemp("model")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(_TINY / name, directory)
    config = json.loads((_TINY / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps({**config, **_SIZES}), encoding="utf-8")
    written = {
        "PYTHONPATH": str(ROOT / "tests" / "peers" / "script"),
        "PAGODA_PEERS_TOKENIZER": str(directory / "tokenizer.json"),
        "PAGODA_PEERS_ANSWERS": str(_HERE / "coding_agents.json"),
    }
    flags = [str(directory), "--load-format", "dummy", "--served-model-name", "coder"]
    with serving(*flags, model="coder", environment=written) as server:
        yield server


class Desk:
    """A directory with a file that an agent is asked about, and a home of its own."""

    def __init__(self, path: Path) -> None:
        self.home = path / "home"
        self.work = path / "work"
        self.home.mkdir()
        self.work.mkdir()
        (self.work / "answer.txt").write_text("The answer is 42.\n", encoding="utf-8")

    def run(self, command: Sequence[str | Path], environment: Mapping[str, str]) -> str:
        """What an agent prints."""
        if shutil.which(command[0]) is None:
            pytest.skip(f"{command[0]} is not installed")
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        done = subprocess.run(
            [str(word) for word in command],
            cwd=self.work,
            env={**kept, "HOME": str(self.home), **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def question(agent: str) -> str:
    return f"What does answer.txt say? ({agent})"


def test_codex(coder: Server, desk: Desk) -> None:
    settings = {
        "model": "coder",
        "model_provider": "pagoda",
        "sandbox_mode": "danger-full-access",
        "model_providers.pagoda.name": "pagoda",
        "model_providers.pagoda.base_url": coder.v1,
        "model_providers.pagoda.wire_api": "responses",
    }
    flags = [word for name, value in settings.items() for word in ("-c", f'{name}="{value}"')]
    command = [_BIN / "codex", "exec", "--skip-git-repo-check", *flags, question("codex")]
    assert "It says 42." in desk.run(command, {})


def test_claude_code(coder: Server, desk: Desk) -> None:
    command = [
        _BIN / "claude",
        "-p",
        question("claude"),
        "--model",
        "coder",
        "--allowedTools",
        "Bash",
    ]
    environment = {"ANTHROPIC_BASE_URL": coder.url, "ANTHROPIC_API_KEY": "none"}
    assert "It says 42." in desk.run(command, environment)


def test_opencode(coder: Server, desk: Desk) -> None:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": coder.v1, "apiKey": "none"},
        "models": {"coder": {"limit": {"context": 131072, "output": 4096}}},
    }
    config = {"provider": {"pagoda": provider}, "model": "pagoda/coder"}
    (desk.work / "opencode.json").write_text(json.dumps(config), encoding="utf-8")
    command = [_BIN / "opencode", "run", question("opencode")]
    assert "It says 42." in desk.run(command, {})


def test_qwen_code(coder: Server, desk: Desk) -> None:
    command = [_BIN / "qwen", "--auth-type", "openai", "--yolo", "-p", question("qwen")]
    environment = {
        "OPENAI_BASE_URL": coder.v1,
        "OPENAI_API_KEY": "none",
        "OPENAI_MODEL": "coder",
    }
    assert "It says 42." in desk.run(command, environment)


def test_continue(coder: Server, desk: Desk) -> None:
    model = {
        "name": "Coder",
        "provider": "openai",
        "model": "coder",
        "apiBase": coder.v1,
        "apiKey": "none",
        "roles": ["chat"],
        "capabilities": ["tool_use"],
    }
    config = {"name": "Pagoda", "version": "0.0.1", "schema": "v1", "models": [model]}
    file = desk.home / "config.yaml"
    file.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    command = [_BIN / "cn", "-p", "--auto", "--config", file, question("continue")]
    assert "It says 42." in desk.run(command, {"CONTINUE_TELEMETRY_ENABLED": "0"})


def test_aider(coder: Server, desk: Desk) -> None:
    """aider calls no tools: its model writes files anew between fences."""
    (desk.work / "sum.txt").write_text("41\n", encoding="utf-8")
    aider = ROOT / ".venv-clients-aider" / "bin" / "aider"
    quiet = "--no-git --yes-always --no-check-update --analytics-disable --no-show-model-warnings"
    model = ["--model", "openai/coder", "--openai-api-base", coder.v1]
    command = [aider, *model, *quiet.split(), "--message", "Make it 43 (aider)", "sum.txt"]
    desk.run(command, {"OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True"})
    assert (desk.work / "sum.txt").read_text(encoding="utf-8") == "43\n"
