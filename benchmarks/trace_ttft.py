# SPDX-License-Identifier: Apache-2.0
"""Error of the times in a trace: `python -m benchmarks.trace_ttft [--rounds N]`.

Requests are streamed: one at a time, sixteen that come one after the other, sixteen that come at one moment.
The client is a protocol on its sockets: it notes when it hands the bytes of a request to the socket, and when the
bytes of the first token are handed to it. The trace's time to first token is the end of the span `first token`
after the start of the span `request`, read from the merged file as the query in docs/tracing.md does. A test holds
what is read so against what Perfetto's trace processor answers. What both measure differs by what lies between
them: two ways through the kernel, and the time for which either event loop is busy with others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.figure import Figure
from pagoda.cli import output
from pagoda.cli.server_process import server_process
from pagoda.plugins.trace.merge.chrome import write_chrome_trace
from pagoda.plugins.trace.merge.merging import merge_fragments

_SETTINGS = ((1, 0.0), (16, 0.01), (16, 0.0))
"""Requests at once, and the seconds from one to the next."""
_TOLERATED_S = 1e-3
_TARGET = 0.95
_PROMPT = "The quick brown fox jumps over the lazy dog. " * 4
_MAX_TOKENS = 32
_TOKEN = b'data: {"'
_END = b"data: [DONE]"
_ACCEPTED = b"HTTP/1.1 200 "


@dataclass
class TimedStream:
    """One answer, as its client sees it. Times are in seconds of `time.perf_counter`."""

    name: str
    """The `X-Request-Id`, with which the id in the trace begins."""
    body: dict[str, object]
    sent: float = 0.0
    first_token: float = 0.0
    num_events: int = 0

    @property
    def ttft(self) -> float:
        return self.first_token - self.sent


class _StreamProtocol(asyncio.Protocol):
    """Says when bytes came, with nothing between it and the event loop."""

    def __init__(self, stream: TimedStream, ended: asyncio.Future[None]) -> None:
        self._stream = stream
        self._ended = ended
        self._tail = b""

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        stream = self._stream
        stream.num_events += data.count(_TOKEN)
        if not stream.first_token and stream.num_events:
            stream.first_token = now
        if not self._tail and not data.startswith(_ACCEPTED):
            self._ended.set_exception(ConnectionError(f"the request was refused: {data!r}"))
        self._tail = self._tail[-len(_END) :] + data
        if _END in self._tail and not self._ended.done():
            self._ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_exception(exc or ConnectionError("the answer is not complete"))


async def stream_all(base_url: str, streams: Sequence[TimedStream], gap_s: float = 0.0) -> None:
    """Connects all, then asks one after the other; returns when all answers are complete.

    Raises:
        ConnectionError: a request was refused, or its answer ended early.
    """
    host, _, port = base_url.removeprefix("http://").rstrip("/").partition(":")
    loop = asyncio.get_running_loop()
    ends: list[asyncio.Future[None]] = [loop.create_future() for _ in streams]
    transports: list[asyncio.Transport] = []
    try:
        for stream, ended in zip(streams, ends, strict=True):
            make = partial(_StreamProtocol, stream, ended)
            transport, _ = await loop.create_connection(make, host, int(port))
            transports.append(transport)
        for stream, transport in zip(streams, transports, strict=True):
            data = _request(stream, f"{host}:{port}")
            stream.sent = time.perf_counter()
            transport.write(data)
            await asyncio.sleep(gap_s)
        await asyncio.gather(*ends)
    finally:
        for transport in transports:
            transport.close()


def _request(stream: TimedStream, host: str) -> bytes:
    content = json.dumps(stream.body | {"stream": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nX-Request-Id: {stream.name}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def measure_trace_ttft(rounds: int) -> list[Figure]:
    """A figure for each number of requests at once."""
    return [_measure(concurrency, gap_s, rounds) for concurrency, gap_s in _SETTINGS]


def _measure(concurrency: int, gap_s: float, rounds: int) -> Figure:
    streams: list[TimedStream] = []
    with tempfile.TemporaryDirectory() as directory:
        arguments = ["--profile", "e2e", "--profile-dir", directory]
        arguments += ["--threads", "1", "--log-level", "warning"]
        with server_process(arguments) as server:
            for number in range(rounds):
                batch = [_stream(concurrency * number + index) for index in range(concurrency)]
                asyncio.run(stream_all(server.base_url, batch, gap_s))
                streams += batch
        path = Path(directory) / "trace.json"
        write_chrome_trace(merge_fragments([Path(directory)]), path)
        traced = {it.rpartition("-")[0]: ttft for it, ttft in first_tokens_of(path).items()}
    # The first round finds nothing warm, on either side.
    kept = streams[concurrency:]
    apart = [abs(stream.ttft - traced[stream.name]) for stream in kept]
    share = sum(difference <= _TOLERATED_S for difference in apart) / len(apart)
    every = f", {_milliseconds(gap_s)} apart" if gap_s else ""
    return Figure(
        what=f"TTFT of trace and client, {concurrency} at once{every}, {len(apart)} requests",
        measured=f"{share:.1%} within 1 ms; median {_milliseconds(sorted(apart)[len(apart) // 2])}, "
        f"largest {_milliseconds(max(apart))}",
        target=f"≥ {_TARGET:.0%} within 1 ms",
        command="python -m benchmarks.trace_ttft",
    )


def first_tokens_of(path: Path) -> dict[str, float]:
    """Seconds from the start of each `request` to the end of the `first token` in it, by the request's id."""
    spans = [event for event in json.loads(path.read_bytes())["traceEvents"] if event["ph"] == "X"]
    ends = {
        (span["pid"], span["tid"]): span["ts"] + span["dur"]
        for span in spans
        if span["name"] == "first token"
    }
    return {
        span["args"]["request"]: (ends[span["pid"], span["tid"]] - span["ts"]) / 1e6
        for span in spans
        if span["name"] == "request" and (span["pid"], span["tid"]) in ends
    }


def _stream(index: int) -> TimedStream:
    body = {
        "model": "pagoda-tiny",
        "prompt": f"{index} {_PROMPT}",
        "max_tokens": _MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    return TimedStream(f"ttft-{index}", body)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, metavar="N")
    figures = measure_trace_ttft(parser.parse_args().rounds)
    rows = [(f.what, f.measured, f.target, f.command) for f in figures]
    output.stdout().print(output.table("", ("what", "measured", "target", "command"), rows))


if __name__ == "__main__":
    main()
