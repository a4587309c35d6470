"""Results of a benchmark: latencies of each request, and the figures drawn from them.

TTFT is the time from sending a request to its first token; TPOT the mean time of each further token of a request;
ITL the time between two stream events that carry tokens; E2E the time to the end of the answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pagoda.errors import ConfigError

_GOALS = {"ttft": "ttft", "tpot": "tpot", "e2e": "e2e", "e2el": "e2e"}
"""Names of latencies in a goal."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request, in seconds on one clock."""

    sent_s: float
    ended_s: float
    event_times_s: Sequence[float] = ()
    """Times at which events with tokens were read."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.sent_s

    @property
    def ttft_s(self) -> float | None:
        return self.event_times_s[0] - self.sent_s if self.event_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """None for answers of one token."""
        if not self.event_times_s or self.output_tokens < 2:
            return None
        span = self.event_times_s[-1] - self.event_times_s[0]
        return span / (self.output_tokens - 1)

    def itls_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.event_times_s)]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Statistics in milliseconds; all None when nothing was measured."""

    mean: float | None
    median: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class Goal:
    """A service level: every latency named must be at most so many milliseconds."""

    limits_ms: Mapping[str, float]

    def is_met(self, outcome: Outcome) -> bool:
        """An answer without a token misses every goal; one of a single token has no TPOT to miss."""
        if outcome.error is not None or not outcome.event_times_s:
            return False
        values = {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s, "e2e": outcome.e2e_s}
        return all(
            value is None or value * 1000 <= self.limits_ms.get(name, math.inf)
            for name, value in values.items()
        )


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of one run. Rates are per second of the whole run."""

    duration_s: float
    completed: int
    failed: int
    prompt_tokens: int
    output_tokens: int
    output_events: int
    """Stream events that carried tokens; fewer than tokens where a server puts several into one."""
    request_rate: float
    output_token_rate: float
    total_token_rate: float
    goodput: float | None
    """Requests a second that met the goal; None without a goal."""
    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution
    e2e_ms: Distribution
    errors: Mapping[str, int]


def parse_goal(words: Sequence[str]) -> Goal | None:
    """A goal from words such as `ttft:200 tpot:50`, in milliseconds; None without words.

    Raises:
        ConfigError: a word is not such a limit.
    """
    limits: dict[str, float] = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in _GOALS or not limit > 0:
            raise ConfigError(
                "--goodput takes limits in milliseconds such as ttft:200, tpot:50 or e2el:3000, "
                f"got {word}."
            )
        limits[_GOALS[name]] = limit
    return Goal(limits) if limits else None


def summarize(outcomes: Sequence[Outcome], duration_s: float, goal: Goal | None) -> Report:
    """The figures of a run that took `duration_s`; failed requests count as failed only."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    prompt_tokens = sum(outcome.prompt_tokens for outcome in good)
    output_tokens = sum(outcome.output_tokens for outcome in good)
    errors: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.error is not None:
            errors[outcome.error] = errors.get(outcome.error, 0) + 1
    return Report(
        duration_s=duration_s,
        completed=len(good),
        failed=len(outcomes) - len(good),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        output_events=sum(len(outcome.event_times_s) for outcome in good),
        request_rate=len(good) / duration_s,
        output_token_rate=output_tokens / duration_s,
        total_token_rate=(prompt_tokens + output_tokens) / duration_s,
        goodput=None if goal is None else sum(map(goal.is_met, good)) / duration_s,
        ttft_ms=_distribution(outcome.ttft_s for outcome in good),
        tpot_ms=_distribution(outcome.tpot_s for outcome in good),
        itl_ms=_distribution(itl for outcome in good for itl in outcome.itls_s()),
        e2e_ms=_distribution(outcome.e2e_s for outcome in good),
        errors=errors,
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of `ordered` lies, interpolated as numpy does by default."""
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _distribution(seconds: Iterable[float | None]) -> Distribution:
    ordered = sorted(value * 1000 for value in seconds if value is not None)
    if not ordered:
        return Distribution(None, None, None, None)
    return Distribution(
        mean=math.fsum(ordered) / len(ordered),
        median=percentile(ordered, 0.5),
        p90=percentile(ordered, 0.9),
        p99=percentile(ordered, 0.99),
    )
