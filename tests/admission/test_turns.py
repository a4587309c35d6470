# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from operations import assert_constant

from pagoda.admission.turns import Turns


def popped(turns: Turns[str]) -> str:
    found = ""
    while turns:
        found += turns.pop()
    return found


def test_tenants_take_turns() -> None:
    turns: Turns[str] = Turns()
    for item in "abcdef":
        turns.put("heavy", item)
    assert turns.pop() == "a"
    turns.put("light", "x")
    turns.put("other", "y")
    turns.discard("heavy", "c")
    turns.discard("nobody", "c")
    assert turns.pop() == "x"
    turns.put("light", "z")
    assert popped(turns) == "ybzdef"
    with pytest.raises(IndexError):
        turns.pop()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_no_tenant_waits_for_more_than_one_item_of_each_other(
    steps: list[tuple[str, bool]],
) -> None:
    """Items of a tenant come in order, and none is lost."""
    turns: Turns[tuple[str, int]] = Turns()
    number, in_line = Counter[str](), Counter[str]()
    done: dict[str, list[int]] = {tenant: [] for tenant in "abc"}
    passed: dict[str, Counter[str]] = {tenant: Counter() for tenant in "abc"}

    def take() -> None:
        tenant, index = turns.pop()
        done[tenant].append(index)
        in_line[tenant] -= 1
        passed[tenant].clear()
        for other in "abc".replace(tenant, ""):
            if in_line[other]:
                passed[other][tenant] += 1
                assert passed[other][tenant] <= 1

    for tenant, takes in steps:
        turns.put(tenant, (tenant, number[tenant]))
        number[tenant] += 1
        in_line[tenant] += 1
        if takes:
            take()
    while turns:
        take()
    assert done == {tenant: list(range(number[tenant])) for tenant in "abc"}


def test_a_turn_takes_constant_work() -> None:
    def make(size: int) -> Callable[[], object]:
        turns: Turns[int] = Turns()
        for item in range(size):
            turns.put(str(item % 7), item)
        return turns.pop

    assert_constant(make, (100, 1000))
