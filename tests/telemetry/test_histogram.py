# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from bisect import bisect_left

from hypothesis import given
from hypothesis import strategies as st

from pagoda.telemetry.histogram import Histogram, total

BOUNDS = (0.1, 1.0, 10.0)


def test_a_value_on_a_bound_counts_below_it() -> None:
    histogram = Histogram(BOUNDS)
    for value in (0.0, 0.1, 0.11, 10.0, 10.5):
        histogram.observe(value)
    assert histogram.counts == [2, 1, 1, 1]
    assert histogram.sum == 20.71


@given(st.lists(st.lists(st.integers(0, 20))))
def test_a_total_is_what_one_histogram_of_all_values_says(groups: list[list[int]]) -> None:
    histograms, together = [], Histogram(BOUNDS)
    for group in groups:
        histograms.append(Histogram(BOUNDS))
        for value in group:
            histograms[-1].observe(value)
            together.observe(value)
    added = total(histograms, BOUNDS)
    assert (added.counts, added.sum) == (together.counts, together.sum)
    values = [value for group in groups for value in group]
    expected = [bisect_left(BOUNDS, value) for value in values]
    assert added.counts == [expected.count(place) for place in range(4)]


def test_a_copy_stays_as_it_is() -> None:
    histogram = Histogram(BOUNDS)
    copy = histogram.copy()
    histogram.observe(5)
    assert (copy.counts, copy.sum) == ([0] * 4, 0.0)
