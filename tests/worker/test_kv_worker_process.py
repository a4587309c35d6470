# SPDX-License-Identifier: Apache-2.0
"""Blocks leave the device of real worker processes and come back, to others too: the same bits follow."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from replica import Replica, new_executor, next_event, worker_config
from small_objects import disk_under
from tiny_models import save_model

from pagoda.messages.transfers import DeviceBlocks, HostSlots, TierBlocks, TransferEnd
from pagoda.messages.worker import WorkerReady
from pagoda.parallel.config import ParallelConfig
from pagoda.plugins.disk_tier.objects import object_name

PROMPT, OTHER = ([random.Random(seed).randrange(320) for _ in range(40)] for seed in (1, 2))
KEYS = [bytes([number]) * 32 for number in (1, 2)]
"""Keys of the prompt's two full blocks."""
ONE = ParallelConfig()
SQUARE = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)


class Starter:
    """Starts workers on one directory, one set after another."""

    def __init__(self, directory: Path, parallel: ParallelConfig) -> None:
        save_model("qwen3", directory / "model")
        self.root = directory / "kv"
        tiers = {"kv_host_bytes": 2**18, "kv_tiers": disk_under(directory)}
        config = worker_config(directory / "model", parallel, **tiers)
        self._executor = new_executor(config, directory)
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
    num_ranks = len(replica.ready.kv_places)
    assert len({directory.path for directory in replica.ready.kv_places}) == num_ranks
    expected = replica.answer(PROMPT, [0, 1, 2])
    assert replica.copy(DeviceBlocks([0, 1]), HostSlots([3, 1])) == TransferEnd(0, 1)
    assert replica.copy(DeviceBlocks([0, 1]), TierBlocks("disk", KEYS)) == TransferEnd(1, 1)
    assert replica.answer(OTHER, [0, 1, 2]) != expected
    assert replica.copy(HostSlots([3, 1]), DeviceBlocks([5, 4]), after_step=1).failed == []
    assert replica.answer(PROMPT, [5, 4, 6], num_cached=32) == expected
    assert replica.answer(PROMPT, [0, 1, 6], num_cached=32) != expected  # blocks of the other

    successor = starter.start()
    assert successor.ready.kv_places == replica.ready.kv_places
    assert successor.copy(TierBlocks("disk", KEYS), DeviceBlocks([7, 8])).failed == []
    assert successor.answer(PROMPT, [7, 8, 9], num_cached=32) == expected
    assert successor.copy(TierBlocks("disk", KEYS[1:]), HostSlots([0])).failed == []
    assert successor.copy(HostSlots([0]), DeviceBlocks([2])).failed == []
    assert successor.answer(PROMPT, [7, 2, 9], num_cached=32) == expected

    last = Path(replica.ready.kv_places[-1].path) / object_name(KEYS[1])
    content = bytearray(last.read_bytes())
    content[2000] ^= 1
    last.write_bytes(content)
    end = successor.copy(TierBlocks("disk", KEYS), DeviceBlocks([10, 11]))
    assert end.failed == [1]
    assert "checksum" in end.error
    assert successor.answer(PROMPT, [10, 11, 12], num_cached=16) == expected
