# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from fragment_files import Fragment, read_fragments
from ticking_clock import TickingClock
from trace_writers import TraceWriters

from pagoda.telemetry import fragments
from pagoda.telemetry.tracer import TraceLevel, Tracer, TraceSession


def session(
    directory: Path, level: TraceLevel = TraceLevel.E2E, run: str = "serve-1"
) -> TraceSession:
    return TraceSession(level=level, directory=str(directory), run=run)


def only(directory: Path) -> Fragment:
    (fragment,) = read_fragments(directory)
    return fragment


def until_failed(tracer: Tracer, trace_writers: TraceWriters) -> None:
    if not tracer.problems:
        trace_writers.join()
    assert tracer.problems


def test_a_fragment_says_whose_it_is_and_what_happened(tmp_path: Path) -> None:
    tracer = Tracer("engine dp0", clock_ns=TickingClock())
    tracer.start(session(tmp_path / "not" / "there", TraceLevel.KERNEL))
    began = tracer.e2e()
    row = tracer.open_row("request r")
    tracer.span("schedule", began, {"tokens": 3})
    tracer.span("queued", began, row=row, ended=began + 2500)
    tracer.instant("preempted", {"request": "r"}, row=row)
    tracer.counter("requests", {"running": 1, "waiting": 0})
    tracer.describe("model", {"weight_bytes": 7})
    tracer.clock_offset("peer", -5, 2)
    tracer.stop()
    fragment = only(tmp_path / "not" / "there")
    header = fragment.header
    assert (header.role, header.run, header.level) == ("engine dp0", "serve-1", "kernel")
    assert header.uid == tracer.process.uid
    assert header.clock_ns > 10**9
    assert fragment.rows == {0: "main", row: "request r"}
    (schedule,), (queued,) = fragment.named("schedule"), fragment.named("queued")
    assert schedule == {
        "ph": "X", "name": "schedule", "ts": began / 1000, "dur": 1.0, "tid": 0, "args": {"tokens": 3},
    }  # fmt: skip
    assert (queued["ts"], queued["dur"], queued["tid"]) == (began / 1000, 2.5, row)
    assert "args" not in queued
    (instant,) = fragment.named("preempted")
    assert (instant["ph"], instant["tid"], instant["args"]) == ("i", row, {"request": "r"})
    (counter,) = fragment.named("requests")
    assert (counter["ph"], counter["args"]) == ("C", {"running": 1, "waiting": 0})
    assert {"ph": "M", "name": "model", "tid": 0, "args": {"weight_bytes": 7}} in fragment.events
    assert fragment.clocks == [{"peer": "peer", "offset_ns": -5, "round_trip_ns": 2}]


@pytest.mark.parametrize(
    ("level", "clocks"), [(TraceLevel.E2E, 1), (TraceLevel.KERNEL, 2), (TraceLevel.VERBOSE, 3)]
)
def test_each_level_has_those_before_it(tmp_path: Path, level: TraceLevel, clocks: int) -> None:
    tracer = Tracer("frontend")
    tracer.start(session(tmp_path, level))
    on = [bool(clock()) for clock in (tracer.e2e, tracer.kernel, tracer.verbose)]
    tracer.stop()
    assert on == [True] * clocks + [False] * (3 - clocks)
    assert [tracer.e2e(), tracer.kernel(), tracer.verbose()] == [0, 0, 0]


def test_nothing_is_kept_while_it_is_off(tmp_path: Path) -> None:
    tracer = Tracer("frontend", clock_ns=TickingClock())
    tracer.span("before", 5)
    tracer.instant("before")
    tracer.start(session(tmp_path))
    tracer.span("began while it was off", 0)
    began = tracer.e2e()
    tracer.stop()
    tracer.span("after", began)
    tracer.counter("after", {"a": 1})
    tracer.stop()
    assert {event["name"] for event in only(tmp_path).events} == {"thread_name"}


def test_a_row_that_is_open_has_its_name_in_each_fragment(
    tmp_path: Path, trace_writers: TraceWriters
) -> None:
    tracer = Tracer("frontend", clock_ns=TickingClock())
    row = tracer.open_row("request r")
    tracer.start(session(tmp_path / "1"))
    tracer.start(session(tmp_path / "2"))
    tracer.close_row(row)
    tracer.start(session(tmp_path / "3"))
    tracer.stop()
    trace_writers.join()
    fragments = [only(tmp_path / name) for name in "123"]
    assert not any(fragment.is_cut for fragment in fragments)
    names = [set(fragment.rows.values()) for fragment in fragments]
    assert names == [{"main", "request r"}, {"main", "request r"}, {"main"}]


def test_many_threads_lose_nothing(tmp_path: Path) -> None:
    tracer = Tracer("frontend")
    tracer.start(session(tmp_path))

    def emit() -> None:
        for index in range(2000):
            tracer.span("work", tracer.e2e(), {"index": index})

    threads = [threading.Thread(target=emit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tracer.stop()
    assert len(only(tmp_path).named("work")) == 8000


# ---- what cannot be written ends tracing, and nothing else


def a_file_instead_of_a_directory(tmp_path: Path, tracer: Tracer) -> str:
    (tmp_path / "taken").write_text("")
    tracer.start(session(tmp_path / "taken"))
    return "File exists"


def no_room(_: Path, tracer: Tracer) -> str:
    tracer.start(session(Path("/proc/self")))  # where nothing can be made, whoever asks
    return "cannot be written"


def what_is_no_json(tmp_path: Path, tracer: Tracer) -> str:
    tracer.start(session(tmp_path))
    tracer.span("step", tracer.e2e(), {"step": object()})
    return "lacks an event (TypeError: "


@pytest.mark.parametrize("fail", [a_file_instead_of_a_directory, no_room, what_is_no_json])
def test_a_failure_ends_tracing_with_one_warning(
    fail: Callable[[Path, Tracer], str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    trace_writers: TraceWriters,
) -> None:
    tracer = Tracer("worker dp0 tp0 pp0")
    with caplog.at_level(logging.WARNING, "pagoda.telemetry.tracer"):
        reason = fail(tmp_path, tracer)
        until_failed(tracer, trace_writers)
    assert (tracer.session, tracer.e2e()) == (None, 0)
    (problem,) = tracer.problems
    assert problem.startswith("worker dp0 tp0 pp0: ")
    assert reason in problem
    assert problem.endswith(".")
    assert len(caplog.records) == 1
    assert "tracing has stopped" in caplog.text
    tracer.span("after", 5)
    tracer.stop()
    assert tracer.problems == [problem]


def test_it_can_be_started_again_after_a_failure(
    tmp_path: Path, trace_writers: TraceWriters
) -> None:
    tracer = Tracer("frontend")
    what_is_no_json(tmp_path / "1", tracer)
    until_failed(tracer, trace_writers)
    tracer.start(session(tmp_path / "2"))
    assert tracer.problems == []
    tracer.span("step", tracer.e2e())
    tracer.stop()
    assert tracer.problems == []
    assert len(only(tmp_path / "2").named("step")) == 1


def test_a_disk_that_hangs_fills_no_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    trace_writers: TraceWriters,
) -> None:
    monkeypatch.setattr(fragments, "MAX_QUEUED_BYTES", 100_000)
    released = threading.Event()
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: released.wait())
    tracer = Tracer("frontend")
    tracer.start(session(tmp_path))
    tracer.span("step", tracer.e2e(), {"ops_ns": list(range(10_000))})
    assert tracer.session is not None
    for _ in range(3):
        tracer.span("step", tracer.e2e(), {"ops_ns": list(range(10_000))})
    assert tracer.session is None
    assert "is written too slowly" in tracer.problems[0]
    tracer.stop(0.01)
    assert len(caplog.records) == 1
    tracer.start(session(tmp_path))
    tracer.stop(0.01)  # with the disk still hanging
    assert "could not be written within" in tracer.problems[0]
    released.set()
    trace_writers.join()


def test_a_writer_of_an_earlier_fragment_says_nothing_about_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trace_writers: TraceWriters
) -> None:
    fails = threading.Event()
    mkdir = Path.mkdir

    def slow_mkdir(path: Path, *args: bool, **options: bool) -> None:
        if path.name == "earlier":
            fails.wait()
            raise OSError("late news")
        mkdir(path, *args, **options)

    monkeypatch.setattr(Path, "mkdir", slow_mkdir)
    tracer = Tracer("frontend")
    tracer.start(session(tmp_path / "earlier"))
    (earlier,) = trace_writers.running()
    tracer.start(session(tmp_path / "later"))
    fails.set()
    earlier.join()
    assert tracer.session is not None
    tracer.stop()
    assert tracer.problems == []
