# SPDX-License-Identifier: Apache-2.0
"""Pagoda's server in a process of its own, for clients that live in another environment (`make test-clients`)."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

MODEL = "pagoda-tiny"
START_S = 90.0
ROOT = Path(__file__).parents[2]
PAGODA = os.environ.get("PAGODA", str(ROOT / ".venv" / "bin" / "pagoda"))
"""The program under test; `make test-clients` names the one of `.venv`."""

# Prices are nothing to wait for, where there is no network.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")


class Server(NamedTuple):
    url: str
    model: str = MODEL

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


@contextmanager
def running(
    command: Sequence[str], ready: str, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a program for as long as the context lasts, from when `ready` answers 200. `environment` has variables
    besides those of the tests."""
    variables = {**os.environ, **(environment or {})}
    program = subprocess.Popen(command, start_new_session=True, env=variables)
    try:
        _await(program, ready)
        yield program
    finally:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGTERM)
        try:
            program.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)
            program.wait()


def _await(program: subprocess.Popen[bytes], ready: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if program.poll() is not None:
            raise RuntimeError(f"{program.args!r} ended with the exit code {program.returncode}")
        try:
            get(ready)
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"{program.args!r} did not become ready")


@contextmanager
def serving(
    *flags: str, model: str = MODEL, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    quiet = ["--log-level", "warning", "--threads", "1"]
    command = [PAGODA, "serve", "--port", str(port), *quiet, *flags]
    with running(command, f"{url}/health/ready", environment):
        yield Server(url, model)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with serving() as running_server:
        yield running_server


@pytest.fixture(scope="session")
def smollm2() -> Iterator[Server]:
    """A server of a model that understands questions in words, which the embedded one does not."""
    flags = ["--model", "smollm2", "--kv-cache-memory-bytes", "256MiB"]
    flags += ["--chat-template", str(Path(__file__).with_name("smollm2.jinja"))]
    with serving(*flags, model="smollm2") as running_server:
        yield running_server


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    """Starts servers that end with the test."""
    with ExitStack() as stack:
        yield lambda *flags: stack.enter_context(serving(*flags))


@pytest.fixture
def cluster_key(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.key"
    path.write_text(secrets.token_hex(), encoding="utf-8")
    return path


def router_command(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]
