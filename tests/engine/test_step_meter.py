from __future__ import annotations

from bisect import bisect_left

from harness import Harness, make_request

from pagoda.engine.step_meter import StepMeter
from pagoda.ipc.clock import VirtualClock
from pagoda.messages.load import STEP_SEQUENCE_BOUNDS, STEP_TOKEN_BOUNDS, StepTotals
from pagoda.messages.worker import StepPlan, StepResult


def plan(*num_tokens: int) -> StepPlan:
    return StepPlan(0, list(range(len(num_tokens))), list(num_tokens))


def result(step_time_s: float) -> StepResult:
    times = {"prepare_time_s": 0.25, "forward_time_s": 0.5, "sample_time_s": 0.125}
    return StepResult(0, [], [], step_time_s=step_time_s, **times)


def test_the_time_of_a_step_is_divided_among_its_phases() -> None:
    clock = VirtualClock()
    meter = StepMeter(clock)
    clock.advance_to(3.0)
    meter.submitted(plan(5, 1, 1), began=1.0, planned=2.5)
    clock.advance_to(6.5)
    meter.finished(result(step_time_s=1.0), taken=6.0)
    totals = meter.totals()
    assert totals.schedule_s == 1.5
    assert totals.submit_s == 0.5
    assert totals.wait_s == 2.0
    assert totals.update_s == 0.5
    assert (totals.prepare_s, totals.forward_s, totals.sample_s) == (0.25, 0.5, 0.125)
    assert (totals.num_tokens, totals.num_sequences) == (7, 3)


def test_steps_are_counted_by_the_bounds_that_they_keep() -> None:
    meter = StepMeter(VirtualClock())
    for sizes in ([1], [8], [4, 5], [16384], [16385]):
        meter.submitted(plan(*sizes), 0.0, 0.0)
        meter.finished(result(0.0), 0.0)
    totals = meter.totals()
    assert {STEP_TOKEN_BOUNDS[i]: n for i, n in enumerate(totals.by_tokens[:-1]) if n} == {
        1: 1,
        8: 1,
        16: 1,
        16384: 1,
    }
    assert totals.by_tokens[-1] == 1
    assert totals.by_sequences == [4, 1] + [0] * (len(STEP_SEQUENCE_BOUNDS) - 1)


def test_a_step_that_was_lost_is_not_mistaken_for_the_next_one() -> None:
    meter = StepMeter(VirtualClock())
    meter.submitted(plan(100), 0.0, 0.0)
    meter.lost()
    meter.submitted(plan(1), 0.0, 0.0)
    meter.finished(result(0.0), 0.0)
    assert meter.totals().num_tokens == 1


def test_before_the_first_step_a_report_carries_no_counts() -> None:
    assert StepMeter(VirtualClock()).totals() == StepTotals()


def test_an_engine_reports_its_steps() -> None:
    harness = Harness()
    harness.add(make_request("a", [1, 2, 3], max_tokens=4))
    harness.run()
    report = harness.core.load()
    assert report.num_generated_tokens == 4
    assert report.steps.num_tokens == 3 + 3
    assert sum(report.steps.by_tokens) == sum(report.steps.by_sequences) == report.num_steps == 4
    assert report.steps.by_tokens[bisect_left(STEP_TOKEN_BOUNDS, 3)] == 1
