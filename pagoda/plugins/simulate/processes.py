# SPDX-License-Identifier: Apache-2.0
"""The processes of a simulated replica, where it is known what they take: worker, engine and frontend."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagoda.ipc.clock import Clock
from pagoda.messages.engine_config import SimConfig
from pagoda.messages.frontend import EngineMessage, FrontendMessage, GenerateRequest, TokenChunks
from pagoda.messages.transfers import Transfers
from pagoda.messages.worker import StepPlan
from pagoda.plugins.sim.costs import step_time_s
from pagoda.plugins.sim.executor import SimExecutor
from pagoda.plugins.simulate.cores import Cores, SimProcess
from pagoda.plugins.simulate.step_times import Slowdown, StepTimes


@dataclass(frozen=True)
class Machine:
    """A machine on which a server runs."""

    cores: Cores
    frontend: SimProcess


class ReplicaProcesses:
    """Time that the processes of one replica take of a machine."""

    def __init__(self, machine: Machine, times: StepTimes, seed: str) -> None:
        """`seed` is that of the variation of steps."""
        self.machine = machine
        self.times = times
        self.engine = SimProcess(machine.cores)
        self._rng = random.Random(seed)

    def receive(self, message: EngineMessage, on_done: Callable[[], None]) -> None:
        """Calls `on_done` when the frontend has read a message of the engine."""
        seconds = 0.0
        if isinstance(message, TokenChunks):
            seconds = self.times.frontend.steps_s(1, len(message.chunks))
            seconds = self.slowdown().frontend.of(seconds)
        self.machine.frontend.do(seconds, on_done)

    def send(self, message: FrontendMessage, on_done: Callable[[], None]) -> None:
        """Calls `on_done` when the frontend has sent a message to the engine."""
        seconds = 0.0
        if isinstance(message, GenerateRequest):
            seconds = self.times.frontend.request_s(len(message.prompt_token_ids))
        self.machine.frontend.do(seconds, on_done)

    def slowdown(self, more_threads: int = 0) -> Slowdown:
        """The slowdown now, or once `more_threads` of workers compute."""
        return self.times.slowdown(self.machine.cores.load(more_threads))

    def draw(self) -> float:
        """A step's time as a share of what its costs say."""
        spread = self.times.spread
        if not spread:
            return 1.0
        place = self._rng.random() * (len(spread) - 1)
        index = int(place)
        return spread[index] + (place - index) * (spread[index + 1] - spread[index])


class WorkerExecutor:
    """An `Executor` over the simulated one, whose worker computes one step after the other on shared cores."""

    def __init__(
        self,
        inner: SimExecutor,
        config: SimConfig,
        clock: Clock,
        processes: ReplicaProcesses,
        on_done: Callable[[], None],
    ) -> None:
        """`on_done` is called behind each step."""
        self._inner = inner
        self._config = config
        self._clock = clock
        self._processes = processes
        self._on_done = on_done
        self._plans: deque[StepPlan] = deque()
        self._began = 0.0
        self._executed_step = -1
        self._transfers: deque[Transfers] = deque()
        """Transfers that wait for a step."""
        self.num_done = self.num_seqs_done = 0
        """Steps that have ended, and their requests, since the engine has last looked."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        if len(self._plans) == 1:
            self._begin(plan)

    def submit_transfers(self, message: Transfers) -> None:
        self._transfers.append(message)
        self._begin_transfers()

    def close(self) -> None:
        self._plans.clear()
        self._transfers.clear()
        self._inner.close()

    def _begin(self, plan: StepPlan) -> None:
        processes = self._processes
        seconds = step_time_s(self._config, plan, self._inner.worker.slots) * processes.draw()
        threads = processes.times.threads
        seconds = processes.slowdown(threads).worker.of(seconds)
        self._began = self._clock.now()
        processes.machine.cores.run(seconds, lambda: self._end(plan), threads)

    def _end(self, plan: StepPlan) -> None:
        if not self._plans or self._plans[0] is not plan:
            return  # the worker is gone
        self._plans.popleft()
        self._inner.submit_done(plan, self._clock.now() - self._began)
        self._executed_step = plan.step
        self.num_done += 1
        self.num_seqs_done += len(plan.slots)
        self._begin_transfers()
        if self._plans:
            self._begin(self._plans[0])
        self._on_done()

    def _begin_transfers(self) -> None:
        """Begins transfers whose steps have ended, in their order."""
        while self._transfers:
            last = max((it.after_step for it in self._transfers[0].transfers), default=-1)
            if last > self._executed_step:
                return
            self._inner.submit_transfers(self._transfers.popleft())
