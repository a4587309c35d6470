# SPDX-License-Identifier: Apache-2.0
"""Drafters that match tokens with earlier ones: `pagoda/engine/drafting/matching.py`."""

from __future__ import annotations

from harness import make_request

from pagoda.engine.drafting.assembly import match_rules
from pagoda.engine.drafting.drafter import NOTHING
from pagoda.engine.drafting.matching import (
    MAX_POOLS,
    POOL_TOKENS,
    STEP_TOKENS,
    MatchingDrafter,
    MatchRules,
)
from pagoda.engine.fair_shares import FairShares
from pagoda.engine.request import Request
from pagoda.kv.manager import KVManager
from pagoda.messages.speculation import SpeculativeConfig

SUFFIX = MatchRules(least=2, longest=24, factor=1.0, least_share=0.1, num_pooled=100)
NGRAM = MatchRules(least=2, longest=4, factor=float("inf"), least_share=0.0, num_pooled=0)


def running(prompt: list[int], output: list[int], **fields: object) -> Request:
    message = make_request("a", prompt, max_tokens=2**19, **fields)
    request = Request(
        message=message,
        max_model_len=2**20,
        order_key=(0, 0.0, 0),
        charge=FairShares().charge(message),
        table=KVManager(8, 4).new_table(),
    )
    request.token_ids += output
    return request


def proposed(drafter: MatchingDrafter, request: Request, most: int = 9) -> list[int]:
    for _ in range(1 + request.num_tokens // STEP_TOKENS):
        drafter.begin_step([request])
    return drafter.propose(request, most).token_ids


def test_what_followed_the_longest_match_is_proposed() -> None:
    prompt = [1, 2, 3, 9, 8, 7, 5, 2, 3, 6, 6]
    assert proposed(MatchingDrafter(NGRAM), running(prompt, [4, 1, 2, 3])) == [
        9,
        8,
        7,
        5,
        2,
        3,
        6,
        6,
        4,
    ]
    assert proposed(MatchingDrafter(NGRAM), running(prompt, [4, 4, 2, 3])) == [6, 6, 4, 4, 2, 3]
    assert proposed(MatchingDrafter(NGRAM), running(prompt, [4, 4, 4, 3])) == []


def test_a_match_is_followed_as_far_as_it_is_long() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert proposed(MatchingDrafter(SUFFIX), running(prompt, [0, 1, 2])) == [3, 4]
    assert proposed(MatchingDrafter(SUFFIX), running(prompt, [0, 1, 2, 3, 4])) == [5, 6, 7, 8]


def test_the_way_of_most_matches_is_followed_with_their_share() -> None:
    request = running([1, 2, 3, 0, 1, 2, 3, 4, 1, 2, 5, 9], [1, 2])
    drafter = MatchingDrafter(SUFFIX)
    assert proposed(drafter, request) == [3, 4]
    assert drafter.propose(request, 9) == ([3, 4], 2, [2 / 3, 1 / 2])


def test_recent_answers_of_the_same_tenant_are_looked_at() -> None:
    drafter = MatchingDrafter(SUFFIX)
    before = running([1], [3, 4, 5, 6, 7, 8], tenant="one", cache_salt="salt")
    proposed(drafter, before)
    drafter.finished(before)
    fields = {"tenant": "one", "cache_salt": "salt"}
    assert proposed(drafter, running([2], [3, 4, 5], **fields)) == [6, 7, 8]
    for other in ({"tenant": "two"}, {"cache_salt": None}, {"adapter": "x"}):
        assert proposed(drafter, running([2], [3, 4, 5], **fields | other)) == []
    assert proposed(drafter, running([2], [7, 8], **fields)) == []  # an answer ends where it ended


def test_a_request_that_ends_leaves_nothing_but_its_answer() -> None:
    drafter = MatchingDrafter(NGRAM)
    request = running([1, 2, 3], [1, 2])
    proposed(drafter, request)
    assert drafter.num_bytes > 0
    drafter.finished(request)
    assert drafter.num_bytes == 0
    assert drafter.propose(request, 3) is NOTHING


def test_memory_of_recent_answers_is_bounded() -> None:
    drafter = MatchingDrafter(SUFFIX)
    for number in range(3 * MAX_POOLS):
        drafter.finished(running([1], [number] * 3000, tenant=str(number)))
    for number in range(100):
        drafter.finished(running([1], [number] * 3000, tenant="one"))
    assert drafter.num_bytes == 20 * MAX_POOLS * POOL_TOKENS <= 42 * 2**20
    request = running([1], [99, 99], tenant="one")
    for _ in range(POOL_TOKENS // STEP_TOKENS):  # answers are read while somebody may want them
        drafter.begin_step([request])
    assert proposed(drafter, request) == [99, 99]
    assert proposed(drafter, running([1], [0, 0], tenant="one")) == []
    assert proposed(drafter, running([1], [0, 0], tenant="0")) == []


def test_a_long_prompt_is_indexed_in_parts() -> None:
    place = 2 * STEP_TOKENS + 10
    drafter, request = MatchingDrafter(SUFFIX), running(list(range(5000)), [place, place + 1])
    for part in range(1, 4):
        drafter.begin_step([request])
        found = drafter.propose(request, 9).token_ids
        assert found == ([place + 2, place + 3] if part == 3 else [])


def test_bounds_of_vllm() -> None:
    for config, text, found in (
        (SpeculativeConfig(method="ngram"), [1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5], [6]),
        (SpeculativeConfig(method="ngram"), [1, 2, 3, 4, 5, 0, 2, 3, 4], []),
        (SpeculativeConfig(method="ngram", prompt_lookup_min=1), [4, 7, 0, 4], [7]),
        (SpeculativeConfig(method="ngram", prompt_lookup_max=3), [3, 4, 5, 7, 0, 3, 4, 5], [7]),
    ):
        assert proposed(MatchingDrafter(match_rules(config)), running(text, []))[:1] == found
