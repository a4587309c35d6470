# SPDX-License-Identifier: Apache-2.0
"""Clients for Node; `make test-clients` installs their packages beside the scripts."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from conftest import Server

_SCRIPTS = Path(__file__).parent / "node"


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
@pytest.mark.parametrize("script", ["openai.mjs", "vercel.mjs", "providers.mjs"])
def test_a_script(server: Server, script: str) -> None:
    subprocess.run(
        ["node", str(_SCRIPTS / script), server.v1, server.model], check=True, timeout=240
    )
