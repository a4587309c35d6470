# SPDX-License-Identifier: Apache-2.0
"""The index of places: `pagoda/engine/drafting/token_index.py`."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st
from operations import assert_constant, assert_linear

from pagoda.engine.drafting.token_index import TokenIndex

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def longest(tokens: list[int], text: list[int], order: int) -> tuple[int, list[int]]:
    """The same by comparing all places."""
    best, places = order, list[int]()
    for end in range(len(tokens) - 1, order - 1, -1):
        length = 0
        while length < min(end, len(text), 64) and tokens[end - 1 - length] == text[-1 - length]:
            length += 1
        if length > best:
            best, places = length, []
        if length == best:
            places.append(end)
    return (best if places else 0), places


@given(text=TEXTS, order=st.sampled_from([1, 2]), step=st.integers(1, 7))
def test_the_longest_matches_are_found_in_a_text_that_grows(
    text: list[int], order: int, step: int
) -> None:
    tokens: list[int] = []
    index = TokenIndex(tokens, order, 8)
    for token in text:
        tokens.append(token)
        while index.catch_up(step):
            pass
        match = index.longest_match(tokens, 1000)
        length, places = longest(tokens, tokens, order)
        assert (match.length, match.places) == (length, places)


@given(tokens=TEXTS, text=TEXTS, order=st.sampled_from([1, 2]))
def test_the_longest_matches_are_found_in_another_text(
    tokens: list[int], text: list[int], order: int
) -> None:
    index = TokenIndex(tokens, order, 8)
    assert index.catch_up(1000) == len(tokens)
    match = index.longest_match(text, 1000)
    assert (match.length, match.places) == longest(tokens, text, order)


def test_few_places_are_looked_at() -> None:
    index = TokenIndex([7] * 1000, 2, 1000)
    index.catch_up(1000)
    assert len(index.longest_match([7] * 1000, 5, longest=8).places) == 4  # one is the end itself


def test_an_index_costs_as_much_as_its_text_is_long() -> None:
    def make(size: int) -> Callable[[], object]:
        index = TokenIndex([place % 97 for place in range(size)], 2, size)
        return lambda: index.catch_up(size)

    assert_linear(make, [2000, 4000])


def test_a_look_costs_the_same_in_a_long_text() -> None:
    def make(size: int) -> Callable[[], object]:
        tokens = [place % 97 for place in range(size)]
        index = TokenIndex(tokens, 2, size)
        index.catch_up(size)
        return lambda: index.longest_match(tokens, 8)

    assert_constant(make, [2000, 16000])
