"""Sets of moments, as intervals in order that do not overlap. Times are in nanoseconds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[int, int]
_NEVER = 2**63


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """What any of them has."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        elif end > start:
            result.append((start, end))
    return result


def covered(intervals: Sequence[Interval], start: int, end: int) -> int:
    """How much of the time from `start` to `end` is in them."""
    first = max(0, bisect_right(intervals, (start, _NEVER)) - 1)
    total = 0
    for begin, stop in intervals[first:]:
        if begin >= end:
            break
        total += max(0, min(stop, end) - max(begin, start))
    return total


def length(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)
