# SPDX-License-Identifier: Apache-2.0
"""Shares of API keys: what is taken back, what is not given, and that nobody pays for the number of keys."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from operations import assert_constant

from pagoda.api.auth.key_shares import KeyShares, LruByKey

KEYS = st.sampled_from("abc")


@given(st.lists(st.tuples(KEYS, st.integers(0, 50)), max_size=200))
def test_the_key_with_most_is_known_and_sums_hold(steps: list[tuple[str, int]]) -> None:
    shares, model = KeyShares(), dict.fromkeys("abc", 0)
    for key, amount in steps:
        shares.change(key, amount - model[key])
        model[key] = amount
        assert shares.total == sum(model.values())
        assert {name: shares.of(name) for name in model} == model
        if shares.total:
            assert model[shares.greatest()] == max(model.values())


def test_a_key_leaves_others_as_much_as_it_has_and_a_server_without_keys_gives_all() -> None:
    for name, most in (("a", 50), ("", 100)):
        shares = KeyShares()
        while shares.has_room(name, 100):
            shares.change(name, 1)
        assert shares.total == most
    shares = KeyShares()
    for _ in range(100):
        for name in "ab":
            if shares.has_room(name, 99):
                shares.change(name, 1)
    assert shares.of("a") == shares.of("b") == 33
    assert shares.has_room("c", 99)
    assert not shares.has_room("c", 99, 34)


@given(st.lists(st.tuples(KEYS, st.integers(0, 9), st.integers(0, 40)), max_size=100))
def test_room_is_made_by_those_that_have_most(steps: list[tuple[str, int, int]]) -> None:
    kept: LruByKey[tuple[str, int]] = LruByKey()
    for key, number, size in steps:
        kept.put(key, str(number), (key, size), size)
        before = {name: kept.bytes.of(name) for name in "abc"}
        for owner, given_back in kept.make_room(100, 12):
            if sum(before.values()) > 100:
                assert before[owner] == max(before.values())
            before[owner] -= given_back
        assert kept.bytes.total <= 100
        assert len(kept) <= 12
        if size <= 100:
            assert kept.get(key, str(number)) in (None, (key, size))


def test_what_was_used_lately_stays_and_what_is_taken_out_is_gone() -> None:
    kept: LruByKey[int] = LruByKey()
    for number in range(3):
        kept.put("a", str(number), number, 1)
    assert kept.get("a", "0") == 0
    assert list(kept.make_room(2, 9)) == [1]
    assert kept.pop("a", "2") == 2
    assert kept.pop("a", "2") is kept.get("b", "0") is None
    assert (len(kept), kept.bytes.total) == (1, 1)


def test_a_change_costs_the_same_however_many_keys_there_are() -> None:
    def shares_of(num_keys: int) -> KeyShares:
        shares = KeyShares()
        for number in range(num_keys):
            shares.change(str(number), number + 1)
        return shares

    def work(size: int) -> object:
        shares, draw = shares_of(size), random.Random(1)

        def steps() -> None:
            for _ in range(20):
                shares.change(str(draw.randrange(size)), 1)
                shares.greatest()

        return steps

    assert_constant(work, (300, 3000))
