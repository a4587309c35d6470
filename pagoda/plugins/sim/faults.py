# SPDX-License-Identifier: Apache-2.0
"""Faults of simulated workers, in the time of the simulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from pagoda.executor.base import (
    STEP_TIMEOUT_SUSPICION,
    Executor,
    ExecutorEvent,
    WorkerLost,
)
from pagoda.faults.injector import Fault, FaultPlan, Faults, instance
from pagoda.ipc.clock import Clock
from pagoda.messages.worker import StepPlan, StepResult
from pagoda.plugins.sim.executor import SimExecutor

_DEATHS = {
    "kill": "the worker was killed by SIGKILL",
    "crash": "the worker was killed by SIGSEGV",
    "raise": "the worker exited with code 1",
    "oom": "the worker exited with code 1",
}


def with_faults(
    executor: SimExecutor, clock: Clock, plan: FaultPlan | None, step_timeout_s: float
) -> Executor:
    """`executor` with the faults that are planned for its workers; as it is if there are none."""
    return executor if plan is None else FaultySimExecutor(executor, clock, plan, step_timeout_s)


class FaultySimExecutor:
    """Passes `worker.step` with each step and `worker.result` with each result. Workers that stop, hang, or whose
    result is lost are lost when `step_timeout_s` is over."""

    def __init__(
        self, inner: SimExecutor, clock: Clock, plan: FaultPlan, step_timeout_s: float
    ) -> None:
        self._inner = inner
        self._clock = clock
        self._plan = plan
        self._step_timeout_s = step_timeout_s
        self._num_starts = 0
        self._results: list[StepResult] = []
        self._pass_result: Callable[[StepResult], None] = self._results.append
        self._num_in_flight = 0
        self._is_broken = False
        self._due: dict[int, Fault] = {}
        """Faults of steps under way."""
        self._loss: tuple[float, WorkerLost] | None = None
        """Time at which the worker is lost."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def start(self, num_blocks: int | None = None) -> None:
        self._num_starts += 1
        faults = Faults(instance(self._plan, self._num_starts))
        self._step = faults.point("worker.step")
        self._pass_result = faults.messages("worker.result", self._results.append)
        self._num_in_flight, self._is_broken, self._loss = 0, False, None
        self._due.clear()
        self._results.clear()
        self._names: dict[int, str] = {}
        self._inner.start(num_blocks)

    def submit(self, plan: StepPlan) -> None:
        for start in plan.starts:
            self._names[start.slot] = start.request_id
        due = [] if self._step is None else self._step.due(self._names[slot] for slot in plan.slots)
        self._num_in_flight += 1
        self._expect_result()
        self._inner.submit(plan)
        deadly = [fault for fault in due if fault.action != "slow"]
        if deadly:
            self._due[plan.step] = deadly[0]

    def _break(self, fault: Fault) -> None:
        """The worker computes nothing from this step on."""
        self._is_broken = True
        if fault.action in _DEATHS:
            self._loss = self._clock.now(), WorkerLost(_DEATHS[fault.action])

    def _expect_result(self) -> None:
        loss = WorkerLost(
            f"a step took longer than {self._step_timeout_s:g} s", suspicion=STEP_TIMEOUT_SUSPICION
        )
        self._loss = self._clock.now() + self._step_timeout_s, loss

    def poll(self) -> list[ExecutorEvent]:
        events: list[ExecutorEvent] = []
        for event in self._inner.poll():
            if not isinstance(event, StepResult):
                events.append(event)
            elif event.step in self._due:
                self._break(self._due[event.step])
            elif not self._is_broken:
                self._pass_result(event)
        for result in self._results:
            self._num_in_flight -= 1
            self._loss = None
            if self._num_in_flight > 0:
                self._expect_result()
            events.append(msgspec.structs.replace(result))
        self._results.clear()
        if self._loss is not None and self._clock.now() >= self._loss[0]:
            self._inner.close()
            events.append(self._loss[1])
            self._loss = None
        return events

    def next_event_at(self) -> float | None:
        instants = [self._inner.next_event_at(), self._loss[0] if self._loss else None]
        return min((at for at in instants if at is not None), default=None)
