# SPDX-License-Identifier: Apache-2.0
"""Tokens and requests through the HTTP server, with the simulated executor behind it.

Server, engine and client are three processes on this machine; the figures include all of them. In streams every
token is printable text and so an SSE event of its own; both are counted.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.figure import Figure
from pagoda.cli.server_process import ServerProcess, server_process
from pagoda.concurrency.event_loop import run

_VOCABULARY = 32_768
_FIRST_NUMBER = 258
"""First token that reads as its number, such as ` 4711`; tokens below are single bytes and control tokens."""
_SERVER = ["--executor", "sim", "--sim-vocab-size", str(_VOCABULARY)]
_SERVER += ["--max-num-seqs", "512", "--num-kv-blocks", "16384"]
_REQUESTS_PER_STREAM = {64: 8, 512: 2}
_OUTPUT_TOKENS = 256
_LIMITS = {
    "max_tokens": _OUTPUT_TOKENS,
    # Stop tokens are not sampled before `min_tokens`: no answer has a token without a text of its own.
    "min_tokens": _OUTPUT_TOKENS,
    "stop_token_ids": list(range(_FIRST_NUMBER)),
}
_MESSAGES = [{"role": "user", "content": "What is 3 + 4?"}]
_STREAMS: dict[str, dict[str, Any]] = {
    "completions": {"prompt": list(range(_FIRST_NUMBER, _FIRST_NUMBER + 16)), **_LIMITS},
    "chat": {"messages": _MESSAGES, **_LIMITS},
}
_SHORT: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "What is 3 + 4?", "max_tokens": 1},
    "/v1/chat/completions": {"messages": _MESSAGES, "max_tokens": 1},
}
_CONNECTIONS = 64
_SHORT_REQUESTS = 12_000


def measure_http_streams() -> list[Figure]:
    """Output tokens a second at each number of streams, by route."""
    with server_process(_SERVER) as server:
        return [
            Figure(
                what=f"tokens through {streams} HTTP streams of {route}, simulated executor",
                measured=_tokens(server, streams, body),
                target="≥ 50,000 tokens/s, client included, one event a token",
                command="python -m benchmarks.main_job http-streams",
            )
            for route, body in _STREAMS.items()
            for streams in _REQUESTS_PER_STREAM
        ]


def _tokens(server: ServerProcess, streams: int, body: dict[str, Any]) -> str:
    with tempfile.TemporaryDirectory() as directory:
        requests, figures = Path(directory) / "requests.jsonl", Path(directory) / "figures.json"
        requests.write_text(json.dumps({"body": body}), encoding="utf-8")
        command = [sys.executable, "-m", "pagoda", "bench", "serve"]
        command += ["--base-url", server.base_url, "--output", str(figures)]
        command += ["--dataset", "jsonl", "--dataset-path", str(requests)]
        command += ["--num-prompts", str(streams * _REQUESTS_PER_STREAM[streams])]
        command += ["--max-concurrency", str(streams)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        report = json.loads(figures.read_text(encoding="utf-8"))["report"]
    return (
        f"{report['output_token_rate']:,.0f} tokens/s; "
        f"{report['output_tokens']:,} tokens in {report['output_events']:,} events"
    )


def measure_http_requests() -> list[Figure]:
    """Requests a second that ask for one token, by route."""
    with server_process(_SERVER) as server:
        return [
            Figure(
                what=f"short requests to {path} over {_CONNECTIONS} connections, simulated executor",
                measured=f"{run(_requests_per_second(server, path, body)):,.0f} requests/s",
                target="≥ 2,500 requests/s, client included",
                command="python -m benchmarks.main_job http-requests",
            )
            for path, body in _SHORT.items()
        ]


async def _requests_per_second(server: ServerProcess, path: str, body: dict[str, Any]) -> float:
    """Sends the same request over and over, on connections that stay open; a bare client, to cost little."""
    url = urlsplit(server.base_url)
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload
    waiting = iter(range(_SHORT_REQUESTS))

    async def send_all() -> None:
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        for _ in waiting:
            writer.write(request)
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            if not answer.startswith(b"http/1.1 200"):
                raise RuntimeError(f"{path} answered {answer[:80]!r}.")
            _, _, length = answer.partition(b"content-length:")
            await reader.readexactly(int(length.split(b"\r\n")[0]))
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(send_all() for _ in range(_CONNECTIONS)))
    return _SHORT_REQUESTS / (time.perf_counter() - began)
