# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pagoda.messages.sampling_params import SamplingParams
from pagoda.plugins.disaggregation.token_conditions import token_conditions

SAMPLED = SamplingParams(temperature=0.7, top_p=0.9, logit_bias={5: 1.0, 3: -1.0}, seed=1)
END = frozenset({2, 9})


def same(first: SamplingParams, num_output_tokens: int = 0, **changes: Any) -> bool:
    """True if a token may go from a request to the same one with these changes."""
    second = msgspec.structs.replace(first, **changes)
    digests = {token_conditions(each, END, num_output_tokens) for each in (first, second)}
    return len(digests) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 1},
        {"seed": 2},
        {"stop": ("a",)},
        {"logprobs": 3},
        {"skip_special_tokens": False},
        {"logit_bias": {3: -1.0, 5: 1.0}},
    ],
    ids=str,
)
def test_what_does_not_shape_the_token_may_differ(changes: dict[str, Any]) -> None:
    assert same(SAMPLED, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"min_tokens": 1},
        {"temperature": 0.8},
        {"temperature": 0.0},
        {"top_p": 1.0},
        {"logit_bias": None},
        {"allowed_token_ids": (3,)},
        {"repetition_penalty": 1.1},
    ],
    ids=str,
)
def test_what_shapes_the_token_must_be_the_same(changes: dict[str, Any]) -> None:
    assert not same(SAMPLED, **changes)


def test_tokens_that_are_held_back_count_while_they_are() -> None:
    held_back = msgspec.structs.replace(SAMPLED, min_tokens=4)
    assert same(held_back, min_tokens=1)
    assert not same(held_back, num_output_tokens=1, min_tokens=1)
    assert same(held_back, num_output_tokens=4, min_tokens=0)


def test_greedy_requests_may_differ_in_what_they_cut_off() -> None:
    assert same(SamplingParams(temperature=0.0), top_p=0.5, top_k=3, min_p=0.1)
    assert not same(SamplingParams(temperature=0.0), presence_penalty=1.0)
