# SPDX-License-Identifier: Apache-2.0
"""KV on a device that copies late: transfers end when copies have, which come behind the steps that they need.

The device of `pagoda_toy.far` leaves NaN wherever a copy was not awaited or not ordered.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from kv_ranks import NUM_BLOCKS as NUM_HANDED
from kv_sides import Side, cache_shape, handoff_plan
from small_objects import disk_under, small_manifest
from tier_server import COUNT, Server
from tiny_models import continuation, save_model

from pagoda.backend.base import KVCache
from pagoda.backend.kv_store import KVStore
from pagoda.errors import ConfigError
from pagoda.messages.transfers import (
    DeviceBlocks,
    HostSlots,
    TierBlocks,
    Transfer,
    TransferEnd,
    TransferPlace,
)
from pagoda.messages.worker_config import Role
from pagoda.parallel.config import ParallelConfig
from pagoda.plugins.disk_tier.objects import ObjectFiles, open_directory
from pagoda.plugins.disk_tier.transfers import tier_of
from pagoda.worker.kv.jobs import Jobs
from pagoda.worker.kv.memory import HostArena, slot_bytes
from pagoda.worker.kv.store import HostKVStore
from pagoda.worker.kv.transfers import KVTiers, TransferWorker

TOY = Path(__file__).parent.parent / "toy_backend"
NUM_BLOCKS, HEADS, BLOCK_SIZE, HEAD_DIM = 12, 2, 4, 8
ALL = range(NUM_BLOCKS)


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(TOY)
    from pagoda_toy import far

    module: ModuleType = far
    return module


class Rig:
    """A worker's tiers over a device with two layers, all of whose copies a test runs."""

    def __init__(self, far: ModuleType, root: Path) -> None:
        self.device = far.FarDevice()
        shape = (NUM_BLOCKS, HEADS, BLOCK_SIZE, HEAD_DIM)
        self.caches = [KVCache(*(self.device.new(shape) for _ in range(2))) for _ in range(2)]
        self.store = far.FarStore(self.device, self.caches)
        self.metadata = far.Metadata
        size = self.store.block_bytes
        manifest = small_manifest(size)
        files = ObjectFiles(open_directory(root, manifest), manifest)
        arena = HostArena(8 * slot_bytes(size), size)
        tiers = KVTiers(self.store, arena, {"disk": tier_of(files)})
        self._ended = threading.Semaphore(0)
        self.jobs = Jobs(self._ended.release)
        self.transfers = TransferWorker(tiers, None, self.jobs)
        self._num_begun = self.num_steps = 0

    def compute(self, *blocks: int, op: str = "rotate_and_cache") -> None:
        """A step that writes to blocks, or reads them; each token is the last of its block."""
        metadata = self.metadata(
            np.array([[block] for block in blocks]), np.full(len(blocks), BLOCK_SIZE - 1), None
        )
        for layer, cache in enumerate(self.caches):
            held = self.device.reach(op, cache, metadata)
            for block in blocks if op == "rotate_and_cache" else ():
                held.keys[block] = block + layer / 10
                held.values[block] = block + layer / 10 + 0.05

    def end_step(self) -> None:
        self.jobs.step_done(self.num_steps, self.store.computed())
        self.num_steps += 1

    def begin(self, source: TransferPlace, target: TransferPlace, after_step: int = -1) -> int:
        self._num_begun += 1
        self.transfers.start([Transfer(self._num_begun, 0, source, target, after_step)])
        return self._num_begun

    def end(self) -> TransferEnd:
        assert self._ended.acquire(timeout=20)
        (end,) = self.jobs.poll()
        return end

    def copies(self, count: int) -> list[Any]:
        """So many copies, once they have been submitted."""
        for _ in range(count):
            assert self.device.submitted.acquire(timeout=20)
        return list(self.device.copies)

    def held(self, block: int) -> set[float]:
        """What is in a block of the device."""
        parts = (part for cache in self.caches for part in (cache.keys, cache.values))
        return {
            round(float(value), 2)
            for part in parts
            for value in np.unique(self.device.memory(part).values[block])
        }


def content(block: int) -> set[float]:
    return {round(block + extra, 2) for extra in (0, 0.05, 0.1, 0.15)}


@pytest.fixture
def rig(far: ModuleType, tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(far, tmp_path)
    yield rig
    rig.device.is_held = False
    for copy in list(rig.device.copies):
        copy.run()
    rig.transfers.close()


@pytest.mark.parametrize(
    "there", [HostSlots([2, 3, 4, 5]), TierBlocks("disk", [bytes([n]) * 32 for n in range(4)])]
)
def test_blocks_go_to_a_tier_and_come_back(rig: Rig, there: TransferPlace) -> None:
    rig.compute(1, 2, 3, 4)
    rig.end_step()
    rig.begin(DeviceBlocks([1, 2, 3, 4]), there)
    assert rig.end().failed == []
    rig.begin(there, DeviceBlocks([8, 7, 6, 5]))
    assert rig.end().failed == []
    assert [rig.held(block) for block in (8, 7, 6, 5)] == [content(n) for n in (1, 2, 3, 4)]


def test_a_transfer_ends_when_the_device_has_copied_the_last_batch(rig: Rig) -> None:
    rig.compute(*ALL)
    rig.end_step()
    rig.device.is_held = True
    rig.begin(DeviceBlocks([0, 1, 2, 3]), HostSlots([0, 1, 2, 3]))
    (first,) = rig.copies(1)
    first.run()
    (second,) = rig.copies(1)
    assert rig.jobs.poll() == [], "three of four blocks are there"
    second.run()
    assert rig.end().failed == []
    load = rig.begin(HostSlots([0, 3]), DeviceBlocks([10, 11]))
    (third,) = rig.copies(1)
    assert rig.jobs.poll() == []
    third.run()
    assert rig.end().transfer_id == load
    assert (rig.held(10), rig.held(11)) == (content(0), content(3))


def test_copies_of_several_threads_end_in_any_order(rig: Rig) -> None:
    """One of a thread to host memory, and one of each that writes to disk."""
    rig.compute(*ALL)
    rig.end_step()
    rig.device.is_held = True
    begun = {}
    for number in range(3):
        target = HostSlots([0]) if number == 0 else TierBlocks("disk", [bytes([number]) * 32])
        transfer_id = rig.begin(DeviceBlocks([number]), target)
        begun[transfer_id] = rig.copies(1)[-1]
    for transfer_id in reversed(begun):
        assert rig.jobs.poll() == []
        begun[transfer_id].run()
        assert rig.end().transfer_id == transfer_id


def test_a_block_is_read_behind_the_step_that_wrote_it(rig: Rig) -> None:
    rig.compute(1)
    rig.end_step()
    rig.compute(2)  # which the worker does not know to be executed
    rig.begin(DeviceBlocks([1, 2]), HostSlots([0, 1]))
    assert rig.end().failed == []
    rig.begin(HostSlots([0, 1]), DeviceBlocks([5, 6]))
    assert rig.end().failed == []
    assert rig.held(5) == content(1)
    assert all(map(np.isnan, rig.held(6))), "the device must show what is not ordered"


def test_a_block_is_written_behind_the_last_step_that_uses_it(rig: Rig) -> None:
    rig.compute(1)
    rig.end_step()
    rig.begin(DeviceBlocks([1]), HostSlots([0]))
    rig.end()
    rig.compute(5)
    rig.begin(HostSlots([0]), DeviceBlocks([5]), after_step=2)
    rig.end_step()
    rig.compute(5, op="attention")
    assert rig.jobs.poll() == []
    rig.end_step()
    assert rig.end().failed == []
    assert rig.held(5) == content(1)


# ---- handoff


MakeSide = Callable[[str, Role, Sequence[str]], Side]


@pytest.fixture
def make_side(far: ModuleType, tmp_path: Path) -> Iterator[MakeSide]:
    save_model("qwen3", tmp_path)
    made: list[Side] = []

    def make(place: str, role: Role, transports: Sequence[str]) -> Side:
        plan = handoff_plan(tmp_path, role, transports, ParallelConfig())
        shape = cache_shape(plan)
        device, layers = far.FarDevice(), range(len(plan.shard.layers))
        store: KVStore
        if place == "device":
            store = far.FarStore(
                device, [KVCache(device.new(shape), device.new(shape)) for _ in layers]
            )
        else:
            store = HostKVStore([KVCache(torch.zeros(shape), torch.zeros(shape)) for _ in layers])
        made.append(Side(plan, store))
        return made[-1]

    yield make
    for side in made:
        side.worker.close()


@pytest.mark.parametrize(
    ("there", "here"), [("device", "host"), ("host", "device"), ("device", "device")]
)
def test_a_handoff_goes_through_host_memory(make_side: MakeSide, there: str, here: str) -> None:
    one, other = (
        make_side(place, role, ["shm", "tcp"])
        for place, role in ((there, Role.PREFILL), (here, Role.DECODE))
    )
    assert one.handoff.digest == other.handoff.digest
    one.fill()
    (rank,) = one.peer.ranks
    assert [*rank.descriptors] == ["tcp"], "there is no memory that processes share"
    other.add_peer(one.peer)
    other.jobs.step_done(0, other.store.computed())
    sources, targets = [3, 4, 5, 9, 0, 11], [0, 1, 2, 7, 8, 5]
    other.begin(sources, targets, after_step=0)
    end = other.end()
    assert (end.failed, end.error) == ([], "")
    assert [other.block(target) for target in targets] == [one.block(source) for source in sources]
    assert other.block(6) not in [one.block(block) for block in range(NUM_HANDED)]


def test_transports_that_do_not_reach_the_device_are_refused_with_the_reason(
    make_side: MakeSide,
) -> None:
    with pytest.raises(
        ConfigError, match="no transport of --kv-transports works on this host"
    ) as caught:
        make_side("device", Role.PREFILL, ["shm", "nixl"])
    text = str(caught.value)
    assert "shm: the KV cache lies on a device, and processes can share host memory only" in text
    assert "nixl: the KV cache lies on a device whose memory networks do not reach" in text


# ---- whole engines


@pytest.mark.usefixtures("far")
def test_answers_over_tiers_and_a_restart_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TOY), prepend=os.pathsep)
    model = save_model("qwen3", tmp_path / "model")
    prompts = [[(7 * at + 13 * seed) % 320 for at in range(90 - 7 * seed)] for seed in range(4)]
    expected = [continuation(model, prompt, COUNT) for prompt in prompts]
    options = {"backend": "far", "dtype": "float32", "kv_tiers": disk_under(tmp_path)}
    server = Server(tmp_path, ParallelConfig(), 16, kv_host_bytes=2**21, **options)
    for prompt, answer in zip(prompts, expected, strict=True):
        assert server.ask(prompt) == ([answer], 0)
    for prompt, answer in zip(prompts, expected, strict=True):
        answers, num_cached = server.ask(prompt)
        assert (answers, num_cached) == ([answer], (len(prompt) - 1) // 16 * 16)
    assert server.figure("host") > 0
    assert server.ask(*prompts)[0] == expected
    server.core.close()

    server = Server(tmp_path, ParallelConfig(), 16, **options)
    answers, num_cached = server.ask(prompts[1])
    assert (answers, num_cached) == (expected[1:2], 80)
    assert server.figure("disk") > 0
    server.core.close()
