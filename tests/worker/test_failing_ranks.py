# SPDX-License-Identifier: Apache-2.0
"""A request that fails where several ranks take part in a step fails alone, on all of them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import torch
from driver import GREEDY, Driver
from in_process import InProcessExecutor
from tiny_models import make_model
from torch import Tensor

from pagoda.messages.frontend import Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import SlotStart, StepPlan, StepResult
from pagoda.messages.worker_config import WorkerConfig
from pagoda.parallel.config import ParallelConfig
from pagoda.worker.group_sampler import BROKE_A_STEP, GroupSampler
from pagoda.worker.runner import Runner
from pagoda.worker.sampler import NOT_FINITE

VOCAB = 320
POISON = VOCAB - 1
"""A token whose embedding is NaN; the last of several ranks has it."""
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=10_000)
IMPOSSIBLE = SamplingParams(seed=0, allowed_token_ids=(5000,))
_T = TypeVar("_T")
TOPOLOGIES = [(1, 1), (2, 1), (1, 2), (2, 2)]


@dataclass(frozen=True)
class _Done:
    done: StepResult

    def result(self) -> StepResult:
        return self.done


@dataclass
class _Ranks:
    """Takes plans like a runner that is alone."""

    executor: InProcessExecutor
    drawn: dict[int, int]
    """Drawn tokens by slot that the stages before the last have not been told of."""

    @property
    def last(self) -> list[Runner]:
        return [rank for rank in self.executor.stages[-1] if isinstance(rank, Runner)]

    def submit(self, plan: StepPlan) -> _Done:
        appended = [(s, token) for s, token in self.drawn.items() if s not in plan.freed_slots]
        self.executor.submit(msgspec.structs.replace(plan, new_tokens=appended))
        (result,) = self.executor.poll()
        assert isinstance(result, StepResult)
        self.drawn = {s: t for s, (t,) in zip(result.slots, result.token_ids, strict=True)}
        return _Done(result)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("poisoned")
    model = make_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = torch.nan
    model.save_pretrained(path)
    return path


MakeRanks = Callable[[int, int], _Ranks]


@pytest.fixture
def ranks(directory: Path, backend: str) -> Iterator[MakeRanks]:
    made: list[InProcessExecutor] = []

    def make(tp: int, pp: int) -> _Ranks:
        config = WorkerConfig(
            model=str(directory),
            backend=backend,
            num_blocks=512,
            max_num_seqs=16,
            num_threads=1,
            parallel=ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp),
        )
        made.append(InProcessExecutor(config))
        return _Ranks(made[-1], {})

    yield make
    for executor in made:
        executor.close()


def _prompts() -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(POISON) for _ in range(length)] for length in (3, 9, 5, 17)]


def _driver(ranks: _Ranks, sampling: SamplingParams) -> Driver:
    """Driver with four requests, of which two are greedy."""
    driver = Driver(ranks)
    for slot, prompt in enumerate(_prompts()):
        driver.start(slot, prompt, sampling if slot % 2 else GREEDY)
    return driver


def _outputs(driver: Driver, slots: list[int], count: int) -> list[list[int]]:
    driver.run(slots, count)
    return [driver.output(slot) for slot in slots]


@pytest.mark.parametrize(("tp", "pp"), TOPOLOGIES)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_nan_logits(ranks: MakeRanks, sampling: SamplingParams, tp: int, pp: int) -> None:
    expected = _outputs(_driver(ranks(tp, pp), sampling), [0, 1, 2, 3], 4)
    driver = _driver(ranks(tp, pp), sampling)
    driver.start(4, [7, POISON, 8], sampling)
    first = driver.step({0: 3, 4: 3, 3: 17, 1: 9})
    assert (first.slots, first.errors) == ([0, 3, 1], {4: NOT_FINITE})
    second = driver.step({2: 5, 0: 1})
    assert (second.slots, second.errors) == ([2, 0], {})
    driver.free(4)
    driver.start(4, _prompts()[0])
    assert _outputs(driver, [0, 1, 2, 3, 4], 4) == [*expected, expected[0]]


def test_a_step_without_samples_is_answered_when_all_ranks_have_computed_it(
    ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it wrote is copied by all ranks once one of them has answered."""
    first, late = ranks(2, 1).last
    has_met, computed = threading.Event(), threading.Event()

    def forward_late(*arguments: Any) -> Tensor:
        hidden = forward(*arguments)
        has_met.wait()
        computed.set()
        return hidden

    def meet_openly(sampler: GroupSampler) -> None:
        has_met.set()
        meet(sampler)

    forward, meet = late.model.forward, GroupSampler.meet
    monkeypatch.setattr(late.model, "forward", forward_late)
    monkeypatch.setattr(GroupSampler, "meet", meet_openly)
    start = SlotStart(
        slot=0,
        token_ids=list(range(17)),
        num_prompt_tokens=17,
        num_computed_tokens=0,
        block_ids=[[0, 1]],
        work=Work(GREEDY),
    )
    tickets = [rank.submit(StepPlan(0, [0], [16], [start])) for rank in (first, late)]
    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(ticket.result) for ticket in tickets]
        results[0].result()
        was_computed = computed.is_set()
        has_met.set()  # else a rank that nobody waits for would wait for ever
    assert was_computed


@pytest.mark.parametrize(("tp", "pp"), TOPOLOGIES)
def test_a_request_that_cannot_be_started(ranks: MakeRanks, tp: int, pp: int) -> None:
    expected = _outputs(_driver(ranks(tp, pp), SAMPLED), [0, 1, 2, 3], 4)
    driver = _driver(ranks(tp, pp), SAMPLED)
    driver.start(4, [7] * 20, IMPOSSIBLE)
    # Where several ranks take part, it is found out when the slot comes to sample.
    first = driver.step({0: 3, 4: 11, 1: 9})
    assert first.slots == [0, 1]
    second = driver.step({4: 9, 0: 1, 3: 17})
    assert (second.slots, second.errors) == ([0, 3], {4: BROKE_A_STEP})
    driver.free(4)
    driver.start(4, _prompts()[0])
    assert _outputs(driver, [0, 1, 2, 3, 4], 4) == [*expected, expected[0]]


@pytest.mark.parametrize(("tp", "pp"), TOPOLOGIES[1:])
def test_a_failed_slot_in_a_plan_takes_no_rows_of_others(
    ranks: MakeRanks, tp: int, pp: int
) -> None:
    """A prompt goes on with a chunk that was planned before the failure of the chunk before was seen."""
    expected = _outputs(_driver(ranks(tp, pp), GREEDY), [0, 1, 2, 3], 4)
    several = ranks(tp, pp)
    driver = _driver(several, GREEDY)
    driver.start(4, [7] * 20)
    for runner in several.last:
        runner.failed[4] = "failed before"
    result = driver.step({0: 3, 4: 11, 3: 17, 1: 9})
    assert (result.slots, result.errors) == ([0, 3, 1], {4: "failed before"})
    driver.free(4)
    assert _outputs(driver, [0, 1, 2, 3], 4) == expected
    assert all(not r.errors for r in driver.results[1:])


def _poisoned(compute: Callable[[Tensor], _T], row: int) -> Callable[[Tensor], _T]:
    """What a head computes where a row of this rank's hidden states is NaN."""

    def computed(hidden: Tensor) -> _T:
        hidden = hidden.clone()
        hidden[row] = torch.nan
        return compute(hidden)

    return computed


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_nan_in_the_share_of_one_rank(ranks: MakeRanks, rank: int, pp: int) -> None:
    expected = _outputs(_driver(ranks(2, pp), SAMPLED), [0, 1, 2, 3], 4)
    several = ranks(2, pp)
    driver = _driver(several, SAMPLED)
    model: Any = several.last[rank].model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "argmax", _poisoned(model.argmax, 1))
        patch.setattr(model, "logits", _poisoned(model.logits, 0))
        result = driver.step({0: 3, 1: 9, 2: 5, 3: 17})
    assert (result.slots, result.errors) == ([0, 3], {1: NOT_FINITE, 2: NOT_FINITE})
    driver.free(1)
    driver.free(2)
    assert _outputs(driver, [0, 3], 4) == [expected[0], expected[3]]
