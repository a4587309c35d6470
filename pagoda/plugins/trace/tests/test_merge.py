# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_server import MS, OPERATIONS, Life, ScriptedProcess, serve, shuffled_and_cut
from trace_format import problems_of, read_trace
from trace_processor import loaded

from pagoda.errors import ConfigError
from pagoda.plugins.trace.merge.chrome import write_chrome_trace
from pagoda.plugins.trace.merge.merging import merge_fragments

LIVES = [
    Life("one", 0.0, prompt_tokens=64, output_tokens=6),
    Life("two", 5.0, prompt_tokens=8, output_tokens=4, preempted_for=30.0),
]


def write(directory: Path, processes: Sequence[ScriptedProcess]) -> None:
    for process in processes:
        process.write(directory)


def merged(
    directory: Path, processes: Sequence[ScriptedProcess] = (), *others: Path
) -> dict[str, Any]:
    """The trace of the directories as written, with these processes in the first: valid whatever the test says."""
    write(directory, processes)
    path = directory / "trace.json.gz"
    write_chrome_trace(merge_fragments([directory, *others]), path)
    trace = read_trace(path)
    assert problems_of(trace) == []
    return trace


def drop_clocks(*processes: ScriptedProcess) -> None:
    """Forgets all measurements of clocks."""
    for process in processes:
        process.lines = [line for line in process.lines if "clock" not in line]


def names_of(trace: dict[str, Any], what: str = "process_name") -> list[str]:
    return [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == what]


def spans(trace: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [e for e in trace["traceEvents"] if e["ph"] == "X" and e["name"] == name]


def flows(trace: dict[str, Any]) -> list[list[dict[str, Any]]]:
    points = [e for e in trace["traceEvents"] if e["ph"] in "stf"]
    return [
        [p for p in points if p["id"] == number] for number in sorted({p["id"] for p in points})
    ]


def notes(trace: dict[str, Any]) -> list[str]:
    return list(trace["otherData"]["notes"])


# ---- what becomes of a whole trace


def test_processes_are_numbered_and_named_in_the_order_of_the_picture(tmp_path: Path) -> None:
    trace = merged(tmp_path, list(reversed(serve(LIVES, worker_dies=True, pids=(7, 7, 9, 9)))))
    worker = "worker dp0 tp0 pp0"
    assert names_of(trace) == ["frontend", "engine dp0", worker, f"{worker} #2"]
    told = trace["otherData"]["processes"]
    assert [told[str(pid)]["pid"] for pid in (1, 2, 3, 4)] == [7, 7, 9, 9]


def test_clocks_that_are_hours_apart_are_put_right(tmp_path: Path) -> None:
    hour = 3_600_000 * MS
    trace = merged(tmp_path, serve(LIVES, clocks=(0, hour, -hour // 3, 0)))
    engine, worker = (
        sorted(e["ts"] for e in spans(trace, "step") if e["pid"] == pid) for pid in (2, 3)
    )
    assert worker == [at + 300 for at in engine]
    assert notes(trace) == []


def test_the_offset_with_the_shortest_round_trip_counts(tmp_path: Path) -> None:
    frontend, engine, worker = serve(LIVES)
    for error_ms, round_trip_ms in ((5, 20), (0, 0.5), (7, 30)):
        engine.compare_clock(frontend, error_ms * MS, round(round_trip_ms * MS))
    engine.lines = [it for it in engine.lines if it.get("clock", {}).get("round_trip_ns") != 1000]
    trace = merged(tmp_path, [frontend, engine, worker])
    assert spans(trace, "queued")[0]["ts"] == 2000


def test_a_process_whose_clock_nobody_compared_is_placed_by_the_time_of_day(tmp_path: Path) -> None:
    frontend, engine, worker = serve(LIVES, clocks=(0, 5000 * MS, 0, 0))
    drop_clocks(engine)
    trace = merged(tmp_path, [frontend, engine, worker])
    assert spans(trace, "queued")[0]["ts"] == 2000
    assert [note for note in notes(trace) if "time of day" in note] == [
        f"{name} is placed by the time of day: no measured clock leads to it."
        for name in ("engine dp0", "worker dp0 tp0 pp0")
    ]


def test_processes_of_one_kernel_need_no_comparison(tmp_path: Path) -> None:
    router = ScriptedProcess("router", "r" * 16, host="gate", ahead_ns=7 * MS)
    processes = serve(LIVES)
    drop_clocks(*processes)
    for process in processes:
        process.clock_id = "boot 1"
    processes[0].compare_clock(router)
    trace = merged(tmp_path, [router, *processes])
    assert spans(trace, "queued")[0]["ts"] == 2000
    assert notes(trace) == []


def test_measured_offsets_lead_over_a_process_that_left_nothing(tmp_path: Path) -> None:
    frontend, engine, worker = serve(LIVES, clocks=(0, 10 * MS, 20 * MS, 0))
    frontend.compare_clock(engine)
    trace = merged(tmp_path, [frontend, worker])
    assert names_of(trace) == ["frontend", "worker dp0 tp0 pp0"]
    assert notes(trace) == []
    assert min(e["ts"] for e in spans(trace, "prepare") if e["pid"] == 2) == 3500


def test_operations_are_spans_within_the_forward_pass(tmp_path: Path) -> None:
    trace = merged(tmp_path, serve(LIVES))
    (first, *_) = spans(trace, "forward")
    index = trace["traceEvents"].index(first)
    inner = trace["traceEvents"][index + 1 : index + 5]
    assert "args" not in first
    assert [e["name"] for e in inner] == OPERATIONS["names"]
    assert [e["cat"] for e in inner] == OPERATIONS["kinds"]
    assert inner[0]["ts"] == first["ts"]
    assert inner[-1]["ts"] + inner[-1]["dur"] == first["ts"] + first["dur"]


def test_one_flow_follows_each_request_through_all_that_it_went_through(tmp_path: Path) -> None:
    trace = merged(tmp_path, serve(LIVES, worker_dies=True))
    one, two = flows(trace)
    pids = [[point["pid"] for point in flow] for flow in (one, two)]
    steps = [2, 3] * 4 + [2] + [2, 4] * 2
    assert pids[0] == [1, 2, *steps, 1], "queued, steps, recovering, steps at another worker"
    assert pids[1] == [1, 2, *[2, 4] * 3, 2, 2, 4, 1], "queued, steps, preempted, steps"
    for flow, life in zip((one, two), LIVES, strict=True):
        told = (e for e in spans(trace, "request") if e["args"]["request"] == life.request)
        (request,) = (e for e in told if e["pid"] == 1)
        assert flow[0]["ts"] == request["ts"]
        assert flow[-1]["ts"] == request["ts"] + request["dur"] - Decimal("0.001")


def test_steps_are_told_apart_by_time_when_a_new_engine_counts_anew(tmp_path: Path) -> None:
    frontend, engine, worker = serve([LIVES[0]])
    later = Life("three", 1000.0, 8, 3)
    _, engine_2, worker_2 = serve([later])
    engine_2.uid, worker_2.uid = "E" * 16, "A" * 16
    engine_2.began_ms = worker_2.began_ms = 900.0
    drop_clocks(worker, worker_2)
    worker.parent_uid = worker_2.parent_uid = ""  # which engine it had is not known
    trace = merged(tmp_path, [frontend, engine, worker, engine_2, worker_2])
    names = dict(zip(range(1, 6), names_of(trace), strict=True))
    visited = [[names[point["pid"]] for point in flow] for flow in flows(trace)]
    assert visited[0].count("worker dp0 tp0 pp0") == LIVES[0].output_tokens
    assert visited[1].count("worker dp0 tp0 pp0 #2") == later.output_tokens
    assert "engine dp0" not in visited[1]


def test_servers_under_a_router_are_told_apart_by_their_hosts(tmp_path: Path) -> None:
    router = ScriptedProcess("router", "r" * 16, host="gate")
    top = router.open_row("request one")
    router.span("request", -1.0, 100.0, top, request="one")
    hosts = [tmp_path / host for host in ("alpha", "beta")]
    for number, directory in enumerate(hosts):
        directory.mkdir()
        processes = serve([Life("one" if number == 0 else "other", 0.0, 4, 2)])
        drop_clocks(*processes)
        for process in processes:
            process.host, process.uid = directory.name, process.uid[:-1] + str(number)
            process.clock_id = f"boot of {directory.name}"
        frontend, engine, worker = processes
        engine.parent_uid, worker.parent_uid = frontend.uid, engine.uid
        frontend.compare_clock(router)
        write(directory, processes)
    trace = merged(tmp_path, [router], *hosts)
    roles = ("frontend", "engine dp0", "worker dp0 tp0 pp0")
    served = [f"{role} @ {host.name}" for host in hosts for role in roles]
    assert names_of(trace) == ["router", *served]
    (through_router,) = (flow for flow in flows(trace) if flow[0]["pid"] == 1)
    assert [point["pid"] for point in through_router] == [1, 2, 3, 3, 4, 3, 4, 2, 1]


# ---- what was lost


def test_lines_that_are_cut_or_no_events_are_left_out_and_counted(tmp_path: Path) -> None:
    frontend, engine, worker = serve(LIVES)
    write(tmp_path, [frontend, engine])
    data = worker.data()
    worker.write(tmp_path).write_bytes(data[: data.rindex(b'"ts"')])
    bad = [
        b"not json",
        b"\xff\xfe",
        b"[1, 2]",
        b'{"ph":"X","name":"x","ts":-1,"dur":1,"tid":0}',
        b'{"ph":"X","name":"x","ts":1e300,"dur":1,"tid":0}',
        b'{"ph":"X","name":"x","ts":1,"dur":1,"tid":0,"args":[1]}',
        b'{"ph":"C","name":"x","ts":1,"tid":0,"args":{"a":"b"}}',
        b'{"ph":"Q","name":"x","ts":1,"tid":0}',
        b"{}",
        b"",
        b'{"ph":"X","name":"x","ts":1,"dur":1,"tid":0,"args":' + b'{"a":' * 5000,
    ]
    with open(frontend.write(tmp_path), "ab") as file:
        file.write(b"\n".join(bad) + b"\n")
    told = notes(merged(tmp_path))
    assert f"{len(bad)} lines, the first is" in told[1] or f"{len(bad)} lines" in told[0]
    assert any("its last line is cut off" in note for note in told)


def test_a_fragment_that_does_not_say_whose_it_is_is_left_out(tmp_path: Path) -> None:
    processes = serve(LIVES)
    write(tmp_path, processes)
    path = processes[2].write(tmp_path)
    path.write_bytes(path.read_bytes()[:30])
    trace = merged(tmp_path)
    assert names_of(trace) == ["frontend", "engine dp0"]
    assert any(path.name in note and "was left out" in note for note in notes(trace))
    assert len(flows(trace)) == len(LIVES)


def test_a_fragment_that_was_gathered_twice_counts_once(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    processes = serve(LIVES)
    write(tmp_path, processes)
    whole = processes[1].write(copy).read_bytes()
    processes[1].write(tmp_path).write_bytes(whole[: len(whole) // 2])
    trace = merge_fragments([tmp_path, copy])
    assert any("is there twice" in note for note in trace.notes)
    assert [len(process.rows) for process in trace.processes] == [3, 5, 1]


def test_a_process_that_was_traced_twice_stays_one(tmp_path: Path) -> None:
    (first, *_), (second, *_) = serve([LIVES[0]]), serve([Life("later", 500.0, 4, 2)])
    second.began_ms = 400.0
    trace = merged(tmp_path, [first, second])
    assert names_of(trace) == ["frontend"]
    assert len(spans(trace, "request")) == 2


def test_spans_that_cross_are_cut_and_said(tmp_path: Path) -> None:
    frontend = ScriptedProcess("frontend", "f" * 16)
    frontend.span("a", 0.0, 10.0)
    frontend.span("b", 5.0, 12.0)
    trace = merged(tmp_path, [frontend])
    assert spans(trace, "b")[0]["dur"] == 5000
    assert notes(trace) == ["frontend: 1 spans went beyond the one around them; cut."]


def test_what_cannot_be_merged_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no fragments"):
        merge_fragments([tmp_path])
    with pytest.raises(ConfigError, match="is no directory"):
        merge_fragments([tmp_path / "nowhere"])
    write(tmp_path, serve(LIVES))
    with pytest.raises(ConfigError, match=r"--output: cannot write"):
        write_chrome_trace(merge_fragments([tmp_path]), tmp_path / "no" / "trace.json")


# ---- whatever happens


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[ScriptedProcess], list[int | None], int]:
    """Processes of a server, where each file ends, and a seed for the order of lines."""
    lives = [
        Life(
            f"r{number}",
            arrived=draw(st.integers(0, 100)) / 3,
            prompt_tokens=draw(st.integers(1, 100)),
            output_tokens=draw(st.integers(1, 5)),
            waits=draw(st.sampled_from((0.0, 0.001, 3.0))),
            preempted_for=draw(st.sampled_from((0.0, 7.0))),
        )
        for number in range(draw(st.integers(1, 3)))
    ]
    years = 4 * 10**16  # of which a number in a fragment no longer has each nanosecond
    offsets = st.integers(-(10**14), 10**14) | st.integers(years, years + 10**9)
    processes = serve(
        lives,
        clocks=draw(st.tuples(*[offsets] * 4)),
        pids=draw(st.tuples(*[st.integers(1, 3)] * 4)),
        worker_dies=draw(st.booleans()),
        step_ms=draw(st.sampled_from((2.0, 2.0001, 10.0 / 3))),
    )
    for process, peer in ((processes[1], processes[0]), (processes[-1], processes[1])):
        error = draw(st.integers(-MS, MS))
        process.compare_clock(peer, error, round_trip_ns=draw(st.integers(0, 2 * MS)))
    cuts = [draw(st.none() | st.integers(0, len(it.data()))) for it in processes]
    return processes, cuts, draw(st.integers(0, 2**16))


@settings(max_examples=60)
@given(histories())
def test_whatever_is_cut_the_rest_is_a_valid_trace(
    history: tuple[list[ScriptedProcess], list[int | None], int],
) -> None:
    processes, cuts, seed = history
    random = Random(seed)
    kept: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for process, cut in zip(processes, cuts, strict=True):
            data = shuffled_and_cut(process.data(), random, cut)
            process.write(directory).write_bytes(data)
            kept += _events_in(data)
        trace = merged(directory)
    written = Counter(e["ph"] + e["name"] for e in trace["traceEvents"] if e["ph"] in "XiC")
    operations = {f"X{name}" for name in OPERATIONS["names"]}
    added = {name for name in written if name in operations or name.startswith("Xoperation ")}
    assert {name: count for name, count in written.items() if name not in added} == kept


def _events_in(data: bytes) -> Counter[str]:
    """Events that a file still has, if it says whose it is."""
    found: Counter[str] = Counter()
    for number, line in enumerate(data.splitlines()):
        try:
            event = json.loads(line)
        except ValueError:
            if number == 0:
                return Counter()
            continue
        if event.get("ph", "M") in "XiC":
            found[event["ph"] + event["name"]] += 1
    return found


# ---- in Perfetto


def test_perfetto_reads_it_as_it_is_meant(tmp_path: Path) -> None:
    write(tmp_path, serve(LIVES, worker_dies=True, clocks=(1, -(10**12), 10**12, 5)))
    path = tmp_path / "trace.json"
    write_chrome_trace(merge_fragments([tmp_path]), path)
    with loaded(path) as perfetto:
        assert perfetto.complaints() == []
        assert perfetto.query(_FIRST_TOKENS) == [("one", 14 * MS), ("two", (94 - 5) * MS)]
        assert perfetto.query(_WORKERS_OF_ONE) == [
            ("worker dp0 tp0 pp0", 4),
            ("worker dp0 tp0 pp0 #2", 2),
        ]
        assert perfetto.query(_OPERATIONS) == [("forward", "layers.0.attention", 10)]
        (rows,) = perfetto.query("SELECT count() FROM thread WHERE name GLOB 'request *'")
        assert rows == (2 * len(LIVES),)


_FIRST_TOKENS = """
    SELECT extract_arg(request.arg_set_id, 'args.request') AS id, token.ts + token.dur - request.ts AS ttft
    FROM slice AS request
    JOIN slice AS token ON token.parent_id = request.id AND token.name = 'first token'
    WHERE request.name = 'request' ORDER BY id
"""
_WORKERS_OF_ONE = """
    INCLUDE PERFETTO MODULE slices.flow;
    SELECT process.name, count() FROM slice AS request
    JOIN following_flow(request.id) AS flow
    JOIN slice AS visited ON visited.id = flow.slice_in
    JOIN thread_track AS track ON visited.track_id = track.id
    JOIN thread USING (utid) JOIN process USING (upid)
    WHERE request.name = 'prepare' AND visited.name = 'prepare' AND process.name GLOB 'worker*'
        AND request.ts = 0
    GROUP BY process.name ORDER BY process.name
"""
_OPERATIONS = """
    SELECT parent.name AS outer, slice.name, count() FROM slice
    JOIN slice AS parent ON slice.parent_id = parent.id
    WHERE slice.category = 'attention' GROUP BY outer, slice.name
"""
