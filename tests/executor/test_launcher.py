# SPDX-License-Identifier: Apache-2.0
"""Whom the end of a worker is blamed on."""

from __future__ import annotations

import os
import signal

import pytest
from worker_group import NAMES, SQUARE, MakeExecutor, next_event, pids

from pagoda.executor.base import WorkerLost
from pagoda.executor.launcher import MAX_FREE_ENDS, WINDOW_S, OutsideEnds
from pagoda.ipc.clock import VirtualClock


@pytest.mark.parametrize(
    ("number", "oom_kills", "suspicion"),
    [
        (signal.SIGKILL, (3, 3), 0),
        (signal.SIGKILL, (3, 4), 1),
        (signal.SIGKILL, (None, None), 1),
        (signal.SIGSEGV, (3, 3), 1),
    ],
    ids=["by a person", "by the kernel, for memory", "by nobody knows whom", "by a crash"],
)
def test_a_request_is_suspected_unless_the_worker_was_ended_from_outside(
    make_executor: MakeExecutor,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    oom_kills: tuple[int | None, int | None],
    suspicion: int,
) -> None:
    counts = iter(oom_kills)
    monkeypatch.setattr("pagoda.ipc.lifeline.count_oom_kills", lambda: next(counts))
    executor = make_executor("obeys")
    next_event(executor)
    (worker,) = pids(executor).values()
    os.kill(worker, number)
    lost = WorkerLost(f"the worker was killed by {number.name}", suspicion=suspicion)
    assert next_event(executor) == lost


def test_ranks_that_abort_because_of_one_that_was_killed_are_not_the_reason(
    make_executor: MakeExecutor,
) -> None:
    executor = make_executor("obeys", SQUARE)
    next_event(executor)
    for name, number in zip(NAMES, [signal.SIGABRT, signal.SIGKILL, signal.SIGABRT], strict=False):
        pid = pids(executor)[name]
        os.kill(pid, number)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    reason = "worker pp0 tp1 was killed by SIGKILL"
    assert next_event(executor) == WorkerLost(reason, suspicion=0)


def test_ends_from_outside_without_end_are_blamed_on_requests() -> None:
    clock = VirtualClock()
    ends = OutsideEnds(clock)

    def suspicion() -> int:
        return ends.loss("the worker was killed", is_from_outside=True).suspicion

    assert [suspicion() for _ in range(MAX_FREE_ENDS + 2)] == [0] * MAX_FREE_ENDS + [1, 1]
    assert ends.loss("the worker exited", is_from_outside=False) == WorkerLost("the worker exited")
    clock.advance_to(WINDOW_S + 1)
    assert suspicion() == 0
