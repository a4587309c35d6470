"""Lives of whole fleets: no seed breaks an invariant, each repeats byte for byte, and the rig sees faults."""

from __future__ import annotations

import pytest

from benchmarks.chaos.simulation import SIMULATION
from benchmarks.simulation.seeds.draw import Kind, draw
from benchmarks.simulation.seeds.life import live
from benchmarks.simulation.seeds.runner import live_all
from pagoda.engine.scheduler import Scheduler
from pagoda.kv.block_pool import BlockPool


@pytest.mark.parametrize("first", range(1000, 1300, 100))
def test_seeds(first: int) -> None:
    summary = live_all(first, 100)
    assert [(verdict.seed, verdict.problem) for verdict in summary.broken] == []


def test_the_short_trial_holds() -> None:
    assert SIMULATION.run(True).holds


def test_the_seeds_meet_every_fault_and_every_ending() -> None:
    kinds = {fault.kind for seed in range(300) for fault in draw(seed).faults}
    assert kinds == set(Kind)
    met = live_all(2000, 60).met
    endings = {f"answers: {it}" for it in ("ended", "refused", "cancelled", "lost", "left")}
    assert endings - met.keys() == set()
    assert met["preemptions"] > 0
    assert met["deaths"] > 0


def test_a_log_tells_the_plan_every_message_and_the_verdict() -> None:
    log = live(draw(2), logs=True).log
    assert "seed 2:" in log[0]
    assert any("<- generate" in line for line in log)
    assert any("-> chunks" in line for line in log)
    assert log[-1] == "the end: nothing is broken"


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (Scheduler, "abort", lambda *_: False),
        (BlockPool, "check", lambda *_: (_ for _ in ()).throw(ValueError("It is broken."))),
    ],
)
def test_what_breaks_is_found(
    owner: type, name: str, broken: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, broken)
    assert any(live(draw(seed)).problem for seed in range(40))
