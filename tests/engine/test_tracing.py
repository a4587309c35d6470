# SPDX-License-Identifier: Apache-2.0
"""Events that an engine writes of its steps and requests, in virtual time."""

from __future__ import annotations

import random
import select
import tempfile
import threading
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from fragment_files import Fragment, assert_nested, end_of, phases_of, read_fragments
from harness import Harness, assert_complete, make_request
from hypothesis import given, settings
from hypothesis import strategies as st
from mortal_executor import MortalExecutor, random_request, speaking
from trace_writers import TraceWriters

from pagoda.engine.canary import CANARY_ID
from pagoda.executor.base import WorkerLost
from pagoda.messages.engine_config import KVTiersConfig
from pagoda.messages.tracing import StartTrace, TraceStopped
from pagoda.telemetry.tracer import TraceLevel, TraceSession


def trace(directory: Path, num_steps: int | None = None, number: int = 1) -> StartTrace:
    session = TraceSession(level=TraceLevel.E2E, directory=str(directory), run="serve-1")
    return StartTrace(session, num_steps, number)


def stop(harness: Harness) -> TraceStopped:
    harness.core.stop_trace()
    harness.step()
    return end_of_trace(harness)


def end_of_trace(harness: Harness) -> TraceStopped:
    """Waits for the disk."""
    end = None
    while end is None:  # what is said of an earlier trace wakes as well
        assert select.select(harness.core.pollables(), [], [], 20)[0]
        end = harness.core.drain_trace_end()
    assert harness.core.drain_trace_end() is None
    assert harness.core.pollables() == []
    return end


def stopped(harness: Harness, directory: Path) -> Fragment:
    stop(harness)
    return only(directory)


def only(directory: Path) -> Fragment:
    (fragment,) = read_fragments(directory)
    assert_nested(fragment)
    return fragment


def test_a_request_has_a_row_of_what_it_waits_for_and_does(tmp_path: Path) -> None:
    harness = Harness(max_num_seqs=1, trace=trace(tmp_path))
    for name in ("first", "second"):
        harness.add(make_request(name, [1, 2, 3], max_tokens=4))
    harness.run()
    assert stop(harness) == TraceStopped([], 1)
    fragment = only(tmp_path)
    assert fragment.header.role == "engine dp0"
    for name in ("first", "second"):
        assert phases_of(fragment, name) == ["queued", "prefill", "decode"]
    first, second = (fragment.request(name) for name in ("first", "second"))
    assert first[-1]["args"] == {
        "request": "first", "prompt_tokens": 3, "cached_tokens": 0, "output_tokens": 4,
        "preemptions": 0, "finish_reason": "length",
    }  # fmt: skip
    assert end_of(second[0]) >= end_of(first[-1])  # it waited as long as the first ran
    assert second[0]["dur"] > 0


def test_steps_name_the_rows_of_their_requests(tmp_path: Path) -> None:
    harness = Harness(trace=trace(tmp_path))
    requests = [make_request(f"r{i}", [i, 1, 2, 3], max_tokens=5) for i in range(3)]
    harness.serve(*requests)
    fragment = stopped(harness, tmp_path)
    steps = fragment.named("step")
    assert [step["args"]["step"] for step in steps] == list(range(len(steps)))
    given_to: Counter[str] = Counter()
    for step in steps:
        assert fragment.rows[step["tid"]] == f"steps {step['args']['step'] % 2}"
        for row, tokens in zip(step["args"]["rows"], step["args"]["tokens"], strict=True):
            given_to[fragment.rows[row]] += tokens
    # All tokens but the last one are computed.
    assert given_to == {f"request r{i}": 4 + 5 - 1 for i in range(3)}
    schedules = fragment.named("schedule")
    assert [it["args"]["step"] for it in schedules] == [it["args"]["step"] for it in steps]
    for schedule, step in zip(schedules, steps, strict=True):
        args = schedule["args"]
        assert args["tokens"] == sum(step["args"]["tokens"])
        assert args["tokens"] == args["prefill_tokens"] + args["decodes"]
    assert sum(it["args"]["prefill_tokens"] for it in schedules) == 3 * 4
    assert [it["args"]["step"] for it in fragment.named("update")] == list(range(len(steps)))
    counted = fragment.named("kv blocks")
    assert all(sum(event["args"].values()) == 64 for event in counted)
    assert counted[0]["args"] == {"used": 0, "cached": 0, "free": 64}
    assert counted[1]["args"]["used"] >= 3
    assert counted[-1]["args"] == {"used": 0, "cached": 6, "free": 58}
    *times, _ = [event["ts"] for event in fragment.named("requests")]
    assert all(later - earlier >= 50_000 for earlier, later in pairwise(times))


def test_prefix_hits_are_told_with_the_step_that_makes_them(tmp_path: Path) -> None:
    harness = Harness(trace=trace(tmp_path))
    prompt = list(range(1, 13))
    for name in ("cold", "warm"):
        harness.add(make_request(name, prompt, max_tokens=2))
        harness.run()
    fragment = stopped(harness, tmp_path)
    assert [it["args"]["hit_tokens"] for it in fragment.named("schedule")] == [0, 0, 8, 0]
    assert fragment.request("warm")[-1]["args"]["cached_tokens"] == 8


def test_a_preempted_request_computes_again(tmp_path: Path) -> None:
    harness = Harness(num_blocks=8, max_model_len=32, trace=trace(tmp_path))
    requests = [make_request(f"r{i}", [i, 1, 2, 3], max_tokens=20) for i in range(3)]
    harness.serve(*requests)
    stop(harness)
    assert_complete(harness, requests, 32)
    fragment = only(tmp_path)
    preempted = [
        event["args"]["request"] for event in fragment.named("preempted") if event["ph"] == "i"
    ]
    assert preempted
    for request in requests:
        times = preempted.count(request.request_id)
        again = ["preempted", "prefill", "decode"] * times
        assert phases_of(fragment, request.request_id) == ["queued", "prefill", "decode", *again]
        row = fragment.request(request.request_id)
        assert row[-1]["args"]["preemptions"] == times


def test_a_lost_worker_is_recovered_from(tmp_path: Path) -> None:
    harness, executor = speaking(trace=trace(tmp_path))
    request = make_request("r", [1, 2, 3], max_tokens=9)
    harness.add(request)
    harness.ticks(4)
    executor.say(WorkerLost("the worker was killed by SIGKILL"))
    harness.step()
    harness.run()
    stop(harness)
    assert_complete(harness, [request])
    fragment = only(tmp_path)
    assert phases_of(fragment, "r") == [
        "queued", "prefill", "decode", "recovering", "prefill", "decode",
    ]  # fmt: skip
    (lost,) = fragment.named("worker lost")
    assert lost["args"] == {"reason": "the worker was killed by SIGKILL"}
    assert len(fragment.named("worker ready")) == 2
    ended = [step for step in fragment.named("step") if "lost" in step["args"]]
    assert ended
    assert all(abs(end_of(step) - lost["ts"]) < 0.01 for step in ended)


def test_waiting_for_kv_of_another_tier_has_a_phase(tmp_path: Path) -> None:
    harness = Harness(
        num_blocks=16, kv_host_slots=64, kv_tiers=KVTiersConfig(host_bytes=1), trace=trace(tmp_path)
    )
    prompts = [[seed] * 32 for seed in (1, 2, 3)]
    for turn in ("first", "second"):
        for index, prompt in enumerate(prompts):
            harness.add(make_request(f"{turn} {index}", prompt, max_tokens=2))
            harness.run()
    fragment = stopped(harness, tmp_path)
    assert phases_of(fragment, "first 0") == ["queued", "prefill", "decode"]
    assert phases_of(fragment, "second 0")[-4:] == ["waiting for KV", "queued", "prefill", "decode"]


def test_an_aborted_request_has_an_end(tmp_path: Path) -> None:
    harness = Harness(max_num_seqs=1, trace=trace(tmp_path))
    for name in ("runs", "waits"):
        harness.add(make_request(name, [1, 2, 3], max_tokens=40))
    harness.ticks(4)
    for name in ("waits", "runs"):
        harness.core.abort(name)
    harness.run()
    fragment = stopped(harness, tmp_path)
    assert phases_of(fragment, "runs") == ["queued", "prefill", "decode"]
    assert phases_of(fragment, "waits") == ["queued"]
    for name in ("runs", "waits"):
        assert fragment.request(name)[-1]["args"]["finish_reason"] == "abort"


def test_it_may_begin_and_end_in_the_middle_of_requests(tmp_path: Path) -> None:
    harness = Harness(max_num_seqs=1)
    for name in ("runs", "waits"):
        harness.add(make_request(name, [1, 2, 3], max_tokens=40))
    harness.ticks(4)
    harness.core.start_trace(trace(tmp_path))
    harness.ticks(4)
    fragment = stopped(harness, tmp_path)
    assert phases_of(fragment, "runs") == ["decode"]
    assert phases_of(fragment, "waits") == ["queued"]
    assert fragment.request("runs")[-1]["args"]["finish_reason"] == ""
    cut = [step["args"].get("cut", False) for step in fragment.named("step")]
    assert cut == [False, False, True, True]  # two were under way
    harness.run()
    assert len(read_fragments(tmp_path)) == 1


def test_it_stops_by_itself_after_so_many_steps(tmp_path: Path) -> None:
    harness = Harness(trace=trace(tmp_path, num_steps=3, number=7))
    harness.add(make_request("r", [1, 2, 3], max_tokens=20))
    harness.run()
    assert end_of_trace(harness) == TraceStopped([], 7)
    whole = only(tmp_path).named("update")
    assert [update["args"]["step"] for update in whole] == [0, 1, 2]
    assert harness.tracer.session is None


def test_each_demand_to_stop_is_answered(tmp_path: Path) -> None:
    harness = Harness()
    assert stop(harness) == TraceStopped([], 0)
    harness.core.start_trace(trace(tmp_path, number=1))
    assert stop(harness) == TraceStopped([], 1)
    assert stop(harness) == TraceStopped([], 1)


def test_why_it_failed_is_told_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    harness = Harness(trace=trace(tmp_path / "taken"))
    harness.add(make_request("r", [1, 2, 3]))
    harness.run()
    (problem,) = stop(harness).problems
    assert problem.startswith("engine dp0: ")
    assert "File exists" in problem


def test_so_many_steps_end_though_nothing_can_be_written(
    tmp_path: Path, trace_writers: TraceWriters
) -> None:
    (tmp_path / "taken").write_text("")
    harness = Harness()
    harness.core.start_trace(trace(tmp_path / "taken", num_steps=1000, number=3))
    trace_writers.join()
    harness.add(make_request("r", [1, 2, 3]))
    harness.run()
    end = end_of_trace(harness)
    assert (end.number, len(end.problems)) == (3, 1)


def test_serving_does_not_wait_for_a_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: released.wait())
    harness = Harness(trace=trace(tmp_path))
    harness.core.stop_trace()
    request = make_request("r", [1, 2, 3])
    harness.serve(request)
    assert harness.core.drain_trace_end() is None
    released.set()
    assert end_of_trace(harness) == TraceStopped([], 1)


def test_a_disk_that_takes_too_long_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trace_writers: TraceWriters
) -> None:
    released = threading.Event()
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: released.wait())
    monkeypatch.setattr("pagoda.telemetry.trace_ending.CLOSING_S", 0.01)
    harness = Harness(trace=trace(tmp_path))
    (problem,) = stop(harness).problems
    released.set()
    trace_writers.join()
    assert problem.startswith("engine dp0: ")
    assert "could not be written within 0.01 s" in problem


def test_a_trace_that_begins_while_another_is_closed_has_its_own_end(
    tmp_path: Path, trace_writers: TraceWriters
) -> None:
    harness = Harness(trace=trace(tmp_path, number=1))
    harness.core.stop_trace()
    harness.step()
    harness.clock.advance_to(harness.clock.now() + 1)
    harness.core.start_trace(trace(tmp_path, number=2))
    assert harness.core.drain_trace_end() is None
    assert stop(harness) == TraceStopped([], 2)
    trace_writers.join()
    assert len(read_fragments(tmp_path)) == 2


@pytest.mark.parametrize("num_stages", [1, 2])
@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_whole_lives_nest_and_every_request_has_an_end(num_stages: int, seed: int) -> None:
    """Random arrivals, aborts, preemptions and lost workers, with tracing that comes and goes."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        writers = TraceWriters()
        seen = _live(rng, Path(directory), num_stages)
        writers.join()
        for fragment in read_fragments(Path(directory)):
            assert_nested(fragment)
            rows = [name for name in fragment.rows.values() if name.startswith("request ")]
            # The canary comes again with each worker that may not live long.
            rows = [name for name in rows if CANARY_ID not in name]
            assert len(rows) == len(set(rows))
            ends = [f"request {it['args']['request']}" for it in fragment.named("request")]
            assert sorted(name for name in ends if CANARY_ID not in name) == sorted(rows)
            for name in rows:
                phases = phases_of(fragment, name.removeprefix("request "))
                assert all(a != b for a, b in pairwise(phases))
            for step in fragment.named("step"):
                shown = {fragment.rows[row] for row in step["args"]["rows"]}
                assert shown <= {*rows, f"request {CANARY_ID}"}
            assert {name.removeprefix("request ") for name in rows} <= seen


def _live(rng: random.Random, directory: Path, num_stages: int) -> set[str]:
    """Returns the ids of all requests."""
    death_rate = rng.choice([0.0, 3.0])
    harness = Harness(
        num_blocks=12,
        max_model_len=48,
        max_num_seqs=rng.choice([1, 4]),
        max_num_batched_tokens=16,
        num_stages=num_stages,
        wrap=lambda inner, clock: MortalExecutor(inner, clock, rng, death_rate),
        trace=rng.choice([None, trace(directory)]),
    )
    requests = []
    for index in range(rng.randint(1, 12)):
        request = random_request(rng, index, 48)
        requests.append(request.request_id)
        harness.add(request)
        for _ in range(rng.choice([0, 1, 3])):
            harness.tick()
        if rng.random() < 0.2:
            harness.core.abort(rng.choice(requests))
        if rng.random() < 0.1:
            harness.core.stop_trace()
        elif rng.random() < 0.1:
            harness.core.start_trace(trace(directory, rng.choice([None, 5])))
    if rng.random() < 0.5:
        harness.run()
    harness.core.close()
    return set(requests)
