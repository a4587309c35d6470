# SPDX-License-Identifier: Apache-2.0
"""Requests that schemathesis makes out of /openapi.json: none breaks the server, and every status is described."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import Server


@pytest.mark.timeout(900)
def test_schemathesis(start: Callable[..., Server]) -> None:
    """Any name of a model is answered, so that requests get farther than to that field."""
    server = start("--any-model-name")
    command = [
        str(Path(sys.executable).with_name("schemathesis")),
        *("run", f"{server.url}/openapi.json", "--mode", "all"),
        *("--phases", "coverage,fuzzing", "--max-examples", "10", "--seed", "1"),
        *("--checks", "not_a_server_error,status_code_conformance"),
        *("--exclude-path", "/v1/live", "--workers", "2", "--no-color"),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-8000:]
