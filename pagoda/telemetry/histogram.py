# SPDX-License-Identifier: Apache-2.0
"""Counts of values by size, cheap enough for every token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence


class Histogram:
    """Counts of values in classes between ascending bounds, and the sum of the values. Belongs to one thread."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(
        self, bounds: Sequence[float], counts: Sequence[int] = (), total: float = 0.0
    ) -> None:
        """`bounds` ascend; missing `counts` are 0, and `total` is the sum of the counted values."""
        self.bounds = bounds
        self.counts = [*counts, *[0] * (len(bounds) + 1 - len(counts))]
        """Counts of values up to each bound and above the one before; the last count is of values above all
        bounds."""
        self.sum = total

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def copy(self) -> Histogram:
        return Histogram(self.bounds, self.counts, self.sum)


def total(histograms: Iterable[Histogram], bounds: Sequence[float]) -> Histogram:
    """All values of histograms that have the same bounds."""
    added = Histogram(bounds)
    for one in histograms:
        added.counts = [a + b for a, b in zip(added.counts, one.counts, strict=True)]
        added.sum += one.sum
    return added
