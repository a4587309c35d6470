"""What is counted of replicas that come and go."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from operations import assert_linear

from pagoda.api.progress import Growth, Progress
from pagoda.frontend.totals import sum_of_loads
from pagoda.messages.load import LoadReport, ReplicaLoad


def engine(prompt: int = 0, hits: int = 0, preemptions: int = 0, restarts: int = 0) -> LoadReport:
    return msgspec.structs.replace(
        sum_of_loads((), num_held=0),
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
    return sum_of_loads(tuple(replicas), num_held=0)


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
