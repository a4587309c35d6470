# SPDX-License-Identifier: Apache-2.0
"""What tests of `GroupExecutor` have in common."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence

import psutil
import zmq

from pagoda.executor.base import ExecutorEvent
from pagoda.executor.group import GroupExecutor
from pagoda.executor.launcher import LocalWorkers
from pagoda.ipc.clock import MonotonicClock
from pagoda.messages.frontend import Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import SlotStart, StepPlan
from pagoda.parallel.config import ParallelConfig

PLAN = StepPlan(
    0, [0], [3], [SlotStart(0, [1, 2, 3], 3, 0, [[0]], Work(SamplingParams(seed=1, max_tokens=4)))]
)
PAIR = ParallelConfig(tensor_parallel_size=2)
SQUARE = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
NAMES = ["worker pp0 tp0", "worker pp0 tp1", "worker pp1 tp0", "worker pp1 tp1"]

MakeExecutor = Callable[..., GroupExecutor]


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


def pids(executor: GroupExecutor) -> dict[str, int]:
    workers = executor.workers
    assert isinstance(workers, LocalWorkers)
    return workers.pids


def stop(child: int) -> None:
    """Returns once a child process stands still."""
    os.kill(child, signal.SIGSTOP)
    os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOWAIT)


def assert_gone(several: Sequence[int]) -> None:
    """Returns once these killed children are gone; whoever ended them does not wait."""
    while any(map(psutil.pid_exists, several)):
        time.sleep(0.01)
