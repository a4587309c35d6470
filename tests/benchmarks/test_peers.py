# SPDX-License-Identifier: Apache-2.0
"""The programs beside which Pagoda is measured: those that are there, and those that are not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from ports import free_ports

from benchmarks.cpu.peers import median_figures, ratios
from benchmarks.cpu.processes import NotThereError, ServerCommand, resident_bytes, running
from benchmarks.cpu.random_model import WEIGHTS_FILE

NOWHERE = "http://127.0.0.1:1"
SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
server.serve_forever()
"""


def test_a_server_is_timed_weighed_and_stopped(tmp_path: Path) -> None:
    [port] = free_ports(1)
    server = ServerCommand(
        command=[sys.executable, "-c", SERVER, str(port)], base_url=f"http://127.0.0.1:{port}"
    )
    with running(server, tmp_path / "log") as process:
        assert process.ready_s > 0
        assert 2**20 < sum(resident_bytes(process.pid)) < 2**28
        with pytest.raises(NotThereError, match="another server answers"):
            running(server, tmp_path / "log2").__enter__()
    assert not psutil.pid_exists(process.pid)
    with pytest.raises(NotThereError, match="it ended"):
        resident_bytes(process.pid)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["/no/such/program"], "cannot be run: No such file"),
        ([sys.executable, "-c", "import sys; sys.exit('no room')"], "ended with code 1: no room"),
    ],
)
def test_what_does_not_start_says_why(command: list[str], reason: str, tmp_path: Path) -> None:
    server = ServerCommand(command=command, base_url=NOWHERE)
    with pytest.raises(NotThereError, match=reason):
        running(server, tmp_path / "log").__enter__()


def test_systems_that_are_not_there_are_skipped(tmp_path: Path) -> None:
    (tmp_path / WEIGHTS_FILE).write_bytes(b"")
    arguments = ["--pagoda=--no-such-flag", "--llama-python", "/no/such/python", "--rounds", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cpu.peers", str(tmp_path), *arguments],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=True,
    )
    skipped = [line for line in done.stderr.splitlines() if " is skipped: " in line]
    assert len(skipped) == 5  # Pagoda, vLLM, and three files for llama.cpp: once each
    assert "--no-such-flag" in skipped[0]
    assert "--vllm COMMAND" in skipped[1]
    assert "--gguf bf16" in skipped[2]


def test_ratios_are_of_what_both_have() -> None:
    ours = median_figures([{"a": 1.0, "b": 5.0}, {"a": 3.0}, {"a": 2.0}])
    assert ours == {"a": 2.0, "b": 5.0}
    assert ratios(ours, {"a": 4.0, "c": 1.0}) == {"a": 0.5}
