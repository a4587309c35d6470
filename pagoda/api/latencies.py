"""How long clients waited lately: counts by time, so that any number of tokens takes little memory and work."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from itertools import accumulate

import msgspec

from pagoda.frontend.request_tracker import RequestStatistics, RequestTracker

_PER_DOUBLING = 16
"""Counts for each doubling of a time; it is known to 4 %."""


class Percentiles(msgspec.Struct, frozen=True):
    """Of times in milliseconds."""

    p50: float
    p90: float
    p99: float
    count: int


class TimeCounts:
    """How often which time was seen, to 4 % whatever it is."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, time_ns: float, count: int = 1) -> None:
        self._counts[round(math.log2(max(time_ns, 1.0)) * _PER_DOUBLING)] += count

    def join(self, other: TimeCounts) -> None:
        self._counts.update(other._counts)

    def percentiles(self) -> Percentiles | None:
        """None if no time was seen."""
        count = self._counts.total()
        if count == 0:
            return None
        ordered = sorted(self._counts.items())
        p50, p90, p99 = (_quantile(ordered, share * count) for share in (0.5, 0.9, 0.99))
        return Percentiles(p50, p90, p99, count)


def _quantile(ordered: list[tuple[int, int]], rank: float) -> float:
    """The time, in milliseconds, that `rank` times are not above."""
    seen = accumulate(count for _, count in ordered)
    bucket = next(bucket for (bucket, _), below in zip(ordered, seen, strict=True) if below >= rank)
    return round(math.exp2(bucket / _PER_DOUBLING) / 1e6, 3)


class Latencies:
    """Observes answers: tokens, times to the first token, times from token to token, of the last windows."""

    def __init__(self, num_windows: int) -> None:
        """Percentiles are of so many windows together."""
        self.num_tokens = 0
        """Generated since the start."""
        self._ttft = deque([TimeCounts()], maxlen=num_windows)
        self._itl = deque([TimeCounts()], maxlen=num_windows)

    def follow(self, tracker: RequestTracker) -> Callable[[], None]:
        """Counts the tokens that `tracker` records, until the returned function is called."""
        return tracker.subscribe(on_tokens=self._on_tokens)

    def _on_tokens(
        self,
        record: RequestStatistics,  # noqa: ARG002
        num_tokens: int,
        waited_ns: int,
        is_first: bool,
    ) -> None:
        self.num_tokens += num_tokens
        windows = self._ttft if is_first else self._itl
        windows[-1].add(waited_ns)

    def next_window(self) -> tuple[Percentiles | None, Percentiles | None]:
        """TTFT and ITL of the windows that are kept; a new one begins."""
        answer = _all(self._ttft), _all(self._itl)
        self._ttft.append(TimeCounts())
        self._itl.append(TimeCounts())
        return answer


def _all(windows: deque[TimeCounts]) -> Percentiles | None:
    joined = TimeCounts()
    for window in windows:
        joined.join(window)
    return joined.percentiles()
