# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.cli.answer import RequestTimes
from pagoda.errors import ConfigError
from pagoda.plugins.bench.metrics import parse_goal, summarize


def _outcome(sent: float, *events: float, tokens: int | None = None) -> RequestTimes:
    return RequestTimes(
        sent_s=sent,
        ended_s=events[-1],
        event_times_s=events,
        prompt_tokens=10,
        output_tokens=len(events) if tokens is None else tokens,
    )


def test_latencies_of_one_request() -> None:
    outcome = _outcome(1.0, 1.5, 1.6, 1.8)
    assert outcome.ttft_s == pytest.approx(0.5)
    assert outcome.tpot_s == pytest.approx(0.15)
    assert summarize([outcome], 1.0, None).itl_ms.mean == pytest.approx(150)
    assert outcome.e2e_s == pytest.approx(0.8)


def test_tpot_counts_tokens_rather_than_events() -> None:
    assert _outcome(0.0, 1.0, 2.0, tokens=5).tpot_s == pytest.approx(0.25)
    assert _outcome(0.0, 1.0).tpot_s is None


def test_report_counts_failures_apart() -> None:
    outcomes = [
        _outcome(0.0, 1.0, 2.0),
        RequestTimes(0.0, 0.1, error="boom"),
        RequestTimes(0.0, 0.2, error="boom"),
    ]
    report = summarize(outcomes, 2.0, None)
    assert summarize(outcomes[1:], 2.0, None).ttft_ms.mean is None, "not 0: none was measured"
    assert (report.completed, report.failed) == (1, 2)
    assert report.errors == {"boom": 2}
    assert report.output_token_rate == pytest.approx(1.0)
    assert report.total_token_rate == pytest.approx(6.0)
    assert report.goodput is None
    assert report.ttft_ms.mean == pytest.approx(1000.0)


@pytest.mark.parametrize(
    ("words", "outcome", "is_good"),
    [
        ("ttft:600 tpot:200", _outcome(0.0, 0.5, 0.6), True),
        ("ttft:600 tpot:200", _outcome(0.0, 0.5, 0.9), False),
        ("ttft:600 tpot:200", _outcome(0.0, 0.7, 0.8), False),
        ("ttft:600 tpot:200", _outcome(0.0, 0.5), True),  # one token has no TPOT to miss
        ("ttft:600 tpot:200", _outcome(0.0, 0.7), False),
        ("e2el:3000", _outcome(0.0, 0.5, 2.9), True),
        ("e2e:3000", _outcome(0.0, 0.5, 3.1), False),
        *((f"{name}:1000", RequestTimes(0.0, 0.1), False) for name in ("ttft", "tpot", "e2e")),
        ("e2e:1000", RequestTimes(0.0, 0.1, error="boom"), False),
    ],
)
def test_goodput_needs_every_limit(words: str, outcome: RequestTimes, is_good: bool) -> None:
    report = summarize([outcome], 1.0, parse_goal(words.split()))
    assert report.goodput == float(is_good)


@pytest.mark.parametrize(
    "word", ["ttft", "ttft:", "ttft:x", "ttft:0", "ttft:-5", "fast:3", "tpot:nan"]
)
def test_a_bad_goal_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="--goodput takes limits"):
        parse_goal([word])


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_percentiles_agree_with_numpy(values: list[float]) -> None:
    outcomes = [RequestTimes(0.0, value) for value in values]
    found = summarize(outcomes, 1.0, None).e2e_ms
    expected = numpy.quantile(values, (0.5, 0.9, 0.99)) * 1000
    assert (found.median, found.p90, found.p99) == pytest.approx(
        tuple(expected), rel=1e-9, abs=1e-9
    )
