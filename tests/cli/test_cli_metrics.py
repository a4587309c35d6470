from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.cli.answer import Outcome
from pagoda.cli.bench.metrics import parse_goal, summarize
from pagoda.errors import ConfigError


def _outcome(sent: float, *events: float, tokens: int | None = None) -> Outcome:
    return Outcome(
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


def test_an_answer_of_one_token_has_no_tpot() -> None:
    assert _outcome(0.0, 1.0).tpot_s is None


def test_report_counts_failures_apart() -> None:
    outcomes = [
        _outcome(0.0, 1.0, 2.0),
        Outcome(0.0, 0.1, error="boom"),
        Outcome(0.0, 0.2, error="boom"),
    ]
    report = summarize(outcomes, 2.0, None)
    assert (report.completed, report.failed) == (1, 2)
    assert report.errors == {"boom": 2}
    assert report.output_token_rate == pytest.approx(1.0)
    assert report.total_token_rate == pytest.approx(6.0)
    assert report.goodput is None
    assert report.ttft_ms.mean == pytest.approx(1000.0)


def test_nothing_measured_is_none_not_zero() -> None:
    report = summarize([Outcome(0.0, 0.1, error="boom")], 1.0, None)
    assert report.ttft_ms.mean is None
    assert report.e2e_ms.p99 is None


def test_goodput_needs_every_limit() -> None:
    goal = parse_goal(["ttft:600", "tpot:200"])
    outcomes = [_outcome(0.0, 0.5, 0.6), _outcome(0.0, 0.5, 0.9), _outcome(0.0, 0.7, 0.8)]
    assert summarize(outcomes, 1.0, goal).goodput == pytest.approx(1.0)


@pytest.mark.parametrize("word", ["ttft:1000", "tpot:1000", "e2e:1000"])
def test_an_answer_without_a_token_is_no_goodput(word: str) -> None:
    outcome = Outcome(sent_s=0.0, ended_s=0.1)
    assert summarize([outcome], 1.0, parse_goal([word])).goodput == 0.0


def test_an_answer_of_one_token_has_no_tpot_to_miss() -> None:
    goal = parse_goal(["ttft:600", "tpot:200"])
    assert summarize([_outcome(0.0, 0.5)], 1.0, goal).goodput == pytest.approx(1.0)
    assert summarize([_outcome(0.0, 0.7)], 1.0, goal).goodput == 0.0


def test_end_to_end_has_two_names() -> None:
    assert parse_goal(["e2el:3000"]) == parse_goal(["e2e:3000"])
    outcomes = [_outcome(0.0, 0.5, 2.9), _outcome(0.0, 0.5, 3.1)]
    assert summarize(outcomes, 1.0, parse_goal(["e2el:3000"])).goodput == pytest.approx(1.0)


@pytest.mark.parametrize(
    "word", ["ttft", "ttft:", "ttft:x", "ttft:0", "ttft:-5", "fast:3", "tpot:nan"]
)
def test_a_bad_goal_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="--goodput takes limits"):
        parse_goal([word])


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_percentiles_agree_with_numpy(values: list[float]) -> None:
    outcomes = [Outcome(0.0, value) for value in values]
    found = summarize(outcomes, 1.0, None).e2e_ms
    expected = numpy.quantile(values, (0.5, 0.9, 0.99)) * 1000
    assert (found.median, found.p90, found.p99) == pytest.approx(
        tuple(expected), rel=1e-9, abs=1e-9
    )
