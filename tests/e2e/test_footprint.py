# SPDX-License-Identifier: Apache-2.0
"""Frontend and engine stay small: they never load torch, also while they serve."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import psutil

from pagoda.cli.server_process import server_process

LIMIT_BYTES = 200 * 10**6


def test_frontend_and_engine_stay_small_and_without_torch() -> None:
    with server_process([]) as server:
        body = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "max_tokens": 8}
        request = urllib.request.Request(
            f"{server.base_url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            assert response.status == 200
        frontend = psutil.Process(server.pid)
        (engine,) = frontend.children()
        (worker,) = engine.children()
        maps = {p.pid: Path(f"/proc/{p.pid}/maps").read_text() for p in (frontend, engine, worker)}
        assert "libtorch" in maps[worker.pid], "this is how torch would be seen"
        assert "libtorch" not in maps[frontend.pid]
        assert "libtorch" not in maps[engine.pid]
        assert frontend.memory_info().rss + engine.memory_info().rss <= LIMIT_BYTES
