# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable

from operations import assert_linear

from pagoda.fleet.totals import CounterHistory, counters_of, sum_of_loads
from pagoda.messages.load import LoadReport, ProcessMemory, ReplicaLoad, StepTotals, TierLoad


def replica(name: str, report: object) -> ReplicaLoad:
    return ReplicaLoad(name=name, state="ready", num_requests=0, weighed_tokens=0, report=report)  # type: ignore[arg-type]


def test_what_steps_did_adds_up_over_replicas() -> None:
    steps = StepTotals(num_tokens=5, num_sequences=2, by_tokens=[1, 1], by_sequences=[2])
    others = StepTotals(num_tokens=1, by_tokens=[0, 0, 4], schedule_s=0.5, update_s=0.25)
    engine, worker = ProcessMemory("engine dp0", 7, 10), ProcessMemory("worker dp1 tp0 pp0", 8, 20)
    first = LoadReport(num_generated_tokens=3, steps=steps, processes=(engine,))
    second = LoadReport(num_generated_tokens=4, steps=others, processes=(worker,))
    total = sum_of_loads(
        (replica("0", first), replica("1", second), replica("2", None)), num_unplaced=0
    )
    assert total.num_generated_tokens == 7
    assert total.steps == StepTotals(
        num_tokens=6,
        num_sequences=2,
        by_tokens=[1, 1, 4],
        by_sequences=[2],
        schedule_s=0.5,
        update_s=0.25,
    )
    assert total.processes == (engine, worker)


def counters(number: int) -> LoadReport:
    return LoadReport(
        num_steps=number,
        num_generated_tokens=number,
        num_engine_restarts=number,
        num_running=number,
        steps=StepTotals(num_tokens=number, by_tokens=[number]),
        expert_tokens=[number],
        tiers=(TierLoad(name="host", num_blocks=5, num_total_blocks=9, num_stored=number),),
        processes=(ProcessMemory("engine dp0", 7, 10),),
    )


def counted(report: LoadReport) -> int:
    """The one value that all counters of a report have."""
    [value] = {
        report.num_generated_tokens,
        report.num_engine_restarts,
        report.steps.num_tokens,
        *report.steps.by_tokens,
        *report.expert_tokens,
        *(tier.num_stored for tier in report.tiers),
    }
    return value


def test_counters_go_on_when_an_engine_is_lost() -> None:
    history = CounterHistory()
    assert history.counters is None
    seen = []
    # Each engine counts from zero; the second one counts more than the first before anybody asks.
    for engine in ([4, 5], [9], [0, 3]):
        for number in engine:
            report = history.update(counters(number))
            assert report.num_running == number
            assert report.tiers[0].num_blocks == 5
            assert len(report.processes) == 1
            seen.append(counted(report))
        history.on_engine_lost()
        seen.append(counted(history.counters or LoadReport()))
    assert seen == [4, 5, 5, 14, 14, 14, 17, 17]
    assert history.counters == counters_of(history.counters or LoadReport())


def test_a_replica_that_does_not_answer_still_counts() -> None:
    total = sum_of_loads(
        (replica("0", counters(2)), replica("1", None)),
        num_unplaced=0,
        counted=[counters_of(counters(3))],
    )
    assert total.num_generated_tokens == 5
    assert total.tiers[0].num_stored == 5
    assert total.tiers[0].num_blocks == 5
    assert total.num_running == 2
    assert len(total.processes) == 1


def test_sums_take_work_in_proportion_to_the_fleet() -> None:
    def add_up(num_replicas: int) -> Callable[[], object]:
        replicas = tuple(replica(str(number), counters(1)) for number in range(num_replicas))
        return lambda: sum_of_loads(replicas, num_unplaced=0)

    assert_linear(add_up, (50, 100, 200))
