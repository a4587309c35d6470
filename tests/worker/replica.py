# SPDX-License-Identifier: Apache-2.0
"""The workers of one replica as an engine would use them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import zmq

from pagoda.executor.base import ExecutorEvent, WorkerLost
from pagoda.executor.group import GroupExecutor
from pagoda.executor.launcher import LocalLauncher
from pagoda.ipc.clock import MonotonicClock
from pagoda.messages.frontend import TokenLogprobs, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.transfers import Transfer, TransferEnd, TransferPlace, Transfers
from pagoda.messages.worker import SlotStart, StepPlan, StepResult, WorkerReady
from pagoda.messages.worker_config import WorkerConfig
from pagoda.parallel.config import ParallelConfig

SAMPLING = SamplingParams(temperature=0, seed=0, max_tokens=8, logprobs=5)


def worker_config(model: Path, parallel: ParallelConfig, **options: object) -> WorkerConfig:
    return WorkerConfig(
        model=str(model),
        num_blocks=16,
        max_model_len=64,
        max_num_seqs=4,
        num_threads=1,
        parallel=parallel,
        workers_on_host=parallel.replica_size,
        **options,
    )


@dataclass
class Replica:
    """All workers of one, with the messages that an engine would send."""

    executor: GroupExecutor
    ready: WorkerReady
    generation: int
    num_steps: int = 0
    num_transfers: int = 0

    def answer(self, prompt: list[int], blocks: list[int], num_cached: int = 0) -> TokenLogprobs:
        """Computes the tokens behind those cached in the first blocks; the distribution of the next one."""
        start = SlotStart(0, prompt, len(prompt), num_cached, [blocks], Work(SAMPLING))
        plan = StepPlan(
            self.num_steps,
            [0],
            [len(prompt) - num_cached],
            [start],
            freed_slots=[0] if self.num_steps else [],
        )
        self.num_steps += 1
        self.executor.submit(plan)
        result = next_event(self.executor)
        assert isinstance(result, StepResult)
        assert not result.errors
        return result.logprobs[0][0]

    def copy(
        self, source: TransferPlace, target: TransferPlace, after_step: int = -1
    ) -> TransferEnd:
        transfer = Transfer(self.num_transfers, self.generation, source, target, after_step)
        self.num_transfers += 1
        self.executor.submit_transfers(Transfers([transfer]))
        end = next_event(self.executor)
        assert isinstance(end, TransferEnd)
        assert (end.transfer_id, end.generation) == (transfer.transfer_id, self.generation)
        return end


def next_event(executor: GroupExecutor) -> ExecutorEvent:
    while not (events := executor.poll()):
        sources = [(source, zmq.POLLIN) for source in executor.pollables()]
        assert zmq.zmq_poll(sources, 60_000), "no event"
    (event,) = events
    assert not isinstance(event, WorkerLost), event
    return event


def new_executor(config: WorkerConfig, directory: Path) -> GroupExecutor:
    return GroupExecutor(
        config,
        LocalLauncher(),
        address=f"ipc://{directory}/w",
        step_timeout_s=60.0,
        clock=MonotonicClock(),
    )
