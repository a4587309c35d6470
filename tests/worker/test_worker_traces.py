# SPDX-License-Identifier: Apache-2.0
"""Traces of a worker's steps."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from driver import Driver
from replica import Replica, new_executor, next_event
from tiny_models import save_model

from pagoda.backend.cpu.native import choose_instruction_set
from pagoda.devices import BackendUnavailableError
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.spans import embedded_span
from pagoda.messages.tracing import TraceStopped
from pagoda.messages.worker import WorkerReady
from pagoda.messages.worker_config import WorkerConfig
from pagoda.parallel.config import ParallelConfig
from pagoda.telemetry.tracer import TraceLevel, Tracer, TraceSession
from pagoda.worker.loading import LoadedWorker, load_runner, plan_worker

SAMPLED = SamplingParams(temperature=1.0, seed=1, max_tokens=100)


def _has_kernels() -> bool:
    try:
        choose_instruction_set()
    except BackendUnavailableError:
        return False
    return True


needs_kernels = pytest.mark.skipif(not _has_kernels(), reason="the kernels are not built")
BACKENDS = [pytest.param("cpu", marks=needs_kernels), "reference"]


@dataclass
class _Span:
    name: str
    began: float
    ended: float
    args: dict[str, Any]

    def has(self, other: _Span) -> bool:
        return self.began <= other.began and other.ended <= self.ended


class _Traced:
    """A worker that traces into a directory."""

    def __init__(self, directory: Path, model: str, backend: str, level: TraceLevel) -> None:
        save_model(model, directory / "model")
        self._fragments = directory / "fragments"
        self._fragments.mkdir()
        self.tracer = Tracer("worker dp0 tp0 pp0")
        session = TraceSession(level=level, directory=str(self._fragments), run="run")
        self.tracer.start(session)
        config = WorkerConfig(
            model=str(directory / "model"),
            backend=backend,
            num_blocks=512,
            max_num_seqs=4,
            num_threads=1,
        )
        self.loaded: LoadedWorker = load_runner(plan_worker(config), self.tracer)
        self.loaded.describe(self.tracer)
        self.driver = Driver(self.loaded.runner)  # type: ignore[arg-type]

    def events(self) -> list[dict[str, Any]]:
        self.tracer.stop()
        (fragment,) = self._fragments.iterdir()
        return _read(fragment)


def _read(fragment: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in fragment.read_bytes().splitlines()]


def _spans(events: list[dict[str, Any]]) -> list[_Span]:
    return [
        _Span(e["name"], e["ts"], e["ts"] + e["dur"], e.get("args", {}))
        for e in events
        if e.get("ph") == "X"
    ]


def _named(spans: list[_Span], name: str) -> list[_Span]:
    return [span for span in spans if span.name == name]


def _described(events: list[dict[str, Any]], name: str) -> dict[str, Any]:
    found: dict[str, Any]
    (found,) = [e["args"] for e in events if e.get("ph") == "M" and e["name"] == name]
    return found


def _run(traced: _Traced) -> list[dict[str, Any]]:
    traced.driver.start(0, [3, 4, 5])
    traced.driver.start(1, [6, 7], SAMPLED)
    traced.driver.step({0: 3, 1: 2})
    traced.driver.step({0: 1, 1: 1})
    return traced.events()


@pytest.mark.parametrize("backend", BACKENDS)
def test_phases_of_a_step_follow_one_another(tmp_path: Path, backend: str) -> None:
    events = _run(_Traced(tmp_path, "qwen3", backend, TraceLevel.E2E))
    spans = _spans(events)
    steps = [span for span in spans if span.name in ("prepare", "forward", "sample")]
    assert [span.name for span in steps] == ["prepare", "forward", "sample"] * 2
    for before, after in pairwise(steps):
        assert before.ended <= after.began
    assert not any(span.args for span in steps)
    assert {span.name for span in spans if span not in steps} == {
        "allocate kv cache",
        "load weights",
        "pack weights",
        "compile",
        "profile",
    }


@needs_kernels
@pytest.mark.parametrize("model", ["qwen3", "mixtral", "qwen3-moe-mixed"])
def test_a_recorded_pass_tells_the_time_of_each_operation(tmp_path: Path, model: str) -> None:
    events = _run(_Traced(tmp_path, model, "cpu", TraceLevel.KERNEL))
    operations, spans = _described(events, "forward_ops"), _spans(events)
    names = operations["names"]
    assert names[:5] == ["plan", "rotary", "embedding", "layers.0.attention_norm", "layers.0.qkv"]
    assert names[-1] == "norm"
    assert ("layers.1.experts" in names) == (model == "mixtral")
    assert ("layers.1.down" in names) == (model != "mixtral")
    for span in _named(spans, "forward"):
        times = span.args["ops_ns"]
        assert len(times) == len(names)
        assert 0 < sum(times) <= (span.ended - span.began) * 1000
    assert all(len(told) == len(names) for told in operations.values())
    costs = _described(events, "model")
    assert costs["flops_per_token"] == sum(operations["flops_per_token"])
    assert costs["weight_bytes"] > costs["expert_bytes"]
    described = zip(operations["kinds"], operations["weight_bytes"], strict=True)
    in_experts = sum(num_bytes for kind, num_bytes in described if kind == "experts")
    assert (costs["expert_bytes"] > 0) == (in_experts > 0) == (model != "qwen3")
    assert costs["expert_bytes"] <= in_experts  # which may be padded
    assert (costs["experts_held"] >= costs["experts_per_token"] > 0) == (model != "qwen3")
    if model == "qwen3":  # others have maps whose panels are padded
        assert costs["weight_bytes"] == sum(operations["weight_bytes"])


@needs_kernels
def test_steps_with_embedded_spans_tell_no_times_of_operations_of_others(tmp_path: Path) -> None:
    traced = _Traced(tmp_path, "qwen3", "cpu", TraceLevel.KERNEL)
    hidden_size = traced.loaded.ready.hidden_size
    vectors = array("f", [0.5] * 2 * hidden_size).tobytes()
    traced.driver.start(0, [3, 4, 5], spans=(embedded_span(1, 2, vectors),))
    traced.driver.step({0: 3})
    traced.driver.step({0: 1})
    events = traced.events()
    first, second = _named(_spans(events), "forward")
    assert "ops_ns" not in first.args
    assert len(second.args["ops_ns"]) == len(_described(events, "forward_ops")["names"])


def test_operations_of_a_direct_pass_are_spans(tmp_path: Path) -> None:
    events = _run(_Traced(tmp_path, "mixtral", "reference", TraceLevel.KERNEL))
    spans = _spans(events)
    assert not any(e.get("name") == "forward_ops" for e in events)
    first, _ = _named(spans, "forward")
    inside = [span for span in spans if span is not first and first.has(span)]
    assert [span.name for span in inside if span.name.startswith("layers.0.")] == [
        f"layers.0.{name}"
        for name in (
            "attention_norm",
            "qkv",
            "rotary",
            "attention",
            "attention_out",
            "add",
            "mlp_norm",
            "router",
            "experts",
            "add",
        )
    ]
    assert inside[-1].name == "plan"  # told last, begun first
    inside.sort(key=lambda span: span.began)
    assert [span.name for span in inside[:2]] == ["plan", "embedding"]
    for before, after in pairwise(inside):
        assert before.ended <= after.began
    assert all(span.args["kind"] for span in inside)


@pytest.mark.parametrize("backend", BACKENDS)
def test_workers_trace_from_their_start_until_they_are_told(tmp_path: Path, backend: str) -> None:
    save_model("qwen3", tmp_path / "model")
    session = TraceSession(level=TraceLevel.E2E, directory=str(tmp_path / "fragments"), run="run")
    config = WorkerConfig(
        model=str(tmp_path / "model"),
        backend=backend,
        num_blocks=32,
        num_threads=1,
        parallel=ParallelConfig(pipeline_parallel_size=2),
        trace=session,
    )
    executor = new_executor(config, tmp_path)
    try:
        executor.start()
        ready = next_event(executor)
        assert isinstance(ready, WorkerReady)
        replica = Replica(executor, ready, generation=0)
        replica.answer([3, 4, 5, 6], [0])
        replica.answer([7, 8], [1])
        executor.stop_trace()
        assert next_event(executor) == TraceStopped()
        replica.answer([9], [2])  # is not traced
    finally:
        executor.close()
    fragments = sorted((tmp_path / "fragments").iterdir())
    assert [path.name.split(".")[1] for path in fragments] == [
        "worker-dp0-tp0-pp0",
        "worker-dp0-tp0-pp1",
    ]
    for stage, path in enumerate(fragments):
        events = _read(path)
        assert _described(events, "model")["weight_bytes"] > 0
        spans = _spans(events)
        assert {"import torch", "meet peers", "load weights"} <= {span.name for span in spans}
        steps = _named(spans, "step")
        assert [step.args for step in steps] == [
            {"step": 0, "tokens": 4, "seqs": 1, "context_tokens": 4},
            {"step": 1, "tokens": 2, "seqs": 1, "context_tokens": 2},
        ]
        phases = (["prepare", "forward"], ["prepare", "await stage", "forward", "sample"])[stage]
        for step in steps:
            inside = [span for span in spans if span is not step and step.has(span)]
            assert [span.name for span in inside] == phases
            for before, after in pairwise(inside):
                assert before.ended <= after.began


@pytest.mark.parametrize("backend", BACKENDS)
def test_sampling_is_told_in_parts(tmp_path: Path, backend: str) -> None:
    spans = _spans(_run(_Traced(tmp_path, "qwen3", backend, TraceLevel.KERNEL)))
    for sample in _named(spans, "sample"):
        parts = [span for span in spans if span is not sample and sample.has(span)]
        assert [(span.name, span.args) for span in parts] == [
            (name, {"rows": 1}) for name in ("argmax", "logits", "sampler")
        ]


def test_steps_that_are_not_traced_tell_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = _Traced(tmp_path, "llama", "reference", TraceLevel.E2E)
    traced.tracer.stop()
    told: list[str] = []
    monkeypatch.setattr(traced.tracer, "span", lambda name, *_, **__: told.append(name))
    _run(traced)
    assert told == []
