"""Percentiles of recent latencies, from counts by time: any number of tokens takes little memory and work."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from itertools import accumulate

import msgspec

from pagoda.frontend.request_tracker import RequestStatistics, RequestTracker

_PER_DOUBLING = 16
"""Counts for each doubling of a time, which is then known to 4 %."""


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles in milliseconds, and the number of times that they are of."""

    p50: float
    p90: float
    p99: float
    count: int


class Latencies:
    """Times to the first token (TTFT) and between tokens (ITL) in the last windows, as a `RequestTracker` records
    them until `close`."""

    def __init__(self, tracker: RequestTracker, num_windows: int) -> None:
        self._ttft: deque[Counter[int]] = deque([Counter()], maxlen=num_windows)
        self._itl: deque[Counter[int]] = deque([Counter()], maxlen=num_windows)
        self.close = tracker.subscribe(on_tokens=self._on_tokens)

    def _on_tokens(
        self,
        record: RequestStatistics,  # noqa: ARG002
        num_tokens: int,  # noqa: ARG002
        waited_ns: int,
        is_first: bool,
    ) -> None:
        window = self._ttft[-1] if is_first else self._itl[-1]
        window[round(math.log2(max(waited_ns, 1)) * _PER_DOUBLING)] += 1

    def next_window(self) -> tuple[Percentiles | None, Percentiles | None]:
        """Returns TTFT and ITL of the windows that are kept, None without a token, and begins a new window."""
        answer = percentiles(self._ttft), percentiles(self._itl)
        self._ttft.append(Counter())
        self._itl.append(Counter())
        return answer


def percentiles(windows: Iterable[Counter[int]]) -> Percentiles | None:
    """Percentiles of all windows together; a window counts times by `_PER_DOUBLING` · log2(nanoseconds)."""
    counts: Counter[int] = Counter()
    for window in windows:
        counts.update(window)
    count = counts.total()
    if count == 0:
        return None
    ordered = sorted(counts.items())
    p50, p90, p99 = (_quantile(ordered, share * count) for share in (0.5, 0.9, 0.99))
    return Percentiles(p50, p90, p99, count)


def _quantile(ordered: list[tuple[int, int]], rank: float) -> float:
    """The smallest time, in milliseconds, with `rank` times at or below it."""
    seen = accumulate(count for _, count in ordered)
    bucket = next(bucket for (bucket, _), below in zip(ordered, seen, strict=True) if below >= rank)
    return round(math.exp2(bucket / _PER_DOUBLING) / 1e6, 3)
