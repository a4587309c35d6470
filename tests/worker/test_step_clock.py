"""The phases of a step add up to it, in its result and in traces."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from pagoda.telemetry.tracer import TraceLevel, Tracer, TraceSession
from pagoda.worker.step_clock import StepClock, StepTimes


def test_a_phase_that_comes_again_adds_up(tmp_path: Path) -> None:
    ticks = itertools.count(1_000_000_000, 1_000_000_000)
    tracer = Tracer("worker", clock_ns=lambda: next(ticks))
    clock = StepClock(tracer)
    tracer.start(TraceSession(level=TraceLevel.E2E, directory=str(tmp_path), run="run"))
    clock.start()
    for phase in ("prepare", "forward", "prepare", "forward", "sample"):
        clock.ended(phase)
    tracer.stop()
    assert clock.times == StepTimes(2.0, 2.0, 1.0)
    assert clock.times.total == 5.0
    clock.start()
    clock.ended("prepare")
    assert clock.times == StepTimes(1.0)
    (fragment,) = tmp_path.iterdir()
    events = [json.loads(line) for line in fragment.read_bytes().splitlines()]
    spans = [(e["name"], e["ts"], e["dur"]) for e in events if e.get("ph") == "X"]
    began = spans[0][1]
    assert [(name, (ts - began) / 1e6, dur / 1e6) for name, ts, dur in spans] == [
        ("prepare", 0, 1),
        ("prepare", 2, 1),
        ("sample", 4, 1),
    ]


def test_stages_add_up() -> None:
    assert StepTimes(1, 2, 3).behind(StepTimes(10, 20)) == StepTimes(11, 22, 3)
