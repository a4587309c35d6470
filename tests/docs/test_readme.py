# SPDX-License-Identifier: Apache-2.0
"""Every command and program in README.md is run, against real servers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from pagoda.checkpoints.resolve import resolve_model
from pagoda.cli.openai_client import OpenAIClient
from pagoda.cli.server_process import READY_PREFIX, ServerProcess, server_process

ROOT = Path(__file__).parents[2]
README_URL = "http://127.0.0.1:8000"
LOCAL_MODEL = "~/models/Qwen3-0.6B"
HUB_MODEL = "Qwen/Qwen3-0.6B"


@dataclass(frozen=True)
class Block:
    """A fenced code block."""

    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.language}: {self.text.splitlines()[0][:40]}"


def _blocks() -> list[Block]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return [Block(*found) for found in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.M | re.S)]


def _console_commands() -> list[str]:
    return [
        line[2:].partition("#")[0].strip()
        for block in _blocks()
        if block.language == "console"
        for line in block.text.splitlines()
        if line.startswith("$ ")
    ]


def _of(language: str) -> list[Block]:
    return [block for block in _blocks() if block.language == language]


@pytest.fixture(scope="module")
def server(shared_server: Callable[..., ServerProcess]) -> ServerProcess:
    return shared_server("--log-level", "warning")


@pytest.fixture(scope="module")
def hub_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local hub cache that holds the embedded model under the hub id of the README."""
    home = tmp_path_factory.mktemp("hub")
    model = home / "hub" / f"models--{HUB_MODEL.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("0" * 40)
    (model / "snapshots").mkdir()
    (model / "snapshots" / ("0" * 40)).symlink_to(resolve_model(None).model)
    return home


def test_the_readme_has_no_block_that_nobody_runs() -> None:
    assert {block.language for block in _blocks()} == {"bash", "console", "python"}
    assert {command.split()[0] for command in _console_commands()} == {"make", "pagoda"}
    for block in _of("console"):
        assert all(line.startswith("$ ") for line in block.text.splitlines())


@pytest.mark.parametrize("block", _of("python"), ids=str)
def test_python(block: Block, server: ServerProcess) -> None:
    done = _run([sys.executable, "-c", block.text.replace(README_URL, server.base_url)])
    assert "17 + 25 = 42" in done.stdout


@pytest.mark.parametrize("block", _of("bash"), ids=str)
def test_shell(block: Block, server: ServerProcess) -> None:
    done = _run(["bash", "-euo", "pipefail", "-c", block.text.replace(README_URL, server.base_url)])
    assert done.stdout.strip()
    assert '"error"' not in done.stdout


def test_the_readme_shows_the_make_targets_that_are_run_below() -> None:
    shown = [command for command in _console_commands() if command.startswith("make")]
    assert shown == ["make demo", "make serve", "make demo MODEL=smollm2"]


def test_set_up_installs_torch_first_and_alone() -> None:
    steps = _run(["make", "--dry-run", "--always-make", "setup"]).stdout.splitlines()
    installs = [step for step in steps if " install " in step]
    assert [step.split(" install ")[1].split("==")[0] for step in installs] == [
        "torch",
        "--editable .",
    ]


@pytest.mark.parametrize("model", [[], ["MODEL=smollm2"]], ids=str)
def test_make_demo(model: list[str]) -> None:
    done = _run([*_make(), "demo", *model])
    assert "The server has stopped." in done.stdout
    assert "time to first token" in done.stdout


def test_make_serve() -> None:
    """Serves until Ctrl-C, which a terminal sends to make and the server alike."""
    with subprocess.Popen(
        [*_make(), "serve"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**_environment(), "PAGODA_PORT": "0"},
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            line = next(line for line in process.stdout if line.startswith(READY_PREFIX))
            url = line.removeprefix(READY_PREFIX).split()[0]
            members = psutil.Process(process.pid).children(recursive=True)
            assert asyncio.run(_first_token(url)) == 1
            os.killpg(process.pid, signal.SIGINT)
            process.communicate(timeout=60)
            # Those whose parent has ended first are gone once init has waited for them.
            assert not psutil.wait_procs(members, timeout=60)[1]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _make() -> list[str]:
    """Make with this interpreter's environment as the one that is set up already."""
    stamps = [f"--old-file={sys.prefix}/.installed{model}" for model in ("", "-smollm2")]
    return ["make", "--no-print-directory", *stamps, f"VENV={sys.prefix}"]


def test_chat() -> None:
    (line,) = (command for command in _console_commands() if command.startswith("pagoda chat"))
    command = [sys.executable, "-m", *shlex.split(line), "--temperature", "0"]
    assert "Tokyo" in _run(command, stdin="What is the capital of Japan?\n").stdout


@pytest.mark.parametrize(
    "line", [command for command in _console_commands() if command.startswith("pagoda serve")]
)
def test_serve(line: str, hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(hub_cache))
    words = [
        resolve_model(None).model if word == LOCAL_MODEL else word for word in shlex.split(line)[2:]
    ]
    with server_process([*words, "--log-level", "warning"]) as running:
        assert asyncio.run(_first_token(running.base_url)) == 1


async def _first_token(base_url: str) -> int:
    async with OpenAIClient(base_url) as client:
        body = {"model": await client.first_model(), "prompt": "1", "max_tokens": 1}
        answer = await client.post("/v1/completions", body)
    assert answer.usage is not None
    return answer.usage.completion_tokens


def _run(command: list[str], stdin: str = "") -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        input=stdin,
        timeout=110,
        env=_environment(),
    )
    assert done.returncode == 0, done.stderr
    return done


def _environment() -> dict[str, str]:
    """This interpreter's programs first, and no flags of a make that runs these tests."""
    outer_make = {"MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL"}
    environment = {name: value for name, value in os.environ.items() if name not in outer_make}
    programs = Path(sys.executable).parent
    return {**environment, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
