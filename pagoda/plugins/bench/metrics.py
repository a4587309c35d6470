# SPDX-License-Identifier: Apache-2.0
"""The figures of a benchmark.

TTFT is the time from sending a request to its first token; TPOT the mean time of each further token of a request;
ITL the time between two stream events that carry tokens; E2E the time to the end of the answer.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pagoda.cli.answer import RequestTimes
from pagoda.errors import ConfigError

_GOALS = {"ttft": "ttft", "tpot": "tpot", "e2e": "e2e", "e2el": "e2e"}
"""Names of latencies in a goal."""


Goal = Mapping[str, float]
"""A service level: the most milliseconds that a latency, such as `ttft`, may take."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Statistics in milliseconds; all None when nothing was measured."""

    mean: float | None
    median: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class BenchReport:
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

    Raises ConfigError if a word is not such a limit.
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
    return limits or None


def _is_met(goal: Goal, outcome: RequestTimes) -> bool:
    """An answer without a token misses every goal; one of a single token has no TPOT to miss."""
    if not (outcome.event_times_s or outcome.output_tokens):
        return False
    values = {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s, "e2e": outcome.e2e_s}
    return all(
        value is None or value * 1000 <= goal.get(name, math.inf) for name, value in values.items()
    )


def summarize(
    outcomes: Sequence[RequestTimes], duration_s: float, goal: Goal | None
) -> BenchReport:
    """The figures of a run that took `duration_s`; failed requests count as failed only."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    prompt_tokens = sum(outcome.prompt_tokens for outcome in good)
    output_tokens = sum(outcome.output_tokens for outcome in good)
    return BenchReport(
        duration_s=duration_s,
        completed=len(good),
        failed=len(outcomes) - len(good),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        output_events=sum(len(outcome.event_times_s) for outcome in good),
        request_rate=len(good) / duration_s,
        output_token_rate=output_tokens / duration_s,
        total_token_rate=(prompt_tokens + output_tokens) / duration_s,
        goodput=None if goal is None else sum(_is_met(goal, it) for it in good) / duration_s,
        ttft_ms=_distribution(outcome.ttft_s for outcome in good),
        tpot_ms=_distribution(outcome.tpot_s for outcome in good),
        itl_ms=_distribution(
            later - earlier for it in good for earlier, later in pairwise(it.event_times_s)
        ),
        e2e_ms=_distribution(outcome.e2e_s for outcome in good),
        errors=Counter(it.error for it in outcomes if it.error is not None),
    )


def _distribution(seconds: Iterable[float | None]) -> Distribution:
    """Percentiles are interpolated as numpy does by default."""
    values = [value * 1000 for value in seconds if value is not None]
    if not values:
        return Distribution(None, None, None, None)
    # `quantiles` wants two values.
    cuts = statistics.quantiles(
        values if len(values) > 1 else values * 2, n=100, method="inclusive"
    )
    return Distribution(statistics.fmean(values), median=cuts[49], p90=cuts[89], p99=cuts[98])
