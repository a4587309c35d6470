# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import MODEL, MS, Life, ScriptedProcess, serve

from pagoda.errors import ConfigError
from pagoda.plugins.trace.merge.chrome import write_chrome_trace
from pagoda.plugins.trace.page import tables_of
from pagoda.plugins.trace.report.data import (
    Part,
    Report,
    RequestReport,
    Roofline,
    WorkerReport,
    seconds,
)
from pagoda.plugins.trace.report.intervals import covered, length, union, within, without
from pagoda.plugins.trace.report.reporting import load_trace, report_of

ALONE = Life("one", 0.0, prompt_tokens=64, output_tokens=4)


def report(directory: Path, processes: list[ScriptedProcess]) -> Report:
    """The report of the fragments; that of the merged file says the same."""
    for process in processes:
        process.write(directory)
    trace = load_trace(directory)
    found = report_of(trace)
    path = directory / "trace.json.gz"
    write_chrome_trace(trace, path)
    assert report_of(load_trace(path)) == found
    return found


def milliseconds(parts: tuple[Part, ...]) -> dict[str, float]:
    return {part.name: round(part.seconds * 1e3, 3) for part in parts if part.seconds}


def only(found: Report) -> RequestReport:
    (request,) = found.requests
    return request


def test_the_time_of_a_request_its_engine_and_its_worker_is_told_apart(tmp_path: Path) -> None:
    found = report(tmp_path, serve([ALONE]))
    request, (engine,), (worker,) = only(found), found.engines, found.workers
    assert milliseconds(request.parts) == {
        "HTTP, prepare": 1.5,
        "queued": 1.0,
        "prefill": 9.6,
        "decode": 28.8,
        "between steps": 1.6,
        "between processes": 1.5,
    }
    assert sum(part.seconds for part in request.parts) == pytest.approx(request.end_to_end)
    assert sum(part.share for part in request.parts) == pytest.approx(1)
    assert request.first_token == pytest.approx(0.014)
    assert request.per_token == pytest.approx(0.010)
    assert (request.prompt_tokens, request.output_tokens, request.preemptions) == (64, 4, 0)
    assert (engine.num_steps, worker.num_steps) == (4, 4)
    assert milliseconds(engine.steps) == {"in the worker": 36.0, "IPC": 2.4}
    assert milliseconds(engine.loop) == {"schedule": 0.4, "update": 0.4}
    assert milliseconds(worker.parts) == {
        "prepare": 2.0,
        "forward": 32.0,
        "sample": 2.0,
        "idle, with requests there": 3.0,
    }


@pytest.mark.parametrize("has_router", [True, False])
def test_what_a_prefill_host_computes_is_part_of_the_request(
    tmp_path: Path, has_router: bool
) -> None:
    router = ScriptedProcess("router", "r")
    hosts = {}
    for number, name in enumerate(("prefill", "decode")):
        front = ScriptedProcess("frontend", f"f{number}", host=name, run=name)
        engine = ScriptedProcess(
            "engine dp0", f"e{number}", host=name, run=name, parent_uid=f"f{number}"
        )
        hosts[name] = front, engine
    part = "request one/prefill0#2"
    for front, row in (
        (hosts["prefill"][0], part),
        (hosts["decode"][0], "request one"),
        (router, "request one"),
    ):
        tokens, end = (1, 8.0) if row == part else (4, 20.0)
        figures = {"output_tokens": tokens, "finish_reason": "length"}
        front.spans(
            front.open_row(row),
            ("prepare", 0.0, 1.0),
            ("first token", 1.0, 8.0),
            ("request", 0.0, end),
            **figures,
        )
    engine = hosts["prefill"][1]
    engine.spans(
        engine.open_row(part),
        ("queued", 1.0, 2.0),
        ("prefill", 2.0, 7.0),
        ("request", 1.0, 7.0),
        finish_reason="length",
    )
    engine = hosts["decode"][1]
    waits = ("queued", 1.0, 1.5), ("waiting for KV", 1.5, 7.5)
    engine.spans(
        engine.open_row("request one"),
        *waits,
        ("decode", 7.5, 19.5),
        ("request", 1.0, 19.5),
        finish_reason="length",
    )
    processes = [*hosts["prefill"], *hosts["decode"], *([router] if has_router else [])]
    for process in processes:
        process.clock_id = "one"
    request = only(report(tmp_path, processes))
    assert (request.request, request.output_tokens, request.end_to_end) == ("one", 4, 0.02)
    assert milliseconds(request.parts) == {
        "HTTP, prepare": 1.0,
        "queued": 1.0,
        "waiting for KV": 0.5,
        "prefill": 5.0,
        "decode": 12.0,
        "between processes": 0.5,
    }
    assert write_chrome_trace(load_trace(tmp_path), tmp_path / "all.json") == 1


def test_a_step_behind_another_is_not_ipc(tmp_path: Path) -> None:
    frontend, engine, worker = serve([])
    (first, second) = (engine.open_row(f"steps {number}") for number in (2, 3))
    engine.span("step", 0.0, 10.0, first, step=0, rows=[], tokens=[])
    engine.span("step", 1.0, 20.0, second, step=1, rows=[], tokens=[])
    worker.span("step", 1.0, 9.0, step=0, tokens=1, seqs=1, context_tokens=1)
    worker.span("step", 10.0, 19.0, step=1, tokens=1, seqs=1, context_tokens=1)
    (found,) = report(tmp_path, [frontend, engine, worker]).engines
    assert milliseconds(found.steps) == {
        "in the worker": 17.0,
        "behind other steps": 8.0,
        "IPC": 4.0,
    }


def test_a_wait_for_the_stage_before_is_no_work(tmp_path: Path) -> None:
    frontend, engine, _ = serve([])
    stages = [ScriptedProcess(f"worker dp0 tp0 pp{number}", f"w{number}") for number in range(2)]
    for stage in stages:
        stage.compare_clock(engine)
    first, second = stages
    row = engine.open_row("steps 0")
    engine.span("step", 0.0, 10.0, row, step=0, rows=[], tokens=[])
    first.span("step", 1.0, 5.0, step=0, tokens=1, seqs=1, context_tokens=1)
    first.span("forward", 1.0, 5.0)
    second.span("step", 0.5, 9.0, step=0, tokens=1, seqs=1, context_tokens=1)
    second.span("await stage", 0.5, 5.5)
    second.span("forward", 5.5, 9.0)
    found = report(tmp_path, [frontend, engine, *stages])
    (reported,) = found.engines
    assert milliseconds(reported.steps) == {"in the worker": 7.5, "IPC": 2.5}
    assert milliseconds(found.workers[1].parts) == {"forward": 3.5, "await stage": 5.0}
    times = {it.name: it for it in found.percentiles}["step, in the worker"]
    assert (times.p50, times.p99) == (pytest.approx(0.0035), pytest.approx(0.004))


@pytest.mark.parametrize("mark", ["cut", "lost"])
def test_steps_without_an_end_do_not_count(tmp_path: Path, mark: str) -> None:
    frontend, engine, worker = serve([ALONE])
    row = engine.open_row("steps 2")
    engine.span("step", 41.0, 900.0, row, step=4, rows=[], tokens=[], **{mark: True})
    found = report(tmp_path, [frontend, engine, worker])
    (reported,) = found.engines
    assert reported.num_steps == 4
    assert milliseconds(reported.steps) == {"in the worker": 36.0, "IPC": 2.4}
    times = {it.name: it for it in found.percentiles}["step, in the engine"]
    assert (times.count, times.p99) == (4, pytest.approx(0.0096))


def test_forward_passes_are_held_against_what_they_had_to_read(tmp_path: Path) -> None:
    (worker,) = report(tmp_path, serve([ALONE])).workers
    decode, prompts = worker.forwards
    assert (decode.steps, decode.count, decode.tokens) == ("decode", 3, 3)
    assert (prompts.steps, prompts.count, prompts.tokens) == ("with prompts", 1, 64)
    context = 2 + 3 + 4
    num_bytes = 3 * MODEL["weight_bytes"] + context * MODEL["kv_bytes_per_token"]
    assert decode.bytes_per_s == pytest.approx(num_bytes / 0.024)
    assert prompts.flops_per_s == pytest.approx(64 * MODEL["flops_per_token"] / 0.008)
    linear, *others = worker.operations
    assert (linear.kind, linear.share) == ("linear", pytest.approx(0.5))
    assert linear.bytes_per_s == pytest.approx(4 * 6_000_000 / 0.016)
    assert linear.flops_per_s == pytest.approx(67 * 6_000_000 / 0.016)
    assert {it.kind for it in others} == {"attention", "norm", "embedding"}


def computed(
    directory: Path,
    model: Mapping[str, float],
    operations: Mapping[str, list[Any]],
    *batches: tuple[int, int],
) -> WorkerReport:
    """The report of a worker with a step for each batch (tokens, sequences); an operation takes 1 ms."""
    worker = ScriptedProcess("worker dp0 tp0 pp0", "w")
    worker.describe("model", model)
    worker.describe("forward_ops", operations)
    durations = {"ops_ns": [MS] * len(operations["names"])} if operations else {}
    for number, (tokens, seqs) in enumerate(batches):
        at = 10 * number
        worker.span("step", at, at + 5, step=number, tokens=tokens, seqs=seqs, context_tokens=0)
        worker.span("forward", at, at + 2, **durations)
        worker.span("sample", at + 2, at + 4)
    found = report(directory, [worker])
    assert found.seconds == pytest.approx((at + 5) / 1e3), "the last span to begin ends earlier"
    return found.workers[0]


def test_operations_of_one_name_have_costs_of_their_own(tmp_path: Path) -> None:
    """The parts of a map whose weights are held in several formats."""
    operations = {
        "names": ["qkv", "qkv"],
        "kinds": ["linear", "linear"],
        "weight_bytes": [1_000_000, 3_000_000],
        "flops_per_token": [10, 30],
    }
    model = {"weight_bytes": 4_000_000, "flops_per_token": 40}
    found = computed(tmp_path, model, operations, (1, 1))
    (linear,), (forward,) = found.operations, found.forwards
    assert linear.bytes_per_s == forward.bytes_per_s == pytest.approx(2e9)
    assert linear.flops_per_s == forward.flops_per_s == pytest.approx(40 / 0.002)


def test_where_operations_are_not_described_the_forward_pass_counts_alone(tmp_path: Path) -> None:
    """Sampling reads the head, which is not among the weights that are told of."""
    (forward,) = computed(tmp_path, MODEL, {}, (1, 1)).forwards
    assert forward.bytes_per_s == pytest.approx(MODEL["weight_bytes"] / 0.002)


def test_no_more_experts_are_read_than_tokens_choose(tmp_path: Path) -> None:
    operations = {
        "names": ["qkv", "experts"],
        "kinds": ["linear", "experts"],
        "weight_bytes": [1_000_000, 8_000_000],
        "flops_per_token": [0, 0],
    }
    experts = {"expert_bytes": 8_000_000, "experts_held": 8, "experts_per_token": 2}
    model = {"weight_bytes": 9_000_000, **experts}
    found = computed(tmp_path, model, operations, (1, 1), (3, 3), (64, 3))
    by_kind = {it.kind: it.bytes_per_s for it in found.operations}
    assert by_kind["linear"] == pytest.approx(1e9)
    assert by_kind["experts"] == pytest.approx((2 + 6 + 8) * 1e6 / 0.003)
    decode, prompts = found.forwards
    assert decode.bytes_per_s == pytest.approx((3 + 7) * 1e6 / 0.004)
    assert prompts.bytes_per_s == pytest.approx(9e6 / 0.002)


def test_percentiles_are_times_that_were_measured_and_the_slowest_come_first(
    tmp_path: Path,
) -> None:
    lives = [Life(f"r{number:02}", number * 1000.0, 4, 1 + number) for number in range(20)]
    found = report(tmp_path, serve(lives))
    assert len(found.requests) == 20
    assert [it.request for it in found.slowest] == [f"r{number}" for number in range(19, 9, -1)]
    times = {it.name: it for it in found.percentiles}
    first, whole = times["time to first token"], times["end to end"]
    assert (first.count, first.p50, first.p99) == (20, pytest.approx(0.014), pytest.approx(0.014))
    assert (whole.p50, whole.p90) == (pytest.approx(0.104), pytest.approx(0.184))
    assert times["time per output token"].count == 19
    assert times["step, in the worker"].p99 == pytest.approx(0.009)
    assert "between tokens" not in times


def test_tokens_are_timed_where_they_were_traced(tmp_path: Path) -> None:
    """The first one has no span of its own: it is where another ends, at 14 ms."""
    processes = serve([ALONE])
    for number in range(1, 4):
        processes[0].span("token", 14.0 + 5 * number, 14.5 + 5 * number, 1)
    found = {it.name: it for it in report(tmp_path, processes).percentiles}["between tokens"]
    assert (found.count, found.p50, found.p99) == (3, pytest.approx(0.005), pytest.approx(0.0055))


def test_a_request_that_ran_before_the_trace_and_after_it_is_told_of_as_it_was_seen(
    tmp_path: Path,
) -> None:
    frontend, engine = processes = _traced_late()
    row = engine.open_row("request one")
    engine.spans(row, ("decode", 1000, 1999), ("request", 1000, 1999), **FIGURES)
    steps = engine.open_row("steps 0")
    for number in range(9):
        at = 1000.0 + 111 * number
        engine.span("step", at, at + 111, steps, step=number, rows=[row], tokens=[1])
    frontend.spans(
        frontend.open_row("request one"),
        ("prepare", 0, 2),
        ("first token", 2, 20),
        ("stream", 20, 2000),
        *(("token", at - 1, at) for at in (1111, 1222)),
        ("request", 0, 2000),
        **ENDED,
    )
    found = report(tmp_path, processes)
    request = only(found)
    assert milliseconds(request.parts) == {
        "HTTP, prepare": 2.0,
        "before the trace": 998.0,
        "decode": 999.0,
        "after the trace": 1.0,
    }
    assert request.reasons == ("9 tokens took 111 ms each", "ran for 998 ms before the trace began")
    assert [it.name for it in request.phases] == ["before the trace", "decode"]
    times = {it.name: it for it in found.percentiles}
    assert times["end to end"].p50 == pytest.approx(2.0)
    assert times["time to first token"].p50 == pytest.approx(0.02)
    assert times["between tokens"].count == 1
    assert "in the queue" not in times


def test_a_request_that_still_runs_has_no_end(tmp_path: Path) -> None:
    frontend, engine = processes = _traced_late()
    row, top = engine.open_row("request one"), frontend.open_row("request one")
    phases = ("queued", 1003, 1010), ("prefill", 1010, 1500)
    engine.spans(row, *phases, ("request", 1003, 1500), **FIGURES)
    phases = ("prepare", 1001, 1002), ("waiting", 1002, 1600)
    frontend.spans(top, *phases, ("request", 1001, 1600), **FIGURES)
    found = report(tmp_path, processes)
    assert only(found).is_running
    assert only(found).first_token is None
    assert milliseconds(only(found).parts) == {
        "HTTP, prepare": 1.0,
        "queued": 7.0,
        "prefill": 490.0,
        "between processes": 1.0,
        "after the trace": 100.0,
    }
    assert found.slowest == ()
    times = {it.name: it.count for it in found.percentiles}
    assert times == {"in the queue": 1}
    tables = tables_of(found, Roofline())
    assert tables[0].title == "1 requests, 1 of them still running"


FIGURES = {"request": "one", "prompt_tokens": 8, "cached_tokens": 0, "output_tokens": 200}
ENDED = {**FIGURES, "finish_reason": "length"}


def _traced_late() -> tuple[ScriptedProcess, ScriptedProcess]:
    """A frontend and an engine, of which a trace began after a second."""
    frontend = ScriptedProcess("frontend", "f", began_ms=999)
    engine = ScriptedProcess("engine dp0", "e", began_ms=1000)
    engine.compare_clock(frontend)
    return frontend, engine


@pytest.mark.parametrize(
    ("phases", "preemptions", "expected"),
    [
        (
            ("decode", "preempted", "waiting for KV", "queued", "prefill", "decode"),
            1,
            "preempted once: 30 ms until it ran again, 10 ms to compute again",
        ),
        (
            ("preempted", "prefill", "decode", "preempted", "prefill", "preempted", "prefill"),
            2,
            "preempted twice: 30 ms until it ran again, 30 ms to compute again",
        ),
        (
            ("decode", "recovering", "waiting for KV", "recovering", "prefill", "decode"),
            0,
            "a worker was lost once: 30 ms until it ran again, 10 ms to compute again",
        ),
        (
            ("decode", "recovering", "queued", "prefill", "recovering", "decode"),
            0,
            "a worker was lost twice: 30 ms until it ran again, 10 ms to compute again",
        ),
        (("preempted", "decode"), 0, "preempted once: 10 ms until it ran again, 0 µs to compute"),
    ],
)
def test_interruptions_are_counted_once(
    tmp_path: Path, phases: tuple[str, ...], preemptions: int, expected: str
) -> None:
    """Each phase takes 10 ms. Waits for KV and in the queue are part of what they came with."""
    frontend, engine = ScriptedProcess("frontend", "f"), ScriptedProcess("engine dp0", "e")
    engine.compare_clock(frontend)
    row, top = engine.open_row("request one"), frontend.open_row("request one")
    whole = ("request", 0, 10 * len(phases))
    told = ((name, 10 * number, 10 * number + 10) for number, name in enumerate(phases))
    engine.spans(row, *told, whole, **ENDED, preemptions=preemptions)
    frontend.spans(top, whole, **ENDED)
    reasons = only(report(tmp_path, [frontend, engine])).reasons
    (reason,) = (it for it in reasons if it.startswith(("preempted", "a worker")))
    assert reason.startswith(expected)


@pytest.mark.parametrize(
    ("life", "expected"),
    [
        (ALONE, "4 tokens took 9.6 ms each"),
        (Life("one", 0, 64, 4, waits=1200), "waited 1.2 s in the queue"),
        (Life("one", 0, 4096, 2), "4,096 prompt tokens took 9.6 ms to compute"),
    ],
)
def test_reasons_are_what_took_long(tmp_path: Path, life: Life, expected: str) -> None:
    assert expected in only(report(tmp_path, serve([life]))).reasons


def test_prompts_of_others_in_its_steps_are_a_reason(tmp_path: Path) -> None:
    frontend, engine, worker = serve([ALONE])
    for line in engine.lines:
        if line.get("name") == "step" and line["args"]["step"] in (1, 2):
            line["args"]["rows"].append(99)
            line["args"]["tokens"].append(2048)
    request = only(report(tmp_path, [frontend, engine, worker]))
    assert "shared steps of 19.2 ms with prompts of 4,096 tokens" in request.reasons


def test_a_request_of_which_a_part_was_seen_is_left_out(tmp_path: Path) -> None:
    frontend, engine, worker = serve([ALONE])
    frontend.lines = [line for line in frontend.lines if line.get("name") != "request"]
    found = report(tmp_path, [frontend, engine, worker])
    assert (found.requests, found.slowest, found.parts) == ((), (), ())
    assert found.engines[0].num_steps == 4


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (None, "cannot be read"),
        (b"\x1f\x8b\x08\x00", "cannot be read"),
        *((data, "no trace that") for data in (b"", b"[]", b'{"traceEvents": [')),
        (b'{"traceEvents": []}', "no trace that `pagoda trace merge` made"),
    ],
)
def test_other_files_are_a_sentence(tmp_path: Path, data: bytes | None, sentence: str) -> None:
    path = tmp_path / "trace.json"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ConfigError, match=sentence):
        load_trace(path)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_that_is_cut_off_is_refused_wherever_it_ends(tmp_path: Path, name: str) -> None:
    for process in serve([ALONE]):
        process.write(tmp_path)
    path = tmp_path / name
    write_chrome_trace(load_trace(tmp_path), path)
    data = path.read_bytes()
    line_ends = [at + 1 for at, byte in enumerate(data[:-1]) if byte == ord("\n")]
    for end in (*line_ends, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:end])
        with pytest.raises(ConfigError, match=r"cannot be read|no trace that `pagoda trace merge`"):
            load_trace(path)


def test_times_have_the_unit_that_people_would_take() -> None:
    told = [seconds(value) for value in (0, 0.00012, 0.0042, 0.25, 1.24, 125)]
    assert told == ["0 µs", "120 µs", "4.2 ms", "250 ms", "1.2 s", "125 s"]


Intervals = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda it: tuple(sorted(it)))
)


@given(Intervals, st.integers(0, 50), st.integers(0, 50))
def test_intervals_are_sets_of_moments(
    intervals: list[tuple[int, int]], start: int, end: int
) -> None:
    moments = {at for begin, stop in intervals for at in range(begin, stop)}
    together = union(intervals)
    assert length(together) == len(moments)
    assert covered(together, start, end) == len(moments & set(range(start, end)))
    left = [*without((start, end), within(together, start, end))] if start < end else []
    assert {at for begin, stop in left for at in range(begin, stop)} == (
        set(range(start, end)) - moments
    )
