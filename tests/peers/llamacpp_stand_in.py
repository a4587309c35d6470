# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin for llama.cpp's server tests: the program that they start is Pagoda, and no model is fetched."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from launcher import LOGS


def pytest_configure() -> None:
    program = Path(os.environ[LOGS]).parent / "llama-server"
    launcher = Path(__file__).with_name("launcher.py")
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{launcher}" llamacpp "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    os.environ["LLAMA_SERVER_BIN_PATH"] = str(program)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Any:
    """Leaves out the suite's own fixture, which fetches all models by starting servers."""
    if fixturedef.argname != "load_server_presets":
        return None
    fixturedef.cached_result = (True, fixturedef.cache_key(request), None)
    return True
