# SPDX-License-Identifier: Apache-2.0
"""The trace of a server under load that runs out of KV blocks and loses its worker is whole, and it is true."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from streams import children
from trace_format import problems_of, read_trace
from trace_processor import Traced, loaded

from benchmarks.trace_ttft import TimedStream, first_tokens_of, stream_all
from pagoda.cli.server_process import ServerProcess, server_process

NUM_STREAMS = 16
PROMPT = "The pagoda has five storeys, and every storey has the same plan."
MAX_TOKENS = 200
SERVER = ["--threads", "1", "--max-model-len", "512", "--block-size", "16"]
# All prompts find room, and half of what is to be said.
SERVER += ["--num-kv-blocks", "112", "--no-enable-prefix-caching"]
NUM_STEPS_SEEN = 8


@dataclass(frozen=True)
class Recorded:
    """The merged trace, and what the clients have seen."""

    path: Path
    trace: Mapping[str, Any]
    streams: list[TimedStream]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    directory = tmp_path_factory.mktemp("trace")
    streams = [_stream(index) for index in range(NUM_STREAMS)]
    profile = ["--profile", "kernel", "--profile-dir", str(directory)]
    with server_process([*SERVER, *profile]) as server:
        asyncio.run(_stream_and_kill(server, directory, streams))
    _trace("merge", directory)
    path = directory / "trace.json"
    return Recorded(path, read_trace(path), streams)


def _trace(*arguments: str | Path) -> str:
    """Returns what `pagoda trace` prints."""
    command = [sys.executable, "-m", "pagoda", "trace", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _stream(index: int) -> TimedStream:
    body = {
        "model": "pagoda-tiny",
        "prompt": f"{index} {PROMPT}",
        "max_tokens": MAX_TOKENS,
        "seed": index,
        "ignore_eos": True,
    }
    return TimedStream(f"stream-{index}", body)


async def _stream_and_kill(
    server: ServerProcess, directory: Path, streams: list[TimedStream]
) -> None:
    """The worker ends when all answers have begun and some of its steps have been written down."""
    answers = asyncio.create_task(stream_all(server.base_url, streams, gap_s=0.01))
    while not (all(stream.num_events for stream in streams) and _has_steps(directory)):
        assert not answers.done()
        await asyncio.sleep(0.005)
    (worker,) = children(server.pid, "pagoda.worker.main")
    os.kill(worker, signal.SIGKILL)
    await answers


def _has_steps(directory: Path) -> bool:
    return any(
        path.read_bytes().count(b'"name":"step"') > NUM_STEPS_SEEN
        for path in directory.glob("*.worker-*")
    )


@pytest.fixture(scope="module")
def perfetto(recorded: Recorded) -> Iterator[Traced]:
    with loaded(recorded.path) as processor:
        yield processor


def test_it_is_valid_and_every_request_is_followed(recorded: Recorded) -> None:
    assert problems_of(recorded.trace) == []
    events = recorded.trace["traceEvents"]
    flows = {event["id"] for event in events if event["ph"] == "s"}
    assert len(flows) == NUM_STREAMS
    notes = recorded.trace["otherData"]["notes"]
    assert not any("went beyond" in note or "time of day" in note for note in notes), notes


def test_perfetto_has_no_complaint(perfetto: Traced) -> None:
    assert perfetto.complaints() == []
    names = [
        name
        for (name,) in perfetto.query(
            "SELECT name FROM process WHERE name IS NOT NULL ORDER BY pid"
        )
    ]
    assert names == ["frontend", "engine dp0", "worker dp0 tp0 pp0", "worker dp0 tp0 pp0 #2"]


def test_every_stream_has_a_first_token(recorded: Recorded, perfetto: Traced) -> None:
    """`benchmarks.trace_ttft` measures how near its time is to what clients see."""
    traced = {str(request).rpartition("-")[0] for request, _ in perfetto.query(_FIRST_TOKENS)}
    assert traced == {stream.name for stream in recorded.streams}


def test_the_benchmark_reads_the_same_first_tokens_as_perfetto(
    recorded: Recorded, perfetto: Traced
) -> None:
    traced = {str(it): int(str(ttft)) / 1e9 for it, ttft in perfetto.query(_FIRST_TOKENS)}
    assert first_tokens_of(recorded.path) == pytest.approx(traced, abs=1e-8)


def test_preemptions_and_the_restart_are_to_be_seen(perfetto: Traced) -> None:
    phases = {str(name): int(str(count)) for name, count in perfetto.query(_PHASES_OF_REQUESTS)}
    assert phases["queued"] == phases["request"] == NUM_STREAMS
    assert phases["preempted"] > 0
    assert phases["recovering"] > 0
    instants = dict(perfetto.query(_INSTANTS))
    assert instants["preempted"] == phases["preempted"]
    assert instants["worker lost"] == 1
    assert perfetto.query(_PREEMPTIONS_TOLD) == [(phases["preempted"],)]


def test_flows_lead_through_both_workers(perfetto: Traced) -> None:
    visited = {str(request): str(names) for request, names in perfetto.query(_WORKERS_VISITED)}
    assert len(visited) == NUM_STREAMS
    ((recovering,),) = perfetto.query(_RECOVERING)
    second = [names for names in visited.values() if "worker dp0 tp0 pp0 #2" in names]
    assert len(second) >= int(str(recovering)) > 0
    assert "worker dp0 tp0 pp0,worker dp0 tp0 pp0 #2" in second


def test_the_operations_of_forward_passes_are_named(perfetto: Traced) -> None:
    ((count, outside),) = perfetto.query(_ATTENTION)
    assert int(str(count)) > 0
    assert outside == 0


def test_the_report_gives_reasons(recorded: Recorded) -> None:
    page = recorded.path.with_name("report.html")
    said = _trace("report", recorded.path, "--html", page)
    assert f"{NUM_STREAMS} requests" in said
    assert "a worker was lost once" in said
    assert "preempted" in said
    assert "stream-" in page.read_text()


_FIRST_TOKENS = """
    SELECT extract_arg(request.arg_set_id, 'args.request') AS request,
        token.ts + token.dur - request.ts AS ttft
    FROM slice AS request
    JOIN slice AS token ON token.parent_id = request.id AND token.name = 'first token'
    WHERE request.name = 'request'
"""
_PHASES_OF_REQUESTS = """
    SELECT slice.name, count() AS number FROM slice
    JOIN thread_track AS track ON slice.track_id = track.id
    JOIN thread USING (utid) JOIN process USING (upid)
    WHERE process.name = 'engine dp0' AND thread.name GLOB 'request *'
    GROUP BY slice.name
"""
_INSTANTS = """
    SELECT slice.name, count() AS number FROM slice
    JOIN thread_track AS track ON slice.track_id = track.id
    JOIN thread USING (utid) JOIN process USING (upid)
    WHERE process.name = 'engine dp0' AND thread.name = 'main' AND slice.dur = 0
    GROUP BY slice.name
"""
_PREEMPTIONS_TOLD = """
    SELECT sum(extract_arg(arg_set_id, 'args.preemptions')) FROM slice WHERE name = 'request'
"""
_WORKERS_VISITED = """
    SELECT flow.trace_id AS request, group_concat(DISTINCT process.name) AS workers
    FROM flow
    JOIN slice AS visited ON visited.id = flow.slice_in
    JOIN thread_track AS track ON visited.track_id = track.id
    JOIN thread USING (utid) JOIN process USING (upid)
    WHERE process.name GLOB 'worker*'
    GROUP BY flow.trace_id
"""
_RECOVERING = """
    SELECT count(DISTINCT thread.utid) AS number FROM slice
    JOIN thread_track AS track ON slice.track_id = track.id
    JOIN thread USING (utid)
    WHERE slice.name = 'recovering'
"""
_ATTENTION = """
    SELECT count() AS number, sum(parent.name IS NOT 'forward') AS outside
    FROM slice LEFT JOIN slice AS parent ON slice.parent_id = parent.id
    WHERE slice.category = 'attention'
"""
