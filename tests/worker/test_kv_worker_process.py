"""Blocks leave the device of real worker processes and come back, to others too: the same bits follow."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq
from tiny_models import save_model

from pagoda.engine.messages import (
    DeviceBlocks,
    DiskObjects,
    HostSlots,
    SamplingParams,
    SlotStart,
    StepPlan,
    StepResult,
    TokenLogprobs,
    Transfer,
    TransferEnd,
    TransferPlace,
    WorkerConfig,
    WorkerReady,
)
from pagoda.executor.base import ExecutorEvent, WorkerLost
from pagoda.executor.group import GroupExecutor
from pagoda.executor.local import LocalLauncher
from pagoda.ipc.clock import MonotonicClock
from pagoda.kv.objects import object_name
from pagoda.parallel.config import ParallelConfig

SAMPLING = SamplingParams(temperature=0, seed=0, max_tokens=8, logprobs=5)
PROMPT, OTHER = ([random.Random(seed).randrange(320) for _ in range(40)] for seed in (1, 2))
KEYS = [bytes([number]) * 32 for number in (1, 2)]
"""Of the prompt's two full blocks."""
ONE = ParallelConfig()
SQUARE = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)


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
        start = SlotStart(0, prompt, len(prompt), num_cached, blocks, SAMPLING)
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
        return result.logprobs[0]

    def copy(
        self, source: TransferPlace, target: TransferPlace, after_step: int = -1
    ) -> TransferEnd:
        transfer = Transfer(self.num_transfers, self.generation, source, target, after_step)
        self.num_transfers += 1
        self.executor.submit_transfers([transfer])
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


class Starter:
    """Starts workers on one directory, one set after another."""

    def __init__(self, directory: Path, parallel: ParallelConfig) -> None:
        save_model("qwen3", directory / "model")
        self.root = directory / "kv"
        config = WorkerConfig(
            model=str(directory / "model"),
            num_blocks=16,
            max_model_len=64,
            max_num_seqs=4,
            num_threads=1,
            parallel=parallel,
            workers_on_host=parallel.replica_size,
            kv_host_bytes=2**18,
            kv_disk_path=str(self.root),
        )
        self._executor = GroupExecutor(
            config,
            LocalLauncher(),
            address=f"ipc://{directory}/w",
            step_timeout_s=60.0,
            clock=MonotonicClock(),
        )
        self._num_starts = 0

    def start(self) -> Replica:
        self.close()
        self._executor.start()
        ready = next_event(self._executor)
        assert isinstance(ready, WorkerReady)
        self._num_starts += 1
        return Replica(self._executor, ready, self._num_starts)

    def close(self) -> None:
        self._executor.close()


@pytest.fixture(params=[ONE, SQUARE], ids=["one", "square"])
def starter(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Starter]:
    starter = Starter(tmp_path, request.param)
    yield starter
    starter.close()


def test_the_same_bits_follow_from_blocks_that_come_back(starter: Starter) -> None:
    replica = starter.start()
    num_ranks = len(replica.ready.kv_directories)
    assert len({directory.path for directory in replica.ready.kv_directories}) == num_ranks
    expected = replica.answer(PROMPT, [0, 1, 2])
    assert replica.copy(DeviceBlocks([0, 1]), HostSlots([3, 1])) == TransferEnd(0, 1)
    assert replica.copy(DeviceBlocks([0, 1]), DiskObjects(KEYS)) == TransferEnd(1, 1)
    assert replica.answer(OTHER, [0, 1, 2]) != expected
    assert replica.copy(HostSlots([3, 1]), DeviceBlocks([5, 4]), after_step=1).failed == []
    assert replica.answer(PROMPT, [5, 4, 6], num_cached=32) == expected
    assert replica.answer(PROMPT, [0, 1, 6], num_cached=32) != expected  # blocks of the other

    successor = starter.start()
    assert successor.ready.kv_directories == replica.ready.kv_directories
    assert successor.copy(DiskObjects(KEYS), DeviceBlocks([7, 8])).failed == []
    assert successor.answer(PROMPT, [7, 8, 9], num_cached=32) == expected
    assert successor.copy(DiskObjects(KEYS[1:]), HostSlots([0])).failed == []
    assert successor.copy(HostSlots([0]), DeviceBlocks([2])).failed == []
    assert successor.answer(PROMPT, [7, 2, 9], num_cached=32) == expected

    last = Path(replica.ready.kv_directories[-1].path) / object_name(KEYS[1])
    content = bytearray(last.read_bytes())
    content[2000] ^= 1
    last.write_bytes(content)
    end = successor.copy(DiskObjects(KEYS), DeviceBlocks([10, 11]))
    assert end.failed == [1]
    assert "checksum" in end.error
    assert successor.answer(PROMPT, [10, 11, 12], num_cached=16) == expected
