# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from operations import assert_linear

from pagoda.api.monitoring.request_metrics import RequestMetrics
from pagoda.fleet.totals import sum_of_loads
from pagoda.messages.frontend import TokenChunk
from pagoda.messages.load import LoadReport, ReplicaLoad
from pagoda.plugins.page.live_stats import (
    MAX_REPLICAS,
    Growth,
    Latencies,
    LivePercentiles,
    Progress,
    sums_of_pools,
)
from pagoda.telemetry.request_tracker import ClientRequest, RequestTracker


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

    def ttft(self) -> LivePercentiles | None:
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
    assert ttft is not None
    assert itl is not None
    assert ttft.count == sum(metrics.total("time_to_first_token_seconds").counts) == 1
    assert itl.count == sum(metrics.total("inter_token_latency_seconds").counts) == 2
    assert metrics.total("time_to_first_token_seconds").sum == 0.5
    assert metrics.total("inter_token_latency_seconds").sum == pytest.approx(0.3)
    assert record.last_token_ns == 8 * 10**8


def engine(prompt: int = 0, hits: int = 0, preemptions: int = 0, restarts: int = 0) -> LoadReport:
    return msgspec.structs.replace(
        sum_of_loads((), num_unplaced=0),
        num_prompt_tokens=prompt,
        num_prefix_hit_tokens=hits,
        num_preemptions=preemptions,
        num_worker_restarts=restarts,
    )


def together(*reports: LoadReport | None, losses: int = 0) -> LoadReport:
    """Of replicas 0, 1 and so on; so many times each has lost its engine."""
    replicas = [
        ReplicaLoad(
            name=str(number),
            state="ready",
            num_requests=0,
            weighed_tokens=0,
            num_losses=losses,
            report=report,
        )
        for number, report in enumerate(reports)
    ]
    return sum_of_loads(tuple(replicas), num_unplaced=0)


def test_a_replica_that_misses_a_question_makes_no_spike() -> None:
    progress = Progress()
    assert progress.update(together(engine(100), engine(10**9)), 1.0, 0.0) == Growth(0, 0, 0.0)
    assert progress.update(together(engine(110), None), 2.0, 0.0) == Growth(10, 0, 10.0)
    # The other one tells of two seconds.
    told = together(engine(120, hits=5), engine(10**9 + 40))
    assert progress.update(told, 3.0, 0.0) == Growth(50, 5, 10.0 + 20.0)


def test_work_grows_with_the_fleet_and_no_faster() -> None:
    def update(num_replicas: int) -> Callable[[], object]:
        progress, report = Progress(), together(*[engine(1)] * num_replicas)
        return lambda: progress.update(report, 1.0, 0.0)

    assert_linear(update, (100, 200, 400))


def test_a_replica_that_was_not_seen_before_has_not_grown() -> None:
    progress = Progress()
    progress.update(together(engine(1), None), 1.0, 0.0)
    assert (
        progress.update(together(engine(1), engine(500, preemptions=2)), 2.0, 0.0).num_prompt_tokens
        == 0
    )
    assert progress.num_preemptions == 2
    # Nor has one that was seen before anybody watched.
    assert progress.update(together(engine(9), engine(509)), 60.0, 59.0) == Growth(0, 0, 0.0)


def test_a_pool_counts_hosts_that_the_list_leaves_out() -> None:
    busy = msgspec.structs.replace(engine(), num_running=3, num_waiting=1)
    report = together(*[busy] * (MAX_REPLICAS + 9), None)
    hosts = MAX_REPLICAS + 10
    sums = {"hosts": hosts, "num_running": 3 * hosts - 3, "num_waiting": hosts - 1}
    assert list(sums_of_pools(report).values()) == [sums]


def test_counts_of_an_engine_that_was_lost_still_count() -> None:
    progress = Progress()
    seen = []
    for report in (
        together(engine(7, preemptions=4, restarts=2)),
        together(None, losses=1),
        together(engine(0), losses=1),
        together(engine(3, preemptions=1), losses=1),
        together(None, losses=2),
    ):
        growth = progress.update(report, float(len(seen)), 0.0)
        assert growth.num_prompt_tokens >= 0
        seen.append((progress.num_preemptions, progress.num_restarts))
    assert seen == [(4, 2), (4, 3), (4, 3), (5, 3), (5, 4)]
