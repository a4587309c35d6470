"""The local executor with a real child process over a real socket."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from pagoda.engine.messages import (
    SamplingParams,
    SlotStart,
    StepPlan,
    StepResult,
    WorkerConfig,
    WorkerReady,
)
from pagoda.executor.base import ExecutorEvent, WorkerLost
from pagoda.executor.group import GroupExecutor
from pagoda.executor.local import LocalLauncher
from pagoda.ipc.clock import MonotonicClock

PLAN = StepPlan(
    0, [0], [3], [SlotStart(0, [1, 2, 3], 3, 0, [0], SamplingParams(seed=1, max_tokens=4))]
)


@pytest.fixture
def make_executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    made: list[GroupExecutor] = []

    def make(model: str, step_timeout_s: float = 30.0) -> GroupExecutor:
        executor = GroupExecutor(
            WorkerConfig(model=model),
            LocalLauncher("worker_double"),
            address=f"ipc://{tmp_path / 'w'}",
            step_timeout_s=step_timeout_s,
            clock=MonotonicClock(),
        )
        made.append(executor)
        executor.start()
        return executor

    yield make
    for executor in made:
        executor.close()


def next_event(executor: GroupExecutor) -> ExecutorEvent:
    """Sleeps as the engine does: in one poll, woken by the executor's own sources and deadline."""
    clock = MonotonicClock()
    while True:
        events = executor.poll()
        if events:
            assert len(events) == 1
            return events[0]
        wakeup = executor.next_event_at()
        timeout_ms = 20_000 if wakeup is None else max(0, int((wakeup - clock.now()) * 1000) + 1)
        assert (
            zmq.zmq_poll([(s, zmq.POLLIN) for s in executor.pollables()], timeout_ms) or wakeup
        ), "no event"


def test_a_plan_is_answered(make_executor) -> None:  # type: ignore[no-untyped-def]
    executor = make_executor("obeys")
    assert isinstance(next_event(executor), WorkerReady)
    executor.submit(PLAN)
    result = next_event(executor)
    assert isinstance(result, StepResult)
    assert (result.step, result.slots) == (0, [0])


def test_a_killed_worker_is_noticed_and_replaced(make_executor) -> None:  # type: ignore[no-untyped-def]
    executor = make_executor("obeys")
    next_event(executor)
    os.kill(executor.workers.pids["the worker"], signal.SIGKILL)
    assert next_event(executor) == WorkerLost("the worker was killed by SIGKILL")
    assert executor.pollables() == []
    executor.start(num_blocks=7)
    ready = next_event(executor)
    assert isinstance(ready, WorkerReady)
    assert ready.num_blocks == 7


def test_a_worker_that_dies_of_a_step_is_noticed(make_executor) -> None:  # type: ignore[no-untyped-def]
    executor = make_executor("dies")
    next_event(executor)
    executor.submit(PLAN)
    assert next_event(executor) == WorkerLost("the worker was killed by SIGKILL")


def test_a_step_that_hangs_is_ended(make_executor) -> None:  # type: ignore[no-untyped-def]
    executor = make_executor("hangs", step_timeout_s=0.2)
    next_event(executor)
    pid = executor.workers.pids["the worker"]
    executor.submit(PLAN)
    assert next_event(executor) == WorkerLost("a step took longer than 0.2 s")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_worker_that_cannot_start_says_why(make_executor) -> None:  # type: ignore[no-untyped-def]
    assert next_event(make_executor("fails")) == WorkerLost("No such model.", is_user_error=True)
