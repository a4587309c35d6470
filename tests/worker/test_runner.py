# SPDX-License-Identifier: Apache-2.0
"""One request that cannot be computed fails alone; the others never notice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from driver import GREEDY, Driver, load
from family_models import make_model
from tiny_models import save_model
from torch import Tensor

from pagoda.messages.frontend import Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import SlotStart, StepPlan
from pagoda.worker.group_sampler import BROKE_A_STEP
from pagoda.worker.runner import Runner
from pagoda.worker.sampler import Sampled, Sampler

PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [12, 13]]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_model("qwen3", tmp_path)
    return tmp_path


def _started(runner: Runner) -> Driver:
    driver = Driver(runner)
    for slot, prompt in enumerate(PROMPTS):
        driver.start(slot, prompt)
    return driver


def _expected(directory: Path, count: int) -> list[list[int]]:
    driver = _started(load(directory))
    driver.run([0, 1, 2], count)
    return [driver.output(slot) for slot in range(3)]


def test_a_step_of_a_model_with_states_is_not_computed_again_in_parts(tmp_path: Path) -> None:
    """Its states may have moved on: the worker ends, and the engine finds out whose fault it is."""
    make_model("lfm2").save_pretrained(tmp_path)
    driver = _started(load(tmp_path))
    driver.start(3, [320])  # not in the vocabulary: the embedding raises
    with pytest.raises(IndexError, match="token id"):
        driver.step({0: 3, 3: 1, 1: 4, 2: 2})


def test_a_request_with_a_state_that_raises_by_itself_fails_alone(tmp_path: Path) -> None:
    make_model("lfm2").save_pretrained(tmp_path)
    driver = Driver(load(tmp_path))
    driver.start(0, PROMPTS[0])
    driver.run([0], 2)
    driver.start(1, [320])  # not in the vocabulary: the embedding raises
    assert driver.step({1: 1}).errors == {1: BROKE_A_STEP}
    driver.run([0], 4)
    alone = Driver(load(tmp_path))
    alone.start(0, PROMPTS[0])
    alone.run([0], 4)
    assert driver.output(0) == alone.output(0)


def test_a_request_that_raises_fails_alone(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = _expected(directory, 4)
    driver = _started(load(directory))
    driver.start(3, [320])  # not in the vocabulary: the embedding raises
    result = driver.step({0: 3, 3: 1, 1: 4, 2: 2})
    assert result.errors == {3: BROKE_A_STEP}
    assert result.slots == [0, 1, 2]
    assert "IndexError" in caplog.text
    about = {vars(record).get("request_id"): record.getMessage() for record in caplog.records}
    assert about["request-3"].startswith("failed in step 0")
    assert set(about) == {None, "request-3"}

    # A plan that was under way still counts on the failed slot.
    result = driver.step({0: 1, 1: 1, 3: 1, 2: 1})
    assert list(result.errors) == [3]
    driver.free(3)
    driver.start(3, PROMPTS[0])
    driver.run([0, 1, 2, 3], 4)
    assert [driver.output(slot) for slot in range(3)] == expected
    assert driver.output(3) == expected[0]
    assert not driver.results[-1].errors


def _start(slot: int, prompt: list[int], block_id: int) -> SlotStart:
    return SlotStart(slot, prompt, len(prompt), 0, [[block_id]], Work(GREEDY))


def test_a_failed_slot_leaves_steps_that_are_prepared_and_may_be_used_again(
    directory: Path,
) -> None:
    expected = _expected(directory, 3)
    runner = load(directory)
    starts = [_start(slot, prompt, slot) for slot, prompt in enumerate(PROMPTS)]
    starts.append(_start(3, [320], 3))  # not in the vocabulary: the embedding raises
    first = runner.submit(StepPlan(0, [0, 3, 1, 2], [3, 1, 4, 2], starts))
    second = runner.submit(StepPlan(1, [3, 0, 1, 2], [1, 1, 1, 1]))
    with pytest.raises(RuntimeError, match="Step 1 is not the next one"):
        second.result()
    with pytest.raises(RuntimeError, match="2 steps are under way; step 2 came too early"):
        runner.submit(StepPlan(2, [0], [1]))
    results = [first.result()]
    again = [_start(3, PROMPTS[0], 4)]
    third = runner.submit(StepPlan(2, [0, 1, 2, 3], [1, 1, 1, 3], again, freed_slots=[3]))
    results += [second.result(), third.result()]
    assert [result.errors for result in results] == [{3: BROKE_A_STEP}, {3: BROKE_A_STEP}, {}]
    for result in results:
        tokens = dict(zip(result.slots, result.token_ids, strict=True))
        assert [tokens[slot] for slot in range(3)] == [[answer[result.step]] for answer in expected]
    assert dict(zip(results[2].slots, results[2].token_ids, strict=True))[3] == [expected[0][0]]


def test_what_is_computed_twice_is_remembered_and_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model("qwen3-moe", tmp_path)

    def answers() -> list[tuple[list[list[int]], list[int]]]:
        driver = Driver(load(tmp_path))
        for slot, prompt in enumerate(PROMPTS):
            options = {"temperature": 1.5, "seed": slot, "frequency_penalty": 0.5}
            driver.start(slot, prompt, SamplingParams(**options, max_tokens=99))  # type: ignore[arg-type]
        driver.run([0, 1, 2], 6)
        return [(result.token_ids, result.expert_tokens) for result in driver.results]

    expected = answers()
    assert sum(expected[0][1]) > 0
    sample = Sampler.sample

    def raise_behind_a_batch(self: Sampler, logits: Tensor, slots: list[int]) -> Sampled:
        sampled = sample(self, logits, slots)
        if len(slots) > 1:
            raise IndexError
        return sampled

    monkeypatch.setattr(Sampler, "sample", raise_behind_a_batch)
    assert answers() == expected


def test_what_a_nan_request_left_in_the_cache_harms_nobody(directory: Path) -> None:
    expected = _expected(directory, 4)
    runner = load(directory)
    for _, cache, *_ in runner.model.caches:
        cache.keys.fill_(torch.nan)
        cache.values.fill_(torch.nan)
    driver = _started(runner)
    driver.run([0, 1, 2], 4, chunk=2)
    assert [driver.output(slot) for slot in range(3)] == expected


def test_only_slots_that_have_all_their_tokens_sample(directory: Path) -> None:
    driver = Driver(load(directory))
    driver.start(0, list(range(30)))
    driver.start(1, [4])
    result = driver.step({0: 7, 1: 1})
    assert result.slots == [1]
    assert result.logprobs == {}
    times = (result.prepare_time_s, result.forward_time_s, result.sample_time_s)
    assert min(times) > 0
    assert result.step_time_s == sum(times)
    assert driver.step({0: 22, 1: 1}).slots == [1]
    assert driver.step({1: 1, 0: 1}).slots == [1, 0]


def test_min_tokens_reaches_the_sampler_with_eos(directory: Path) -> None:
    (first, *_), *_ = _expected(directory, 1)
    driver = Driver(load(directory))
    sampling = SamplingParams(temperature=0, seed=0, min_tokens=2, max_tokens=9)
    driver.start(0, PROMPTS[0], sampling, eos_token_ids=(first,))
    driver.run([0], 2)
    assert first not in driver.output(0)


def test_a_plan_for_an_unknown_slot_is_an_error(directory: Path) -> None:
    runner = load(directory)
    assert list(runner.submit(StepPlan(0, [5], [1])).result().errors) == [5]
    with pytest.raises(ValueError, match="Slot 5 is not in use"):
        runner.submit(StepPlan(1, [], [], freed_slots=[5]))


def test_the_whole_context_can_be_used(directory: Path) -> None:
    runner = load(directory, max_model_len=32, num_blocks=2)
    driver = Driver(runner, num_blocks=2)
    driver.start(0, list(range(30)))
    driver.run([0], 3)  # the last is sampled behind the 32nd token and never computed
    assert len(driver.tokens[0]) == 33
