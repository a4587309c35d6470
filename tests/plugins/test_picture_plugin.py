# SPDX-License-Identifier: Apache-2.0
"""A plugin of another package may embed parts of its prompts by itself."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from test_plugin_registry import install

from pagoda.cli.server_process import server_process


def test_a_picture_is_found_in_the_cache_by_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "pictures", {"pictures": "picture_api:API"}, "pagoda.apis")
    path = [str(tmp_path), str(Path(__file__).parent), *filter(None, sys.path)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    found = []
    with server_process(["--executor", "sim", "--log-level", "warning"]) as server:
        for picture in (1, 2, 1):
            body = json.dumps({"picture": picture, "prompt": [5] * 20}).encode()
            asked = Request(
                f"{server.base_url}/pictures", body, {"Content-Type": "application/json"}
            )
            with urlopen(asked, timeout=60) as response:
                answer = json.load(response)
            assert len(answer["tokens"]) == 4
            found.append(answer["cached"])
    assert found == [0, 0, 64]
