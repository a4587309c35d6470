# SPDX-License-Identifier: Apache-2.0
"""Lives of whole fleets: no seed breaks an invariant, each repeats byte for byte, and the rig sees faults."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.chaos.simulation import SIMULATION
from benchmarks.simulation.seeds.draw import Kind, draw
from benchmarks.simulation.seeds.life import live
from benchmarks.simulation.seeds.runner import live_all
from pagoda.engine.scheduler import Scheduler
from pagoda.fleet.token_stream import TokenStream
from pagoda.kv.block_table import BlockTable
from pagoda.kv.manager import KVManager
from pagoda.messages.frontend import TokenChunk


@pytest.mark.parametrize("first", range(1000, 1300, 100))
def test_seeds(first: int) -> None:
    summary = live_all(first, 100)
    assert [(verdict.seed, verdict.problem) for verdict in summary.broken] == []


@pytest.mark.parametrize("seed", [31965, 36852, 67743, 73438, 80984, 90268, 93689])
def test_seeds_that_broke_once(seed: int) -> None:
    """36852: blocks that came to host memory put each other out, and came again, without end.

    67743: so did those of two prompts, and the one with priority made others give way each time, but never found
    its KV in host memory. The checks of the others were wrong: fair shares spare requests behind the preempted
    one, KV that could not be loaded in the very end failed a request, as it was told to, and a request that gave
    its place to a lighter tenant found its own KV when it was asked again. In 31965 the rig told a router that was
    starting nothing of hosts that came and went.
    """
    assert live(draw(seed)).problem == ""


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
    assert met["cold segments"] > 0
    assert met["drafts"] > met["right drafts"] > 20


def test_a_log_tells_the_plan_every_message_and_the_verdict() -> None:
    log = live(draw(2), logs=True).log
    assert "seed 2:" in log[0]
    assert any("<- generate" in line for line in log)
    assert any("-> chunks" in line for line in log)
    assert log[-1] == "the end: nothing is broken"


def _without_adapters(new_table: Callable[..., BlockTable]) -> Callable[..., BlockTable]:
    return lambda kv, salt, _adapter="": new_table(kv, salt)


def _twice(push: Callable[..., None]) -> Callable[..., None]:
    def push_twice(stream: TokenStream, chunk: TokenChunk) -> None:
        push(stream, chunk)
        push(stream, chunk)

    return push_twice


def _not_at_all(_: Callable[..., object]) -> Callable[..., object]:
    return lambda *_: False


@pytest.mark.parametrize(
    ("owner", "name", "breaks"),
    [
        (KVManager, "new_table", _without_adapters),
        (TokenStream, "push", _twice),
        (Scheduler, "abort", _not_at_all),
    ],
)
def test_what_is_broken_on_purpose_is_found(
    owner: type, name: str, breaks: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, breaks(getattr(owner, name)))
    assert any(live(draw(seed)).problem for seed in range(60))
