# SPDX-License-Identifier: Apache-2.0
"""Several rows of a slot that are sampled in one step give the tokens of steps of one row, in every bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from driver import GREEDY, Driver, load
from family_models import FAMILIES as MORE_FAMILIES
from family_models import make_model as make_other_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from in_process import engine
from tiny_models import make_model, save_model

from pagoda.engine.request import Request
from pagoda.messages.frontend import GenerateRequest, TokenLogprobs, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import SlotStart, StepPlan
from pagoda.worker.runner import Runner

PROMPT = [7, 7, 9, 300, 7, 9, 11, 7]
EOS = (5, 17)
LENGTH = 24
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.5, "top_p": 0.9},
    "reported": {"temperature": 1.0, "logprobs": 3},
    "penalised": {
        "temperature": 0.8,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.2,
        "logprobs": 1,
    },
    "greedy and penalised": {"temperature": 0, "frequency_penalty": 1.5},
    "held back": {"temperature": 1.2, "min_tokens": 9},
    "restricted": {"temperature": 2.0, "allowed_token_ids": tuple(range(3, 30))},
}


@pytest.fixture(scope="module", params=["qwen3", "mistral", "qwen3-next", "lfm2"])
def runner(request: pytest.FixtureRequest, backend: str, tmp_path_factory: Any) -> Runner:
    directory: Path = tmp_path_factory.mktemp(request.param)
    make = make_other_model if request.param in MORE_FAMILIES else make_model
    make(request.param).save_pretrained(directory)
    return load(directory, backend=backend)


def sampling_of(name: str) -> SamplingParams:
    return SamplingParams(**{"seed": 3, "max_tokens": 1000} | SAMPLING[name])


def said(driver: Driver, slot: int) -> list[TokenLogprobs]:
    return [one for result in driver.results for one in result.logprobs.get(slot, [])]


def outputs(driver: Driver) -> list[int]:
    """All tokens of slot 0."""
    found: list[int] = []
    for result in driver.results:
        found += dict(zip(result.slots, result.token_ids, strict=True)).get(0, [])
    return found


def alone(runner: Runner, name: str) -> tuple[list[int], list[TokenLogprobs]]:
    """Answer and reports, a row a step."""
    driver = Driver(runner)
    driver.start(0, PROMPT, sampling_of(name), eos_token_ids=EOS)
    driver.run([0], LENGTH)
    answer, reports = driver.output(0), said(driver, 0)
    driver.free(0)
    driver.step({})
    return answer, reports


@pytest.mark.parametrize("name", SAMPLING)
def test_rows_of_a_slot_are_sampled_as_if_each_were_alone(runner: Runner, name: str) -> None:
    answer, reports = alone(runner, name)

    @settings(deadline=None, max_examples=15, suppress_health_check=list(HealthCheck))
    @given(
        drafts=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=3, max_size=12),
        chunk=st.integers(2, 8),
        others=st.booleans(),
    )
    def check(drafts: list[tuple[int, int]], chunk: int, others: bool) -> None:
        driver = Driver(runner)
        driver.start(0, PROMPT, sampling_of(name), eos_token_ids=EOS)
        if others:  # another that drafts, one that does not, and a prompt that is scored
            driver.start(1, PROMPT[::-1], sampling_of("sampled"))
            driver.start(2, PROMPT[2:], sampling_of("penalised"))
            driver.start(3, PROMPT * 4, SamplingParams(seed=1, max_tokens=9, prompt_logprobs=1))
        try:
            while not driver.output(0):
                driver.step({slot: driver.share(slot, chunk) for slot in driver.tokens})
            for length, num_right in drafts:
                num_said = len(driver.output(0))
                draft = answer[num_said : num_said + length]
                draft[num_right:] = [(token + 1) % 320 for token in draft[num_right:]]
                shares = {slot: driver.share(slot, 5 if slot > 1 else 99) for slot in driver.tokens}
                drafted = {0: draft} if draft else {}
                if others and driver.output(1):
                    drafted[1] = [1, 2]
                for slot, guesses in drafted.items():
                    shares[slot] += len(guesses)
                assert not driver.step(shares, drafted).errors
                assert len(driver.output(0)) == num_said + 1 + min(len(draft), num_right)
        finally:
            for slot in list(driver.blocks):
                driver.free(slot)
            driver.step({})
        ours, our_reports = outputs(driver)[:LENGTH], said(driver, 0)[:LENGTH]
        assert ours == answer[: len(ours)]
        assert our_reports == reports[: len(our_reports)]

    check()


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("blocks", [512, 10])
def test_drafts_change_no_answer(
    backend: str, tp: int, pp: int, blocks: int, tmp_path: Path
) -> None:
    """Few blocks make requests preempt each other; the prompts are computed in chunks, and begin alike."""
    save_model("qwen3", tmp_path)
    options = {"num_blocks": blocks, "max_num_batched_tokens": 23, "enable_prefix_caching": True}
    requests = [
        GenerateRequest(
            request_id=name,
            prompt_token_ids=PROMPT * 3 + [place],
            work=Work(msgspec.structs.replace(sampling_of(name), max_tokens=40), eos_token_ids=EOS),
        )
        for place, name in enumerate(SAMPLING)
    ]
    plain, drafting = (engine(tmp_path, backend, tp, pp, **options) for _ in range(2))
    expected = plain.answer(requests)
    answers = dict(zip(SAMPLING, expected, strict=True))

    def draft(request: Request) -> list[int]:
        """Three tokens, of which one in five is wrong."""
        answer, begin = answers[request.request_id], request.num_output_tokens
        return [(it + ((it + begin) % 5 == 0)) % 320 for it in answer[begin : begin + 3]]

    drafting.draft_with(draft)
    assert drafting.answer(requests) == expected
    if blocks > 10 and pp == 1:
        assert drafting.load().num_steps < plain.load().num_steps
    if blocks == 10:
        assert drafting.load().num_preemptions > 0


def test_drafts_that_a_slot_has_no_room_for_are_refused(runner: Runner) -> None:
    start = SlotStart(
        0, PROMPT, len(PROMPT), 0, [[0]] * len(runner.batch.block_sizes), Work(GREEDY)
    )
    batch = runner.batch
    batch.start(start)
    for num_tokens, drafts, problem in (
        (9, {0: [1, 2]}, "Slot 0 is to compute 9 tokens and has 10"),
        (17, {0: [1] * 9}, "Slot 0 is to hold 17 tokens in 1 blocks of 16"),
        (8, {1: [2]}, "1 drafts are not of 1 slots, or too many"),
    ):
        with pytest.raises(ValueError, match=problem):
            batch.prepare([0], [num_tokens], drafts=drafts)
    batch.prepare([0], [10], drafts={0: [1, 2]})
    with pytest.raises(ValueError, match="Slot 0 is to compute 1 tokens and has -1"):
        batch.prepare([0], [1])  # nobody knows yet which are right
    batch.free(0)


def test_a_slot_whose_request_left_amid_a_draft_is_as_new(runner: Runner) -> None:
    expected, _ = alone(runner, "greedy")
    groups = range(len(runner.batch.block_sizes))
    blocks, others = ([[4 * it + first, 4 * it + first + 1] for it in groups] for first in (0, 2))
    start = SlotStart(0, PROMPT, len(PROMPT), 0, blocks, Work(sampling_of("greedy")))
    first = runner.submit(StepPlan(100, [0], [len(PROMPT)], [start]))
    assert first.result().token_ids == [expected[:1]]
    drafted = runner.submit(StepPlan(101, [0], [4], drafts=[(0, expected[1:4])]))
    again = SlotStart(0, PROMPT, len(PROMPT), 0, others, Work(sampling_of("greedy")))
    behind = runner.submit(StepPlan(102, [0], [len(PROMPT)], [again], freed_slots=[0]))
    assert drafted.result().token_ids == [expected[1:5]]
    assert behind.result().token_ids == [expected[:1]]
    last = runner.submit(StepPlan(103, [0], [3], drafts=[(0, [expected[1], expected[2] + 1])]))
    assert last.result().token_ids == [expected[1:3]]
    runner.submit(StepPlan(104, [], [], freed_slots=[0])).result()
