# SPDX-License-Identifier: Apache-2.0
"""Whatever fails while steps are launched ahead, the answers of all other requests stay the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ahead_engine import Engine, load
from driver import GREEDY
from family_models import make_model
from late_backend import LateBackend
from tiny_models import save_model
from torch import Tensor

from pagoda.backend.reference.backend import ReferenceBackend
from pagoda.faults.injector import FaultPlan, Faults, InjectedFaultError
from pagoda.messages.sampling_params import SamplingParams
from pagoda.worker.runner import Runner
from pagoda.worker.sampler import NOT_FINITE

NUM_SLOTS = 3


@dataclass
class Request:
    name: str
    prompt: list[int]
    sampling: SamplingParams
    num_tokens: int
    """Tokens of its answer."""
    num_planned: int = 0
    """Tokens that plans have given out since it came to its slot."""

    def share(self, said: int, chunk: int) -> int:
        """Tokens that the next step may compute; 0 where all are planned. `said` were known when it came."""
        known = len(self.prompt) + said
        if self.num_planned < known:
            return min(chunk, known - self.num_planned)
        return int(self.num_planned < len(self.prompt) + self.num_tokens - 1)


@dataclass
class Service:
    """Answers requests; a worker that ends is replaced, and computes again what was not answered."""

    new_runner: Callable[[], Runner]
    rng: random.Random
    requests: list[Request]
    engine: Engine = field(init=False)
    num_ahead: int = 0
    num_lost: int = 0
    _running: dict[int, tuple[Request, int]] = field(default_factory=dict)
    """Requests by slot, and how many tokens each had said when it came there."""

    def __post_init__(self) -> None:
        self.engine = Engine(self.new_runner())

    def run(self) -> Service:
        waiting = list(self.requests)
        while waiting or self._running:
            for slot in range(NUM_SLOTS):
                if slot not in self._running and waiting:
                    self._start(slot, waiting.pop(0))
            try:
                self._step()
            except InjectedFaultError:
                self._replace()
                waiting = [
                    *(request for request, _ in self._running.values() if not self._ended(request)),
                    *waiting,
                ]
                self._running.clear()
        self.engine.finish()
        self.num_ahead += self.engine.num_ahead
        return self

    def _start(self, slot: int, request: Request) -> None:
        said = self.engine.answers.get(request.name, [])
        self.engine.start(slot, request.name, request.prompt, request.sampling, tuple(said))
        request.num_planned = 0
        self._running[slot] = request, len(said)

    def _step(self) -> None:
        """A step of all slots that have anything to do. Raises InjectedFaultError: the worker has ended."""
        shares = {}
        for slot, (request, said) in [*self._running.items()]:
            share = request.share(said, self.rng.choice((1, 5, 70)))
            if share and request.name not in self.engine.errors:
                shares[slot] = share
                request.num_planned += share
            else:  # its last step may be under way
                self.engine.free(slot)
                del self._running[slot]
        self.engine.submit(shares)

    def _ended(self, request: Request) -> bool:
        said = len(self.engine.answers.get(request.name, []))
        return said == request.num_tokens or request.name in self.engine.errors

    def _replace(self) -> None:
        before = self.engine
        self.num_ahead += before.num_ahead
        self.num_lost += 1
        self.engine = Engine(self.new_runner(), before.answers, before.errors)


def _requests(rng: random.Random) -> list[Request]:
    requests = []
    for number in range(7):
        prompt = [rng.randrange(320) for _ in range(rng.choice((1, 3, 63, 64, 90)))]
        drawn = SamplingParams(temperature=0.8, seed=number, max_tokens=100)
        sampling = GREEDY if number % 2 else drawn
        name = f"{'poison' if number in (2, 5) else 'request'}-{number}"
        requests.append(Request(name, prompt, sampling, rng.randrange(2, 9)))
    return requests


def _break_steps(runner: Runner, rng: random.Random) -> None:
    """Lets some steps of several requests raise, before they are computed or behind that."""
    forward = runner.model.forward

    def breaking(planned: Any, *arguments: Any) -> Tensor:
        is_broken = len(planned.batch.query_lens) > 1 and rng.random() < 0.25
        if is_broken and rng.random() < 0.5:
            raise InjectedFaultError
        hidden = forward(planned, *arguments)
        if is_broken:
            raise InjectedFaultError
        return hidden

    runner.model.forward = breaking  # type: ignore[method-assign]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", ["qwen3", "lfm2", "qwen3-next"])
def test_answers_are_those_of_a_service_without_failures(
    family: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States are not moved on twice: their worker ends where another one tries the requests of a step in parts."""
    (save_model if family == "qwen3" else _save)(family, tmp_path)
    rng = random.Random(seed)
    requests, has_states = _requests(rng), family != "qwen3"

    def new_reference() -> Runner:
        return load(tmp_path, ReferenceBackend(), monkeypatch)

    def new_runner() -> Runner:
        schedule = f"seed={rng.randrange(1000)} worker.logits:nan~poison%0.2"
        faults = Faults(FaultPlan(schedule), "worker")
        runner = load(tmp_path, LateBackend(), monkeypatch, faults)
        _break_steps(runner, rng)
        return runner

    expected = Service(new_reference, random.Random(seed), requests).run().engine.answers
    own = Service(new_runner, rng, requests).run()
    errors = own.engine.errors
    for request in requests:
        answer = own.engine.answers.get(request.name, [])
        assert answer == expected[request.name][: len(answer)]
        if request.name not in errors:
            assert len(answer) == request.num_tokens
    assert errors == dict.fromkeys(errors, NOT_FINITE)
    assert errors.keys() <= {request.name for request in requests if "poison" in request.name}
    assert own.num_ahead > 10
    assert (own.num_lost > 0) == has_states


def _save(family: str, directory: Path) -> None:
    make_model(family).save_pretrained(directory)
