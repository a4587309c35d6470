# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters (`pagoda.messages.sampling_params`): what the edge checks, and what decoding does not."""

from __future__ import annotations

import msgspec
import pytest

from pagoda.errors import InvalidRequestError
from pagoda.messages.sampling_params import DRAWS, RANGES, DrawFields, SamplingParams


@pytest.mark.parametrize("penalty", [0.0, 1e-38, 0.009, 100.1])
def test_repetition_penalties_that_could_overflow_are_refused(penalty: float) -> None:
    with pytest.raises(
        InvalidRequestError, match=r"^repetition_penalty must be in \[0.01, 100.0\]"
    ):
        SamplingParams(repetition_penalty=penalty).checked()


def test_temperatures_close_to_zero_are_greedy() -> None:
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=1e-42).greedy
    assert not SamplingParams(temperature=1e-5).greedy


@pytest.mark.parametrize(
    ("sampling", "eos_token_ids"),
    [
        (SamplingParams(min_tokens=1, allowed_token_ids=(4,)), (4,)),
        (SamplingParams(min_tokens=1, allowed_token_ids=(4, 5), stop_token_ids=(5,)), (4,)),
        (SamplingParams(min_tokens=1, stop_token_ids=(0, 1, 2, 3, 4, 5, 6)), (7,)),
    ],
)
def test_min_tokens_must_leave_a_token(
    sampling: SamplingParams, eos_token_ids: tuple[int, ...]
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        sampling.check_min_tokens(8, eos_token_ids)
    assert caught.value.param == "min_tokens"
    sampling.check_min_tokens(9 if sampling.allowed_token_ids is None else 8, ())


def test_decoding_a_message_checks_types_only() -> None:
    """The edge has checked ranges: the engine and the worker do not do so again."""
    out_of_range = SamplingParams(temperature=1e9, n=10**6)
    encoded = msgspec.msgpack.encode(out_of_range)
    assert msgspec.msgpack.decode(encoded, type=SamplingParams) == out_of_range
    with pytest.raises(InvalidRequestError, match="temperature must be in"):
        out_of_range.checked()


def test_parameters_of_draws_are_fields_of_bodies_and_change_nothing_for_greedy_sampling() -> None:
    assert DrawFields.__struct_fields__ == DRAWS
    assert {*DRAWS} <= {*SamplingParams.__struct_fields__} & {*RANGES}
    drawn = SamplingParams(temperature=0.7, top_p=0.5, top_k=3, min_p=0.1, typical_p=0.9, seed=4)
    assert drawn.without_draws() == SamplingParams(temperature=0.0, seed=4)
