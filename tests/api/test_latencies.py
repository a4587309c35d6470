from __future__ import annotations

import pytest

from pagoda.api.latencies import Latencies, Percentiles
from pagoda.api.request_metrics import RequestMetrics
from pagoda.frontend.request_tracker import ClientRequest, RequestTracker
from pagoda.messages.frontend import TokenChunk


class Answers:
    """Answers whose first tokens come after given times."""

    def __init__(self, num_windows: int) -> None:
        self.now_ns = 0
        self.tracker = RequestTracker(lambda: self.now_ns)
        self.latencies = Latencies(self.tracker, num_windows)

    def first_token_after(self, milliseconds: float) -> None:
        client_request = ClientRequest(id="a", arrived_ns=0)
        record = self.tracker.start("a", client_request, num_prompt_tokens=1, max_tokens=1)
        self.tracker.add_tokens(record, 1, round(milliseconds * 1e6))

    def ttft(self) -> Percentiles | None:
        return self.latencies.next_window()[0]


def test_percentiles_are_near_the_exact_ones() -> None:
    answers = Answers(1)
    assert answers.ttft() is None
    for milliseconds in range(1, 1001):
        answers.first_token_after(milliseconds)
    found = answers.ttft()
    assert found is not None
    assert (found.p50, found.p90, found.p99) == pytest.approx((500, 900, 990), rel=0.045)
    assert found.count == 1000


def test_windows_count_together_until_they_are_dropped() -> None:
    answers = Answers(2)
    answers.first_token_after(1)
    found = [answers.ttft() for _ in range(3)]
    assert [one and one.count for one in found] == [1, 1, None]
    answers.latencies.close()
    answers.first_token_after(1)
    assert answers.ttft() is None


def test_first_tokens_are_known_also_at_the_same_instant() -> None:
    metrics, tracker = RequestMetrics(), RequestTracker(lambda: 10**9)
    metrics.follow(tracker)
    latencies = Latencies(tracker, 1)
    record = tracker.start(
        "a", ClientRequest(id="a", arrived_ns=0), num_prompt_tokens=1, max_tokens=9
    )
    for count in (2, 3):
        tracker.on_chunk(record, TokenChunk("a", [7] * count, received_ns=5 * 10**8), count)
    tracker.on_chunk(record, TokenChunk("a", [7, 7], received_ns=8 * 10**8), 2)
    ttft, itl = latencies.next_window()
    figures = metrics.figures()
    assert ttft is not None
    assert itl is not None
    assert ttft.count == sum(figures.total("time_to_first_token_seconds").counts) == 1
    assert itl.count == sum(figures.total("inter_token_latency_seconds").counts) == 2
    assert figures.total("time_to_first_token_seconds").sum == 0.5
    assert figures.total("inter_token_latency_seconds").sum == pytest.approx(0.3)
    assert record.last_token_ns == 8 * 10**8
