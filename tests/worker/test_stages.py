# SPDX-License-Identifier: Apache-2.0
"""Hidden states on their way from one stage to the next."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import zmq

from pagoda.ipc.curve import new_keys, start_authenticator
from pagoda.messages.worker import StepPlan
from pagoda.messages.worker_config import CurveKeys
from pagoda.telemetry.tracer import TraceLevel, Tracer, TraceSession
from pagoda.worker.stages import StageInput, StageOutput, StageState
from pagoda.worker.step_clock import StepClock, StepTimes

HIDDEN = 24


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture(params=["ipc", "tcp"])
def keys(
    request: pytest.FixtureRequest, context: zmq.Context[zmq.Socket[bytes]]
) -> CurveKeys | None:
    if request.param == "ipc":
        return None
    keys = new_keys()
    start_authenticator(context, keys)
    return keys


def make_input(
    context: zmq.Context[zmq.Socket[bytes]],
    directory: Path,
    keys: CurveKeys | None,
) -> StageInput:
    address = f"ipc://{directory / 'stage'}" if keys is None else "tcp://127.0.0.1:*"
    return StageInput(context, address, keys, hidden_size=HIDDEN)


Link = Callable[..., tuple[StageInput, StageOutput]]


@pytest.fixture
def link(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path, keys: CurveKeys | None) -> Link:
    """Makes both ends of the way from one stage to the next."""

    def make() -> tuple[StageInput, StageOutput]:
        source = make_input(context, tmp_path, keys)
        return source, StageOutput(context, source.address, keys)

    return make


def test_every_bit_arrives_in_order(link: Link) -> None:
    source, target = link()
    generator = torch.Generator().manual_seed(0)
    sent = [torch.randn(n, HIDDEN, generator=generator) for n in (1, 3, 2000)]
    for step, hidden in enumerate(sent):
        overwritten = hidden.clone()
        target.send(step, StageState(overwritten, [step, 7], StepTimes(0.25, 0.5, 1.0)))
        overwritten.zero_()
    for step, hidden in enumerate(sent):
        received = source.receive(StepPlan(step, [0], [len(hidden)]))
        assert torch.equal(received.hidden, hidden)
        assert (received.expert_tokens, received.times) == ([step, 7], StepTimes(0.25, 0.5, 1.0))


def test_rows_of_a_larger_tensor(link: Link) -> None:
    source, target = link()
    wide = torch.arange(2.0 * 3 * HIDDEN).view(3, 2 * HIDDEN)
    target.send(5, StageState(wide[:, :HIDDEN], [], StepTimes(0.5)))
    received = source.receive(StepPlan(5, [1, 2], [1, 2]))
    assert torch.equal(received.hidden, wide[:, :HIDDEN])


@pytest.mark.parametrize(
    ("step", "rows", "rule"), [(4, 2, "of step 4 came for step 3"), (3, 1, "came for the 2 tokens")]
)
def test_stages_that_disagree(link: Link, step: int, rows: int, rule: str) -> None:
    source, target = link()
    target.send(step, StageState(torch.zeros(rows, HIDDEN), [], StepTimes(0.5)))
    with pytest.raises(ValueError, match=rule):
        source.receive(StepPlan(3, [0], [2]))


def test_strangers_are_not_heard(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path) -> None:
    keys, other = new_keys(), new_keys()
    start_authenticator(context, keys)
    source = make_input(context, tmp_path, keys)
    stolen_address = CurveKeys(
        server_key=keys.server_key,
        public_key=other.public_key,
        secret_key=other.secret_key,
        server_secret_key=other.server_secret_key,
    )
    targets = [StageOutput(context, source.address, own) for own in (None, stolen_address, keys)]
    for target in targets[:2]:
        target.send(0, StageState(torch.ones(1, HIDDEN), [], StepTimes(0.5)))
    targets[2].send(0, StageState(torch.zeros(1, HIDDEN), [], StepTimes(0.5)))
    received = source.receive(StepPlan(0, [0], [1]))
    assert torch.equal(received.hidden, torch.zeros(1, HIDDEN))


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
    assert [(name, (ts - began) / 1e6, dur / 1e6) for name, ts, dur in spans] == [("sample", 0, 1)]


def test_stages_add_up() -> None:
    assert StepTimes(1, 2, 3).behind(StepTimes(10, 20)) == StepTimes(11, 22, 3)
