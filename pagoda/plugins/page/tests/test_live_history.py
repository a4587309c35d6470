# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
from typing import Any

from pagoda.messages.frontend import StepBin
from pagoda.plugins.page.live_history import AT_REST, CHARTED, KEPT_S, MAX_STEPS, LiveHistory


def figures(num_running: int) -> dict[str, Any]:
    return dict.fromkeys(CHARTED, 0) | {"num_running": num_running, "tiers": "of no chart"}


def step(age_s: float) -> StepBin:
    return StepBin(age_s, 7, 1, 0.01, 5, 2, 3)


def test_figures_of_charts_are_kept_for_five_minutes() -> None:
    history = LiveHistory(0.0)
    for second in range(1000):
        history.add(float(second), figures(second), {})
    points = history.points(999.5)
    assert len(points) == KEPT_S
    assert points[0] == {"age_s": 299.5, **dict.fromkeys(CHARTED, 0), "num_running": 700}
    assert [point["num_running"] for point in points] == list(range(700, 1000))
    assert history.points(1000.0 + KEPT_S) == []


def test_a_time_of_rest_is_a_line_at_zero() -> None:
    """Chart lines join points that are at most three seconds apart."""
    history = LiveHistory(100.0)
    before = history.points(110.0)
    assert [point["age_s"] for point in before] == [10.0, 7.0, 4.0, 1.0]
    assert all(point.items() >= AT_REST.items() for point in before)
    history.add(110.0, figures(1), {})
    history.add(111.0, figures(2), {})
    history.rest(111.0)
    history.add(200.0, figures(3), {})
    points = history.points(200.0)
    assert [point["num_running"] for point in points if point["num_running"]] == [1, 2, 3]
    ages = [point["age_s"] for point in points]
    assert max(old - new for old, new in itertools.pairwise(ages)) <= 3
    history.rest(200.0)
    assert len(history.points(10_000.0)) == KEPT_S / 3
    history.add(10_000.0, figures(4), {})
    assert len(history.points(10_000.0)) == KEPT_S / 3 + 1


def test_steps_of_the_last_minute_are_kept_and_bounded() -> None:
    history = LiveHistory(0.0)
    history.add(10.0, figures(1), {"0": [step(9.0), step(0.5)], "1": [step(1.0)]})
    kept = history.steps(62.0)
    ages = {name: [one.age_s for one in bins] for name, bins in kept.items()}
    assert ages == {"0": [52.5], "1": [53.0]}
    history.add(10.001, figures(1), {"0": [step(0.5)]})
    assert history.steps(62.0)["0"] == [StepBin(52.499, 7, 2, 0.01, 10, 4, 3)]  # one bar
    for _ in range(5):
        history.add(70.0, figures(1), {str(name): [step(0.0)] for name in range(MAX_STEPS)})
    assert sum(map(len, history.steps(70.0).values())) == MAX_STEPS


def test_a_minute_of_short_steps_is_whole() -> None:
    history = LiveHistory(0.0)
    for number in range(60 * 200):
        history.add(number / 200, figures(1), {"0": [step(0.0)]})
    bins = history.steps(60.0)["0"]
    assert bins[0].age_s > 59.8
    assert sum(one.num_steps for one in bins) == 60 * 200
    assert len(bins) <= 601
