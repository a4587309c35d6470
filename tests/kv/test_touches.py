"""Keys are worth storing from the touch that was asked for, and the memory for that is bounded."""

from __future__ import annotations

import pytest

from pagoda.kv.touches import TouchCounter


def key(number: int) -> bytes:
    return number.to_bytes(8) + bytes(24)


@pytest.mark.parametrize("min_touches", [1, 2, 3, 7])
def test_the_touch_that_was_asked_for_counts_and_all_later_ones(min_touches: int) -> None:
    counter = TouchCounter(min_touches)
    answers = [counter.touch(key(1)) for _ in range(10)]
    assert answers == [number >= min_touches for number in range(1, 11)]
    assert counter.touch(key(2)) == (min_touches == 1)


def test_the_last_generation_is_remembered_and_older_ones_are_not() -> None:
    counter = TouchCounter(2, generation=10)
    for number in range(10):
        counter.touch(key(number))
    assert counter.touch(key(0))
    for number in range(100, 120):
        counter.touch(key(number))
    assert not counter.touch(key(1))
    assert all(counter.touch(key(number)) for number in range(111, 120))


def test_a_key_that_is_touched_again_stays() -> None:
    counter = TouchCounter(3, generation=4)
    counter.touch(key(0))
    counter.touch(key(0))
    for number in range(1, 100):
        counter.touch(key(number))
        assert counter.touch(key(0))


def test_no_more_than_two_generations_are_kept() -> None:
    counter = TouchCounter(2, generation=10)
    for number in range(1000):
        counter.touch(key(number))
        assert len(counter._younger) + len(counter._older) < 20
