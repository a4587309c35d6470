# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from fragment_files import read_fragments

from pagoda.telemetry import fragments
from pagoda.telemetry.fragments import FragmentWriter, ProcessHeader, clear_fragments, run_prefix


def header(run: str = "serve-8000", role: str = "worker dp0 tp1 pp0") -> ProcessHeader:
    process = ProcessHeader.of_this_process(role, time.perf_counter_ns)
    return msgspec.structs.replace(
        process, run=run, level="e2e", clock_ns=1_000_000_000, wall_ns=time.time_ns()
    )


def fail(_: FragmentWriter, reason: str) -> None:
    raise AssertionError(reason)


def written(directory: Path, **fields: str) -> Path:
    writer = FragmentWriter(str(directory), header(**fields), fail)
    writer.start()
    writer.close()
    return writer.path


def test_a_name_says_the_run_and_the_role() -> None:
    head = header("serve/80 00.é")
    assert head.file_name.startswith("serve_80_00__.worker-dp0-tp1-pp0.")
    assert head.file_name.endswith(".1000000000.fragment.jsonl")
    assert head.uid in head.file_name


def test_processes_are_told_apart_though_their_numbers_are_used_again() -> None:
    first, second = header(), header()
    assert first.pid == second.pid == os.getpid()
    assert first.uid != second.uid


def test_events_are_lines(tmp_path: Path) -> None:
    writer = FragmentWriter(str(tmp_path), header(), fail)
    for n in range(1000):
        writer.append({"n": n})
    writer.start()
    writer.close()
    first, *lines = writer.path.read_bytes().splitlines()
    assert json.loads(first)["fragment"]["role"] == "worker dp0 tp1 pp0"
    assert [json.loads(line) for line in lines] == [{"n": n} for n in range(1000)]


def test_only_the_fragments_of_the_same_run_are_removed(tmp_path: Path) -> None:
    own = [written(tmp_path, run="serve-80", role=role) for role in ("frontend", "engine dp0")]
    others = {written(tmp_path, run=run) for run in ("serve-8000", "serve-8", "route-80")}
    (tmp_path / "serve-80.json").write_text("a trace that was merged")
    clear_fragments(tmp_path, "serve-80")
    clear_fragments(tmp_path, "*")  # no pattern, but the run of that name
    assert run_prefix("*") == "_."
    assert set(tmp_path.iterdir()) == {*others, tmp_path / "serve-80.json"}
    assert not any(path.exists() for path in own)
    clear_fragments(tmp_path / "nowhere", "serve-80")


def test_a_fragment_has_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragments, "MAX_FRAGMENT_BYTES", 2000)
    reasons: list[str] = []
    writer = FragmentWriter(str(tmp_path), header(), lambda _, reason: reasons.append(reason))
    for _ in range(1000):
        writer.append({"text": "x" * 100})
    writer.start()
    writer.close()
    assert reasons == [f"{writer.path} cannot be written (it has 2000 bytes)."]
    assert writer.path.stat().st_size <= 2000


_ENDLESS = """
import sys
import time
from pagoda.telemetry.tracer import Tracer, TraceLevel, TraceSession
tracer = Tracer("engine dp0")
tracer.start(TraceSession(level=TraceLevel.E2E, directory=sys.argv[1], run="r"))
index = 0
while True:
    for _ in range(100):
        tracer.span("step", tracer.e2e(), {"step": index})
        index += 1
    if index == 20_000:
        print("", flush=True)
        sys.stdin.read()
"""


def test_a_process_that_is_killed_loses_the_buffer_at_most(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _ENDLESS, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (path,) = tmp_path.iterdir()
        while path.stat().st_size < 1000:  # the writer comes around a few times a second
            os.sched_yield()
        process.send_signal(signal.SIGKILL)
    (fragment,) = read_fragments(tmp_path)
    steps = [event["args"]["step"] for event in fragment.named("step")]
    assert steps == list(range(len(steps)))
    assert steps


def test_only_the_user_reads_a_fragment(tmp_path: Path) -> None:
    made = written(tmp_path / "trace")
    assert made.stat().st_mode & 0o777 == 0o600
    assert made.parent.stat().st_mode & 0o777 == 0o700
