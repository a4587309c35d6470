# SPDX-License-Identifier: Apache-2.0
"""Records of the requests of a simulation, and figures of them over time and by kind of router and host."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

NUM_INTERVALS = 60
_RATIO = 1.02
"""Bounds of a histogram grow by this factor: percentiles are right within 1 %."""
_LEAST = 1e-6


class Histogram:
    """Numbers of times in buckets whose bounds grow geometrically; percentiles are exact within 1 %."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.total = 0

    def add(self, seconds: float, count: int = 1) -> None:
        bucket = bisect_left(_BOUNDS, seconds)
        self._counts[bucket] = self._counts.get(bucket, 0) + count
        self.total += count

    def percentile(self, share: float) -> float | None:
        """Seconds; None without a time."""
        left = share * self.total
        for bucket in sorted(self._counts):
            left -= self._counts[bucket]
            if left <= 0:
                return _BOUNDS[min(bucket, len(_BOUNDS) - 1)] / math.sqrt(_RATIO)
        return None


_BOUNDS = [_LEAST * _RATIO**power for power in range(1300)]


@dataclass(slots=True)
class RequestRecord:
    """One request as its client saw it; times in seconds from the begin of the simulation."""

    name: str
    arrived: float
    num_prompt_tokens: int
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    first: float | None = None
    """First token."""
    ended: float | None = None
    num_refusals: int = 0
    """Times that it was told to come again later."""
    host: int = -1
    """Number of the host that answered last; -1 if none did."""
    is_too_long: bool = False
    """The request was not sent: its tokens are more than the hosts take."""
    error: str = ""
    """The reason for which it got no whole answer; empty if it did."""

    @property
    def ttft(self) -> float | None:
        return None if self.first is None else self.first - self.arrived

    @property
    def tpot(self) -> float | None:
        """Seconds for each token behind the first; None of shorter answers."""
        if self.first is None or self.ended is None or self.num_output_tokens < 2:
            return None
        return (self.ended - self.first) / (self.num_output_tokens - 1)


@dataclass(slots=True)
class Sample:
    """State of all hosts of a kind at an instant; sums."""

    at: float
    num_running: int = 0
    num_waiting: int = 0
    num_prompt_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_up: int = 0


@dataclass
class Slo:
    """Limits of a good answer, in seconds."""

    ttft: float = float("inf")
    tpot: float = float("inf")

    def is_met(self, record: RequestRecord) -> bool:
        if record.error or record.is_too_long or record.ttft is None:
            return False
        return record.ttft <= self.ttft and (record.tpot or 0.0) <= self.tpot


@dataclass
class Patience:
    """Ends a simulation that has missed its limits: once more than `num_misses` requests were not good."""

    slo: Slo
    num_misses: float

    @property
    def is_over(self) -> bool:
        return self.num_misses < 0

    def count(self, record: RequestRecord) -> None:
        """Takes a request that has ended."""
        self.num_misses -= not self.slo.is_met(record)


@dataclass
class Records:
    """All requests of a simulation and samples of its hosts."""

    requests: list[RequestRecord] = field(default_factory=list)
    itl: Histogram = field(default_factory=Histogram)
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    """Samples by kind of host."""
    num_faults: int = 0
    num_hosts_lost: int = 0
    """Losses of a host by faults."""
    num_moves: int = 0
    """Requests that went on at another host, or anew at the same."""
    ended_at: float = 0.0
    is_given_up: bool = False
    """The simulation ended before its last request, as its limits were missed."""


def percentile(values: Sequence[float], share: float) -> float | None:
    """Nearest rank of sorted `values`; None of none."""
    return values[max(0, math.ceil(share * len(values)) - 1)] if values else None


def millis(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)


@dataclass
class Figures:
    """Figures of some requests, in the units of their names."""

    requests: int
    completed: int
    lost: int
    too_long: int
    refusals: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    duration_s: float
    ttft_ms: dict[str, float | None]
    tpot_ms: dict[str, float | None]
    goodput: float
    """Share of requests that met the limits."""

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)

    def as_json(self) -> dict[str, object]:
        seconds = max(self.duration_s, 1e-9)
        return {
            "requests": self.requests,
            "completed": self.completed,
            "lost": self.lost,
            "too_long": self.too_long,
            "refusals": self.refusals,
            "duration_s": round(self.duration_s, 6),
            "requests_per_s": round(self.completed / seconds, 6),
            "output_tokens_per_s": round(self.output_tokens / seconds, 3),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "hit_rate": round(self.hit_rate, 6),
            "ttft_ms": self.ttft_ms,
            "tpot_ms": self.tpot_ms,
            "goodput": round(self.goodput, 6),
        }


def figures(records: Iterable[RequestRecord], duration_s: float, slo: Slo) -> Figures:
    """Figures of requests that took `duration_s` together."""
    chosen = list(records)
    too_long = sum(it.is_too_long for it in chosen)
    lost = sum(bool(it.error) for it in chosen)
    ttfts = sorted(it.ttft for it in chosen if it.ttft is not None)
    tpots = sorted(it.tpot for it in chosen if it.tpot is not None)
    return Figures(
        requests=len(chosen),
        completed=len(chosen) - lost - too_long,
        lost=lost,
        too_long=too_long,
        refusals=sum(it.num_refusals for it in chosen),
        prompt_tokens=sum(it.num_prompt_tokens for it in chosen if not it.is_too_long),
        cached_tokens=sum(it.num_cached_tokens for it in chosen),
        output_tokens=sum(it.num_output_tokens for it in chosen),
        duration_s=duration_s,
        ttft_ms=_percentiles(ttfts),
        tpot_ms=_percentiles(tpots),
        goodput=sum(map(slo.is_met, chosen)) / max(1, len(chosen)),
    )


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    shares = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
    mean = sum(values) / len(values) if values else None
    return {
        "mean": millis(mean),
        **{name: millis(percentile(values, share)) for name, share in shares},
    }


def over_time(records: Records, slo: Slo) -> list[dict[str, object]]:
    """Figures of requests by the interval in which they arrived, `NUM_INTERVALS` at most."""
    length = max(records.ended_at, 1e-9) / NUM_INTERVALS
    bins: list[list[RequestRecord]] = [[] for _ in range(NUM_INTERVALS)]
    for record in records.requests:
        bins[min(NUM_INTERVALS - 1, int(record.arrived / length))].append(record)
    return [
        {"at_s": round(index * length, 3), **figures(group, length, slo).as_json()}
        for index, group in enumerate(bins)
        if group
    ]


def by_kind(
    records: Records, slo: Slo, ancestors: Mapping[int, Sequence[str]]
) -> dict[str, dict[str, object]]:
    """Figures by kind of host and router; `ancestors` names those of each host by its number."""
    groups: dict[str, list[RequestRecord]] = {}
    for record in records.requests:
        for kind in dict.fromkeys(ancestors.get(record.host, ())):
            groups.setdefault(kind, []).append(record)
    return {kind: figures(group, records.ended_at, slo).as_json() for kind, group in groups.items()}
