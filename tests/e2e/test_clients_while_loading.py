# SPDX-License-Identifier: Apache-2.0
"""A client that is started together with the server needs no retries of its own."""

from __future__ import annotations

import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor

from ports import free_ports

from pagoda.cli.server_process import server_process


def _ask(port: int) -> tuple[int, str]:
    """Asks as soon as somebody listens; returns the status and the text of the answer."""
    deadline = time.monotonic() + 120
    body = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0}
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        try:
            connection.connect()
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
            continue
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        said = json.load(answer)
        connection.close()
        return answer.status, said["choices"][0]["message"]["content"] if "choices" in said else ""


def test_a_client_that_is_started_with_the_server_is_answered() -> None:
    [port] = free_ports(1)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(_ask, port)
        with server_process(["--port", str(port), "--log-level", "warning"]):
            assert asked.result() == (200, "17 + 25 = 42")
