# SPDX-License-Identifier: Apache-2.0
"""The cost model: `pagoda/engine/drafting/step_costs.py`."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from pagoda.engine.drafting.step_costs import FRESH_STEPS, StepCosts


def seen(seconds: Callable[[int], float], sizes: list[int], *, repeats: bool = False) -> StepCosts:
    costs = StepCosts(repeats=repeats)
    for size in sizes:
        costs.observe(size, seconds(size))
    return costs


def test_drafts_that_cost_nothing_are_all_computed_while_they_may_be_right() -> None:
    costs = seen(lambda _: 0.01, [1, 32])
    assert costs.most_worthwhile(1, 1, [0.9, 0.8, 0.7]) == 3
    assert costs.most_worthwhile(1, 1, []) == 0


def test_drafts_that_cost_as_much_as_tokens_are_not_computed() -> None:
    costs = seen(lambda n: 0.01 * n, [1, 2, 4, 8, 16])
    assert costs.most_worthwhile(1, 1, [0.9, 0.8, 0.7]) == 0


def test_as_many_are_computed_as_win_most() -> None:
    costs = seen(lambda n: 0.010 + 0.002 * n, list(range(1, 17)))
    # 1.7 / 14 ms, 2.19 / 16, 2.53 / 18 and 2.77 / 20 against 1 / 12: the third is the best.
    gains = [0.7**place for place in range(1, 9)]
    rates = [(1 + sum(gains[:n])) / (0.012 + 0.002 * n) for n in range(9)]
    assert costs.most_worthwhile(1, 1, gains) == rates.index(max(rates)) == 3


def test_right_drafts_that_are_computed_again_cost_a_row_more() -> None:
    costs = seen(lambda n: 0.010 + 0.002 * n, list(range(1, 33)), repeats=True)
    gains = [0.7**place for place in range(1, 9)]
    rates = [(1 + sum(gains[:n])) / (0.012 + 0.002 * (n + round(sum(gains[:n])))) for n in range(9)]
    assert costs.most_worthwhile(1, 1, gains) == rates.index(max(rates)) == 2


def test_speculation_shrinks_under_load() -> None:
    """A step of many requests is as long as its tokens are many."""
    costs = seen(lambda n: max(0.01, 0.001 * n), list(range(1, 65)))
    gains = [0.8, 0.6, 0.4, 0.2]
    counts = [costs.most_worthwhile(n, n, gains) for n in (1, 4, 10, 16, 32)]
    assert counts == [4, 4, 0, 0, 0]


def test_a_gap_counts_for_steps_with_drafts_alone() -> None:
    costs = seen(lambda _: 0.01, [1, 32])
    for _ in range(100):
        costs.observe_gap(0.005)
    assert costs.most_worthwhile(1, 1, [0.4]) == 0
    assert costs.most_worthwhile(1, 1, [0.6]) == 1


def test_nothing_is_drafted_before_it_is_known_what_a_step_takes() -> None:
    costs = StepCosts()
    assert costs.seconds(3) == 0.0
    assert costs.most_worthwhile(1, 1, [0.9]) == 0
    costs.observe(100, 0.1)
    assert costs.most_worthwhile(1, 1, [0.9]) == 0
    costs.observe(1, 0.01)
    assert costs.most_worthwhile(1, 1, [0.9]) == 1


def test_what_was_seen_long_ago_is_seen_anew() -> None:
    """A time that was measured under other circumstances forbids drafts no longer than that."""
    costs = seen(lambda n: 1.0 if n == 2 else 0.01, [1, 2])
    assert costs.most_worthwhile(1, 1, [0.9]) == 0
    for _ in range(FRESH_STEPS + 1):
        costs.observe(1, 0.01)
    assert costs.most_worthwhile(1, 1, [0.9]) == 1


def test_a_step_that_something_else_held_up_counts_little() -> None:
    costs = seen(lambda _: 0.01, [1] * 10)
    costs.observe(1, 100.0)
    assert costs.seconds(1) < 0.02


@given(
    seen=st.lists(st.tuples(st.integers(1, 4000), st.floats(1e-4, 1.0)), min_size=1, max_size=40),
    asked=st.integers(1, 4000),
)
def test_a_time_lies_between_those_that_were_seen(
    seen: list[tuple[int, float]], asked: int
) -> None:
    costs = StepCosts()
    for size, seconds in seen:
        costs.observe(size, seconds)
    times = [seconds for _, seconds in seen]
    assert min(times) <= costs.seconds(asked)
    if asked <= max(size for size, _ in seen):
        assert costs.seconds(asked) <= 1.5 * max(times)
