# SPDX-License-Identifier: Apache-2.0
"""Steps are launched before the results of those in front of them are read, and answers stay the same."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ahead_engine import Engine, load
from driver import GREEDY
from family_models import make_model
from late_backend import LateBackend
from tiny_models import save_model

from pagoda.backend.kv_store import DeviceEvent
from pagoda.backend.overlap import OverlapBackend
from pagoda.backend.reference.backend import ReferenceBackend
from pagoda.messages.frontend import Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import SlotStart, StepPlan
from pagoda.plugins.backend_check.threads import ThreadGroup, ThreadRank
from pagoda.plugins.cuda.emulation import EmulatedDevice
from pagoda.telemetry.tracer import Tracer
from pagoda.worker.group_sampler import BROKE_A_STEP, GroupSampler
from pagoda.worker.sampler import NOT_FINITE, Sampler

DRAWN = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=100, logprobs=2)
PENALISED = SamplingParams(temperature=0.7, seed=2, max_tokens=100, repetition_penalty=1.4)
KINDS = {"greedy": GREEDY, "drawn": DRAWN, "penalised": PENALISED}
PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [12, 13]]


def _together(engine: Engine, sampling: SamplingParams, steps: int = 6) -> Engine:
    for slot, prompt in enumerate(PROMPTS):
        engine.start(slot, f"request {slot}", prompt, sampling)
    engine.submit({slot: len(prompt) for slot, prompt in enumerate(PROMPTS)})
    for _ in range(steps):
        engine.submit(dict.fromkeys(range(len(PROMPTS)), 1))
    return engine.finish()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_model("qwen3", tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_steps_one_by_one(
    directory: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = LateBackend()
    assert isinstance(backend, OverlapBackend)
    own = _together(Engine(load(directory, backend, monkeypatch)), KINDS[kind])
    expected = _together(Engine(load(directory, ReferenceBackend(), monkeypatch)), KINDS[kind])
    assert own.answers == expected.answers
    assert own.logprobs == expected.logprobs
    assert (own.errors, expected.num_ahead) == ({}, 0)
    # What a penalty changes is known once the token is: such a step waits for the one before.
    assert own.num_ahead == own.num_at_once == (0 if kind == "penalised" else 6)


@pytest.mark.parametrize("kind", ["greedy", "drawn"])
@pytest.mark.parametrize("family", ["mixtral", "lfm2", "lfm2-moe", "qwen3-next"])
def test_steps_of_models_with_states_and_experts_are_launched_ahead(
    family: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States move on once, and tokens of experts are counted in their own step."""
    (save_model if family == "mixtral" else _save)(family, tmp_path)
    own = _together(Engine(load(tmp_path, LateBackend(), monkeypatch)), KINDS[kind])
    expected = _together(Engine(load(tmp_path, ReferenceBackend(), monkeypatch)), KINDS[kind])
    assert own.answers == expected.answers
    assert own.logprobs == expected.logprobs
    assert own.expert_tokens == expected.expert_tokens
    assert (sum(own.expert_tokens[0]) > 0) == (family != "lfm2")
    assert own.num_ahead == own.num_at_once == 6


def _save(family: str, directory: Path) -> None:
    make_model(family).save_pretrained(directory)


def test_what_an_attempt_that_raised_gave_to_experts_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model("mixtral", tmp_path)
    expected = _together(Engine(load(tmp_path, ReferenceBackend(), monkeypatch)), GREEDY)
    runner = load(tmp_path, LateBackend(), monkeypatch)
    forward = runner.model.forward

    def raise_behind_a_batch(planned: Any, *arguments: Any) -> Any:
        hidden = forward(planned, *arguments)
        if len(planned.batch.query_lens) > 1:
            raise IndexError
        return hidden

    monkeypatch.setattr(runner.model, "forward", raise_behind_a_batch)
    own = _together(Engine(runner), GREEDY)
    assert own.answers == expected.answers
    assert own.expert_tokens == expected.expert_tokens
    assert own.num_ahead == 6


def test_the_result_of_a_step_waits_for_the_device_also_without_samples(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Networks may read what it has written from then on, and ask no device."""
    backend = LateBackend()
    engine = Engine(load(directory, backend, monkeypatch))
    engine.start(0, "long", [20, 21, 22, 23, 24], GREEDY)
    engine.submit({0: 3})
    computed = backend.future_tokens.steps.record()
    assert not computed.done
    engine.finish()
    assert engine.answers.get("long", []) == []
    assert computed.done


@pytest.mark.parametrize(
    "is_known", [False, True], ids=["nothing is drawn", "a grammar forces the token"]
)
def test_ranks_meet_when_their_devices_have_computed(is_known: bool) -> None:
    """One of them answers for all."""
    masks = SimpleNamespace(masks={}, tokens={0: 7})
    model: Any = SimpleNamespace(has_argmax=True, row_sampler=None)
    ranks, devices = ThreadGroup(2), [EmulatedDevice() for _ in range(2)]
    written: list[int] = []

    def compute_and_meet(rank: int) -> DeviceEvent:
        backend = LateBackend()
        backend.future_tokens = devices[rank]
        sampler = Sampler(1, 8, backend.sample)
        group = ThreadRank(ranks, rank)
        own = GroupSampler(sampler, group, Tracer("worker"), lambda _step: masks, backend)
        own.begin(StepPlan(0, [0], [1], masked_slots=[0]))
        devices[rank].steps.run(lambda: written.append(rank))
        computed = backend.launched()
        if is_known:
            pending = own.sample(model, torch.zeros(1, 4), {0: 0} if rank == 0 else {})
            assert pending.read().token_ids == {0: 7}
        else:
            own.meet()
        assert sorted(written) == [0, 1]
        return computed

    with ThreadPoolExecutor(2) as pool:
        assert all(event.done for event in pool.map(compute_and_meet, range(2)))


def _with_turnover(engine: Engine, others: SamplingParams) -> Engine:
    """A slot is freed and taken by another request, whose prompt comes in two parts, while a step uses it. The
    step behind that one leaves a slot out."""
    for slot, prompt in enumerate(PROMPTS):
        engine.start(slot, f"request {slot}", prompt, others)
    engine.submit({slot: len(prompt) for slot, prompt in enumerate(PROMPTS)})
    engine.submit({0: 1, 1: 1, 2: 1})
    engine.free(1)
    engine.start(1, "late", [20, 21, 22, 23, 24], DRAWN)
    engine.submit({0: 1, 1: 2})
    engine.submit({0: 1, 1: 3, 2: 1})
    for _ in range(4):
        engine.submit({2: 1, 1: 1, 0: 1})
    return engine.finish()


@pytest.mark.parametrize("others", ["greedy", "penalised"])
def test_a_slot_goes_to_another_request_while_a_step_uses_it(
    directory: Path, others: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new request is drawn at random. Where others are greedy, steps sample in two ways; where they have
    penalties, steps are not launched before the tokens of the step in front are known."""
    own = _with_turnover(Engine(load(directory, LateBackend(), monkeypatch)), KINDS[others])
    reference = Engine(load(directory, ReferenceBackend(), monkeypatch))
    expected = _with_turnover(reference, KINDS[others])
    assert own.answers == expected.answers
    assert own.logprobs == expected.logprobs
    assert own.num_ahead == own.num_at_once == (0 if others == "penalised" else 7)


def test_a_request_that_breaks_fails_alone_and_is_left_out(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step behind it, which was launched with it, says so too, and the others never notice."""
    backend = LateBackend()
    runner = load(directory, backend, monkeypatch)
    expected = _together(Engine(load(directory, ReferenceBackend(), monkeypatch)), GREEDY)
    forward, steps = runner.model.forward, [0]

    def spoil(*arguments: Any) -> Any:
        hidden = forward(*arguments)
        steps[0] += 1
        if steps[0] == 3:
            hidden[1] = torch.nan
        return hidden

    monkeypatch.setattr(runner.model, "forward", spoil)
    own = _together(Engine(runner), GREEDY)
    assert own.errors == {"request 1": NOT_FINITE}
    assert len(own.answers["request 1"]) == 2
    for name in ("request 0", "request 2"):
        assert own.answers[name] == expected.answers[name]
    assert runner.failed == {1: NOT_FINITE}


def test_a_request_that_raises_when_it_is_launched_fails_alone(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(directory, LateBackend(), monkeypatch)
    forward, asked = runner.model.forward, [0]

    def fail(planned: Any, *arguments: Any) -> Any:
        asked[0] += 1
        if 13 in planned.batch.token_ids.tolist():
            raise ValueError("no such thing")
        return forward(planned, *arguments)

    monkeypatch.setattr(runner.model, "forward", fail)
    engine = Engine(runner)
    for slot, prompt in enumerate(PROMPTS):
        engine.start(slot, f"request {slot}", prompt, GREEDY)
    engine.submit({slot: len(prompt) for slot, prompt in enumerate(PROMPTS)})
    engine.take()
    assert engine.errors == {"request 2": BROKE_A_STEP}
    assert engine.answers.keys() == {"request 0", "request 1"}
    assert asked == [4]


def test_steps_are_launched_in_their_order(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(directory, LateBackend(), monkeypatch)
    start = SlotStart(0, [5, 6, 7, 8], 4, 0, [[1]], Work(GREEDY))
    first = runner.submit(StepPlan(0, [0], [2], [start]))
    second = runner.submit(StepPlan(1, [0], [2]))
    assert second.launch() is None
    done = first.launch()
    assert done is not None
    assert second.launch() is not None
    assert not done.done
    assert (first.result().slots, second.result().slots) == ([], [0])
    assert done.done
