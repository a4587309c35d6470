# SPDX-License-Identifier: Apache-2.0
"""Speculation in whole engines, in virtual time: what it wins, and what it never costs."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from harness import VOCAB_SIZE, Harness, expected_tokens, make_request

from benchmarks.drafters import FunctionDrafter
from pagoda.engine.drafting.speculator import Speculator
from pagoda.engine.drafting.step_costs import StepCosts
from pagoda.engine.request import Request
from pagoda.messages.frontend import GenerateRequest
from pagoda.messages.kv_groups import KVKind, layer_groups
from pagoda.messages.speculation import SpeculativeConfig

LENGTH = 400


def requests(count: int) -> list[GenerateRequest]:
    return [
        make_request(f"r{place}" * (place + 1), [place, 1, 2], max_tokens=LENGTH)
        for place in range(count)
    ]


def drafts(right: Callable[[Request], float]) -> Callable[[Request], list[int]]:
    """Drafts of which each is right with a probability."""
    chance, answers = Random(7), dict[str, list[int]]()

    def draft(request: Request) -> list[int]:
        answer = answers.get(request.request_id)
        if answer is None:
            answer = answers[request.request_id] = expected_tokens(request.message)
        share = right(request)
        return [
            token if chance.random() < share else (token + 1) % VOCAB_SIZE
            for token in answer[request.num_output_tokens :]
        ]

    return draft


def seconds(
    count: int, draft: Callable[[Request], list[int]] | None, *, stages: int = 1, per_token_s: float
) -> tuple[float, Harness]:
    """Virtual time that an engine takes to answer `count` requests, a step 10 ms and more for each token."""
    harness = Harness(
        num_blocks=1024, max_model_len=1024, num_stages=stages, per_token_s=per_token_s
    )
    if draft is not None:
        drafter = FunctionDrafter(draft)
        harness.scheduler.batcher.speculator = Speculator(drafter, 8, StepCosts())
    for request in requests(count):
        harness.add(request)
    while harness.tick():
        pass
    for request in requests(count):
        assert harness.tokens[request.request_id] == expected_tokens(request)
    return harness.clock.now(), harness


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(("count", "least"), [(1, 4.0), (4, 2.5)])
def test_right_drafts_save_steps(stages: int, count: int, least: float) -> None:
    plain, _ = seconds(count, None, stages=stages, per_token_s=0.0005)
    drafted, harness = seconds(count, drafts(lambda _: 1.0), stages=stages, per_token_s=0.0005)
    assert plain > least * drafted
    load = harness.core.load()
    assert load.num_accepted_tokens == load.num_draft_tokens > 0.7 * count * LENGTH


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("per_token_s", [0.0002, 0.002, 0.01])
def test_wrong_drafts_cost_next_to_nothing(count: int, per_token_s: float) -> None:
    plain, _ = seconds(count, None, per_token_s=per_token_s)
    drafted, harness = seconds(count, drafts(lambda _: 0.0), per_token_s=per_token_s)
    assert drafted < 1.03 * plain
    assert harness.core.load().num_drafts < 25 * count


@pytest.mark.parametrize("share", [0.3, 0.6, 0.8])
@pytest.mark.parametrize("per_token_s", [0.0002, 0.002, 0.01])
def test_drafts_that_are_right_now_and_then_are_worth_what_they_cost(
    share: float, per_token_s: float
) -> None:
    """Tokens a second against the best fixed number of drafts."""
    plain, _ = seconds(1, None, per_token_s=per_token_s)
    drafted, _ = seconds(1, drafts(lambda _: share), per_token_s=per_token_s)
    rates = [
        sum(share**place for place in range(k + 1)) / (0.01 + per_token_s * (1 + k))
        for k in range(9)
    ]
    assert plain / drafted > 0.85 * max(rates) / rates[0]
    assert drafted < 1.03 * plain


def test_each_request_is_judged_by_its_own_drafts() -> None:
    _, harness = seconds(2, drafts(lambda it: float(it.request_id == "r0")), per_token_s=0.001)
    load = harness.core.load()
    assert load.num_accepted_tokens > 0.6 * LENGTH
    assert load.num_draft_tokens - load.num_accepted_tokens < 60


def test_drafts_that_become_good_are_noticed() -> None:
    """They are judged without being computed."""
    late = drafts(lambda request: float(request.num_output_tokens > LENGTH / 2))
    _, harness = seconds(1, late, per_token_s=0.001)
    load = harness.core.load()
    assert load.num_accepted_tokens > 0.3 * LENGTH


def test_a_request_may_do_without() -> None:
    harness = Harness(num_blocks=1024, max_model_len=1024)
    drafter = FunctionDrafter(drafts(lambda _: 1.0))
    harness.scheduler.batcher.speculator = Speculator(drafter, 8, StepCosts())
    harness.add(make_request("a", [1, 2], max_tokens=50, speculates=False))
    while harness.tick():
        pass
    assert harness.core.load().num_drafts == 0


@pytest.mark.parametrize("stages", [1, 2])
def test_a_worker_proposes_what_it_is_asked_for(stages: int) -> None:
    """A drafter that is right in four of five tokens, at no cost, in front of whole answers."""
    plain, _ = seconds(2, None, stages=stages, per_token_s=0.0005)
    harness = Harness(
        num_blocks=1024,
        max_model_len=1024,
        num_stages=stages,
        per_token_s=0.0005,
        max_proposals=4,
        speculation=SpeculativeConfig(method="auto"),
    )
    for request in requests(2):
        harness.add(request)
    while harness.tick():
        pass
    for request in requests(2):
        assert harness.tokens[request.request_id] == expected_tokens(request)
    load = harness.core.load()
    assert load.num_accepted_tokens > 0.5 * load.num_draft_tokens > 0.5 * LENGTH
    assert plain > 1.7 * harness.clock.now()


@pytest.mark.parametrize(
    ("kinds", "speculates"),
    [
        ([KVKind.FULL], True),
        ([KVKind.LATENT], True),
        ([KVKind.FULL, KVKind.STATE], True),
        ([KVKind.STEP], False),
    ],
)
def test_encoders_do_without(kinds: list[KVKind], speculates: bool) -> None:
    groups = layer_groups([(kind, 0) for kind in kinds], 4)
    harness = Harness(block_size=4, kv_groups=groups, speculation=SpeculativeConfig())
    assert (harness.scheduler.batcher.speculator is not None) == speculates
