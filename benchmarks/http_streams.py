"""Tokens through HTTP streams: the simulated executor behind the real server, `pagoda bench serve` before it.

Server, engine and client are three processes on this machine; the figure includes all of them. Every
token is an SSE event of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.figure import Figure
from pagoda.cli.server_process import ServerProcess, server_process

# Below 128 every token is a whole character, so that each has a text to send.
_VOCABULARY = "128"
_SERVER = ["--executor", "sim", "--sim-vocab-size", _VOCABULARY]
_SERVER += ["--max-num-seqs", "512", "--num-kv-blocks", "16384"]
_STREAMS = (64, 512)
_REQUESTS_PER_STREAM = {64: 8, 512: 2}
_OUTPUT_TOKENS = 256


def measure_http_streams() -> list[Figure]:
    """Output tokens a second at each number of streams."""
    with server_process(_SERVER) as server:
        return [
            Figure(
                what=f"tokens through {streams} HTTP streams, simulated executor",
                measured=_measure(server, streams),
                target="≥ 20,000 tokens/s, client included",
                command="python -m benchmarks.main_job http-streams",
            )
            for streams in _STREAMS
        ]


def _measure(server: ServerProcess, streams: int) -> str:
    with tempfile.TemporaryDirectory() as directory:
        figures = Path(directory) / "figures.json"
        command = [sys.executable, "-m", "pagoda", "bench", "serve"]
        command += ["--base-url", server.base_url, "--output", str(figures)]
        command += ["--max-concurrency", str(streams), "--random-input-len", "16"]
        command += ["--num-prompts", str(streams * _REQUESTS_PER_STREAM[streams])]
        command += ["--random-output-len", str(_OUTPUT_TOKENS)]
        command += ["--random-vocab-size", _VOCABULARY]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        report = json.loads(figures.read_text(encoding="utf-8"))["report"]
    events_per_token = report["output_events"] / report["output_tokens"]
    return f"{report['output_token_rate']:,.0f} tokens/s, {events_per_token:.2f} events a token"
