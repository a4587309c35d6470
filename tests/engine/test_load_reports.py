from __future__ import annotations

from pagoda.engine.load_reports import REPORT_INTERVAL_S, LoadReportSchedule
from pagoda.ipc.clock import VirtualClock


def test_steps_are_reported_once_within_the_interval() -> None:
    clock = VirtualClock()
    schedule = LoadReportSchedule(clock)
    assert schedule.next_event_at() is None
    assert not schedule.is_due(1, is_worker_ready=True)
    assert schedule.next_event_at() == REPORT_INTERVAL_S
    clock.advance_to(REPORT_INTERVAL_S / 2)
    assert not schedule.is_due(2, is_worker_ready=True)
    clock.advance_to(REPORT_INTERVAL_S)
    assert schedule.is_due(3, is_worker_ready=True)
    # An engine that has reported all of its steps need not wake up.
    assert not schedule.is_due(3, is_worker_ready=True)
    assert schedule.next_event_at() is None


def test_a_lost_worker_is_reported_at_once() -> None:
    schedule = LoadReportSchedule(VirtualClock())
    assert schedule.is_due(1, is_worker_ready=False)
    assert not schedule.is_due(1, is_worker_ready=False)
    assert schedule.is_due(1, is_worker_ready=True)
