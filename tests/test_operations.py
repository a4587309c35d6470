# SPDX-License-Identifier: Apache-2.0
"""Counting the operations of a call, and assertions on their growth."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
from operations import assert_constant, assert_linear, count_operations, operations_by_size


def _loop(size: int) -> Callable[[], object]:
    def call() -> None:
        for number in range(size):
            abs(number)

    return call


def _pairs(size: int) -> Callable[[], object]:
    def call() -> None:
        for _ in range(size):
            any(number < 0 for number in range(size))

    return call


def _look_up(size: int) -> Callable[[], object]:
    numbers = dict.fromkeys(range(size))
    return lambda: numbers.get(size - 1)


def test_counts_are_repeatable() -> None:
    assert len({count_operations(_loop(50)) for _ in range(5)}) == 1


def test_every_kind_of_operation_is_counted() -> None:
    def generator() -> Iterator[int]:
        yield from range(3)

    nothing = count_operations(lambda: None)
    assert count_operations(lambda: abs(1)) == nothing + 1
    assert count_operations(lambda: (lambda: None)()) == nothing + 2  # a call and a line
    few, many = (count_operations(lambda n=n: [i for i in range(n)]) for n in (10, 20))  # noqa: C416
    assert many - few == 10
    assert count_operations(lambda: list(generator())) > count_operations(
        lambda: list(iter(range(3)))
    )


def test_linear_work_passes_and_quadratic_work_fails() -> None:
    assert_linear(_loop, (100, 200, 400))
    with pytest.raises(AssertionError, match=r"at size 200: 4\.0 times as many, 2\.4 allowed"):
        assert_linear(_pairs, (100, 200))


def test_constant_work_passes_and_linear_work_fails() -> None:
    assert_constant(_look_up, (10, 1000))
    with pytest.raises(AssertionError, match="allowed"):
        assert_constant(_loop, (10, 20))


def test_inputs_are_built_uncounted() -> None:
    first, second = operations_by_size(_look_up, (10, 10_000))
    assert first == second


def test_what_traced_before_traces_again_even_after_an_error() -> None:
    before = sys.gettrace(), sys.getprofile()
    with pytest.raises(ZeroDivisionError):
        count_operations(lambda: 1 // 0)
    assert (sys.gettrace(), sys.getprofile()) == before
