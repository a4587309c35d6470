"""Tokens through HTTP streams: the simulated executor behind the real server, `pagoda bench serve` before it.

Server, engine and client are three processes on this machine; the figure includes all of them. Every
token is printable text and so an SSE event of its own; both are counted.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.figure import Figure
from pagoda.cli.server_process import ServerProcess, server_process

_VOCABULARY = 32_768
_FIRST_NUMBER = 258
"""First token that reads as its number, such as ` 4711`; tokens below are single bytes and control tokens."""
_SERVER = ["--executor", "sim", "--sim-vocab-size", str(_VOCABULARY)]
_SERVER += ["--max-num-seqs", "512", "--num-kv-blocks", "16384"]
_REQUESTS_PER_STREAM = {64: 8, 512: 2}
_OUTPUT_TOKENS = 256
_REQUEST = {
    "prompt": list(range(_FIRST_NUMBER, _FIRST_NUMBER + 16)),
    "max_tokens": _OUTPUT_TOKENS,
    # Stop tokens are not sampled before `min_tokens`: no answer has a token without a text of its own.
    "min_tokens": _OUTPUT_TOKENS,
    "stop_token_ids": list(range(_FIRST_NUMBER)),
}


def measure_http_streams() -> list[Figure]:
    """Output tokens a second at each number of streams."""
    with server_process(_SERVER) as server:
        return [
            Figure(
                what=f"tokens through {streams} HTTP streams, simulated executor",
                measured=_measure(server, streams),
                target="≥ 20,000 tokens/s, client included, one event a token",
                command="python -m benchmarks.main_job http-streams",
            )
            for streams in _REQUESTS_PER_STREAM
        ]


def _measure(server: ServerProcess, streams: int) -> str:
    with tempfile.TemporaryDirectory() as directory:
        requests, figures = Path(directory) / "requests.jsonl", Path(directory) / "figures.json"
        requests.write_text(json.dumps({"body": _REQUEST}), encoding="utf-8")
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
