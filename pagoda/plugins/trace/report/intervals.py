# SPDX-License-Identifier: Apache-2.0
"""Sets of moments, as intervals in order that do not overlap. Times are in nanoseconds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

Interval = tuple[int, int]
_NEVER = 2**63


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Moments that are in any of the intervals."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        elif end > start:
            result.append((start, end))
    return result


def within(intervals: Sequence[Interval], start: int, end: int) -> Iterator[Interval]:
    """The parts of the intervals between `start` and `end`."""
    for index in range(max(0, bisect_right(intervals, (start, _NEVER)) - 1), len(intervals)):
        begin, stop = intervals[index]
        if begin >= end:
            return
        begin, stop = max(begin, start), min(stop, end)
        if begin < stop:
            yield begin, stop


def covered(intervals: Sequence[Interval], start: int, end: int) -> int:
    """Nanoseconds between `start` and `end` that the intervals cover."""
    return length(within(intervals, start, end))


def without(interval: Interval, holes: Iterable[Interval]) -> Iterator[Interval]:
    """The parts of the interval outside of the holes, which are in order and do not overlap."""
    at, end = interval
    for begin, stop in holes:
        if begin > at:
            yield at, min(begin, end)
        at = max(at, stop)
    if end > at:
        yield at, end


def length(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)
