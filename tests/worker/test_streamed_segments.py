# SPDX-License-Identifier: Apache-2.0
"""Requests with cold segments, in host memory and on disk: the same bits as of those that lie in the cache."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from driver import Driver
from family_models import make_model as make_family
from small_objects import disk_under
from tiny_models import FAMILIES, save_model

from pagoda.faults.injector import Faults
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.transfers import DeviceBlocks, HostSlots, TierBlocks, Transfer
from pagoda.messages.worker import StepResult
from pagoda.messages.worker_config import WorkerConfig
from pagoda.telemetry.tracer import Tracer
from pagoda.worker.kv import segments
from pagoda.worker.kv.jobs import Jobs
from pagoda.worker.kv.transfers import TransferWorker, open_tiers, stream_segments
from pagoda.worker.loading import load_runner, plan_worker
from pagoda.worker.runner import Runner

SEGMENT = 128
PROMPT = [random.Random(1).randrange(320) for _ in range(440)]
OTHER = [random.Random(2).randrange(320) for _ in range(61)]
SAMPLING = SamplingParams(temperature=0, seed=0, max_tokens=10_000, logprobs=5)
FORMATS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
}
BACKENDS = ["reference", "cpu"]


class Rig:
    """A worker with both tiers, and an engine's word for where segments lie."""

    def __init__(self, directory: Path, faults: Faults | None = None, **options: Any) -> None:
        defaults: dict[str, Any] = {
            "num_blocks": 160,
            "max_num_seqs": 4,
            "num_threads": 2,
            "kv_host_bytes": 2**25,
            "kv_tiers": disk_under(directory),
            "segment_tokens": SEGMENT,
        }
        config = WorkerConfig(model=str(directory / "model"), **defaults | options)
        self.plan = plan_worker(config)
        loaded = load_runner(self.plan, Tracer("worker"))
        self.tiers = open_tiers(self.plan, loaded, faults)
        self.ready = stream_segments(self.plan, loaded, self.tiers, loaded.ready)
        assert isinstance(loaded.runner, Runner)
        self.driver = Driver(loaded.runner, num_blocks=160)
        self._ended = threading.Semaphore(0)
        self._jobs = Jobs(self._ended.release)
        self._transfers = TransferWorker(self.tiers, None, self._jobs)
        self._num_transfers = 0
        self._num_slots = 0
        self.num_cold: dict[tuple[int, int], int] = {}

    def close(self) -> None:
        self._transfers.close()

    def store(self, block_ids: list[int], place: HostSlots | TierBlocks) -> None:
        self._transfers.start([Transfer(self._num_transfers, 0, DeviceBlocks(block_ids), place)])
        self._num_transfers += 1
        assert self._ended.acquire(timeout=20)
        (end,) = self._jobs.poll()
        assert not end.failed, end.error

    def cool(self, slot: int, tier: str) -> None:
        """Stores the next segment of all groups that keep all, and spoils what is left in the cache."""
        for group, kind in enumerate(self.plan.kv_groups):
            if not kind.keeps_all:
                continue
            first = self.num_cold.get((slot, group), 0)
            self.num_cold[slot, group] = first + 1
            count = SEGMENT // kind.block_size
            block_ids = self.driver.blocks[slot][group][first * count : (first + 1) * count]
            place: HostSlots | TierBlocks
            if tier == "host":
                place = HostSlots(list(range(self._num_slots, self._num_slots + count)))
                self._num_slots += count
            else:
                keys = [bytes([slot, group, first, i]) + bytes(28) for i in range(count)]
                place = TierBlocks(tier, keys)
            self.store(block_ids, place)
            store = self.tiers.store
            store.write(block_ids, [memoryview(bytearray(b"\xff" * store.block_bytes))] * count)
            self.driver.cool(slot, group, place)

    def kv(self, slot: int, first: int, end: int) -> list[bytes]:
        """K and V of tokens that fill blocks, of all groups."""
        store, found = self.tiers.store, []
        for group, table in zip(self.plan.kv_groups, self.driver.blocks[slot], strict=True):
            for block in table[first // group.block_size : end // group.block_size]:
                copy = memoryview(bytearray(store.block_bytes))
                store.read([block], [copy]).wait()
                found.append(bytes(copy))
        return found

    def say(self, slots: list[int], count: int, chunk: int = 100) -> list[StepResult]:
        driver = self.driver
        begun = len(driver.results)
        driver.run(slots, count, chunk=chunk)
        return driver.results[begun:]


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    opened: list[Rig] = []
    yield opened
    for rig in opened:
        rig.close()


def save(name: str, directory: Path) -> None:
    if name in FAMILIES:
        save_model(name, directory / "model")
    else:
        make_family(name).save_pretrained(directory / "model")


def open_rig(rigs: list[Rig], directory: Path, **options: Any) -> Rig:
    rigs.append(Rig(directory, **options))
    return rigs[-1]


def told(results: list[StepResult], slot: int) -> list[tuple[list[int], list[float]]]:
    """Tokens of a slot, and log-probabilities of the likeliest."""
    return [
        (
            result.token_ids[result.slots.index(slot)],
            [*result.logprobs[slot][0].top_logprobs],
        )
        for result in results
        if slot in result.slots
    ]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("name", ["qwen3", "deepseek-v2-lite", "gemma2", "gpt-oss"])
def test_where_segments_lie_changes_no_bit(
    name: str, number_format: str, backend: str, tmp_path: Path, rigs: list[Rig]
) -> None:
    """Of prompts in chunks and of decoding, with another request beside; windows and states stay in the cache."""
    save(name, tmp_path)
    options = {"backend": backend, "max_model_len": 512, **FORMATS[number_format]}
    resident = open_rig(rigs, tmp_path, **options)
    resident.driver.start(0, PROMPT, SAMPLING)
    expected = resident.say([0], 8)
    resident.driver.start(1, OTHER, SAMPLING)
    beside = resident.say([1], 8)

    streamed = open_rig(rigs, tmp_path, **options)
    assert streamed.ready.segment_tokens == SEGMENT
    driver = streamed.driver
    driver.start(0, PROMPT, SAMPLING)
    driver.step({0: 150})
    streamed.cool(0, "host")
    driver.step({0: 110})
    streamed.cool(0, "disk")
    driver.start(1, OTHER, SAMPLING)
    driver.step({0: 60, 1: 61})
    driver.step({0: 99, 1: 1})
    streamed.cool(0, "host")
    found = driver.results[-2:] + streamed.say([0, 1], 8)
    assert told(found, 0) == told(expected, 0)
    assert told(found, 1) == told(beside, 1)
    assert streamed.kv(0, 384, 432) == resident.kv(0, 384, 432)
    groups = streamed.plan.streamed_groups
    parts = segments.place_parts(streamed.tiers.store)
    of_segment = sum(
        parts[place].num_bytes * SEGMENT // groups[group]
        for group, place in streamed.plan.layer_places
        if group in groups
    )
    assert driver.results[-1].streamed_bytes == 3 * of_segment
    assert driver.results[0].streamed_bytes == 0
