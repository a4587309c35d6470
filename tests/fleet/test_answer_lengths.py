# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from pagoda.fleet.answer_lengths import AnswerLeft, AnswerLengths

LENGTHS = st.lists(st.integers(0, 100_000), max_size=60)


def seen(*lengths: int) -> AnswerLengths:
    known = AnswerLengths()
    for length in lengths:
        known.observe(length)
    return known


@given(LENGTHS, st.integers(0, 200_000), st.integers(1, 200_000), st.integers(0, 200_000))
def test_what_is_left_is_at_least_a_token_and_at_most_all(
    lengths: list[int], num_tokens: int, most_left: int, least: int
) -> None:
    left = seen(*lengths).expected_left(num_tokens, most_left, least)
    assert 1 <= left <= most_left
    assert left >= min(most_left, least - num_tokens)


@given(LENGTHS, st.integers(1, 5_000), st.integers(0, 4_999))
def test_an_answer_of_known_length_has_left_what_is_missing(
    lengths: list[int], length: int, num_tokens: int
) -> None:
    known = seen(*lengths)
    num_tokens = min(num_tokens, length - 1)
    assert known.expected_left(num_tokens, length - num_tokens, length) == length - num_tokens
    answer, left = AnswerLeft(known, 0, length, length), length
    for done in range(1, min(length, 300)):
        left = answer.after(1, left)
        assert left == length - done


@given(st.integers(0, 2**32), st.integers(0, 1_500))
def test_the_rest_is_the_mean_over_the_longer_ones_of_the_answers_seen(
    seed: int, num_tokens: int
) -> None:
    draw = random.Random(seed)
    lengths = [int(draw.lognormvariate(5.5, 1.0)) for _ in range(60)] + [4_000] * 20
    draw.shuffle(lengths)
    left = seen(*lengths).expected_left(num_tokens, 100_000)
    longer = [length - num_tokens for length in lengths if length > num_tokens]
    mean = sum(longer) / len(longer)
    # The latest answers count more, up to e times the first ones, and a bucket is a quarter of an octave.
    assert mean / 2 - 50 < left < mean * 2 + 50


def test_a_long_answer_is_not_forgotten() -> None:
    known = seen(*[60, 100] * 40)
    lefts = [known.expected_left(num_tokens, 900 - num_tokens) for num_tokens in (0, 101, 500, 899)]
    assert 60 <= lefts[0] <= 110
    assert lefts[1] > 50
    assert lefts[2] > 200
    assert lefts[3] == 1


def test_looks_are_few_however_long_an_answer_becomes() -> None:
    class Counting(AnswerLengths):
        looks = 0

        def expected_left(self, num_tokens: int, most_left: int, least: int = 0) -> int:
            self.looks += 1
            return super().expected_left(num_tokens, most_left, least)

    known = Counting()
    answer = AnswerLeft(known, 0, 100_000)
    left = answer.look()
    for _ in range(99_999):
        left = answer.after(1, left)
        assert left >= 1
    assert known.looks < 120
