# SPDX-License-Identifier: Apache-2.0
"""Requests with cold segments, in host memory and on disk: the same bits as of those that lie in the cache."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from driver import Driver
from family_models import make_model as make_family
from small_objects import disk_under
from tiny_models import FAMILIES, save_model

from pagoda.errors import ConfigError
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.segments import ColdSegment
from pagoda.messages.transfers import DeviceBlocks, HostSlots, TierBlocks, Transfer
from pagoda.messages.worker import StepResult
from pagoda.messages.worker_config import WorkerConfig
from pagoda.parallel.config import ParallelConfig
from pagoda.plugins.disk_tier.objects import object_name
from pagoda.telemetry.tracer import Tracer
from pagoda.worker.kv import segments, staging
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

    def __init__(self, directory: Path, **options: Any) -> None:
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
        self.tiers = open_tiers(self.plan, loaded)
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


def cooled(rigs: list[Rig], directory: Path, *tiers: str, **options: Any) -> Rig:
    """A rig of which slot 0 has computed 300 tokens, with cold segments, and slot 1 begins."""
    rig = open_rig(rigs, directory, backend="cpu", max_model_len=512, **options)
    rig.driver.start(0, PROMPT, SAMPLING)
    rig.driver.step({0: 300})
    for tier in tiers:
        rig.cool(0, tier)
    rig.driver.start(1, OTHER, SAMPLING)
    return rig


def answers_alone(rigs: list[Rig], directory: Path) -> tuple[Any, Any]:
    """What is told of both prompts where nothing streams."""
    rig = open_rig(rigs, directory, backend="cpu", max_model_len=512)
    rig.driver.start(0, PROMPT, SAMPLING)
    first = rig.say([0], 4)
    rig.driver.start(1, OTHER, SAMPLING)
    return told(first, 0), told(rig.say([1], 4), 1)


def object_path(rig: Rig, first: int, index: int) -> Path:
    """File of a block of a segment of slot 0."""
    directory = Path(rig.tiers.further["disk"].place.path)
    return directory / object_name(bytes([0, 0, first, index]) + bytes(28))


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def assert_slot_0_is_lost(rig: Rig, reason: str, beside: Any, first: int) -> None:
    """The slot says nothing from the next step on, whatever it is to compute; the other one says what it would."""
    driver = rig.driver
    results = [driver.step({0: 100, 1: 61}), driver.step({0: 20, 1: 1}), driver.step({1: 1})]
    for result in results[:2]:
        assert list(result.lost_segments) == [0]
        lost = result.lost_segments[0]
        assert reason in lost.reason
        assert (lost.first, lost.hangs) == (first, reason == "not answered")
        assert not result.errors
        assert result.slots == [1]
    assert not results[2].lost_segments
    assert told(results, 1) == beside[:3]
    assert results[1].streamed_bytes == 0
    driver.free(0)


@pytest.mark.parametrize("case", ["gone", "damaged", "damaged later", "of another model"])
def test_a_segment_that_cannot_be_read_harms_its_request_alone(
    case: str, tmp_path: Path, rigs: list[Rig]
) -> None:
    save("qwen3", tmp_path)
    alone, beside = answers_alone(rigs, tmp_path)
    rig = cooled(rigs, tmp_path, "host", "disk")
    driver = rig.driver
    path = object_path(rig, 1, 3)
    reason = "has changed"
    match case:
        case "gone":
            path.unlink()
            reason = "not there any more"
        case "damaged":
            flip(path, 3000)
            reason = "checksum is wrong"
        case "damaged later":
            driver.step({0: 20})
            flip(path, 3000)
        case _:
            path.write_bytes(bytes(4096))
            reason = "has 4096 bytes"
    assert_slot_0_is_lost(rig, reason, beside, first=1)
    driver.start(0, PROMPT, SAMPLING)
    assert told(rig.say([0], 4), 0) == alone


class Hanging:
    """Parts of a tier that does not answer until it may."""

    def __init__(self, parts: staging.TierParts) -> None:
        self._parts = parts
        self.begins = parts.begins
        self.may_answer = threading.Event()
        self.asked = threading.Event()

    def open_reader(self) -> staging.PartReader:
        reader = self._parts.open_reader()
        gate, asked = self.may_answer, self.asked

        class Reader:
            def read(self, key: bytes, place: int, into: memoryview) -> None:
                asked.set()
                assert gate.wait(60)
                reader.read(key, place, into)

        return Reader()


def hang(rig: Rig) -> Hanging:
    """Lets the disk hang until it may answer."""
    runner = rig.driver.runner
    assert isinstance(runner, Runner)
    assert runner.batch.streams is not None
    tiers = runner.batch.streams.tiers
    assert isinstance(tiers, dict)
    hanging = tiers["disk"] = Hanging(tiers["disk"])
    return hanging


def test_a_slow_tier_takes_its_time_and_harms_nobody(tmp_path: Path, rigs: list[Rig]) -> None:
    save("qwen3", tmp_path)
    alone, _ = answers_alone(rigs, tmp_path)
    rig = cooled(rigs, tmp_path, "disk", "host")
    slow = hang(rig)
    answering = threading.Thread(target=lambda: slow.asked.wait(60) and slow.may_answer.set())
    answering.start()
    assert told(rig.say([0], 4), 0) == alone
    answering.join()


def test_a_tier_that_hangs_is_not_asked_until_it_answers(
    tmp_path: Path, rigs: list[Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    save("qwen3", tmp_path)
    alone, beside = answers_alone(rigs, tmp_path)
    rig = cooled(rigs, tmp_path, "disk", "host")
    hanging = hang(rig)
    monkeypatch.setattr(staging, "PATIENCE_S", 0.05)
    monkeypatch.setattr(staging, "_FAREWELL_S", 0.05)
    assert_slot_0_is_lost(rig, "not answered", beside, first=0)
    monkeypatch.undo()
    hanging.may_answer.set()
    for thread in threading.enumerate():
        if thread.name.startswith("kv-segment"):
            thread.join()
    rig.num_cold.clear()
    rig.driver.start(0, PROMPT, SAMPLING)
    rig.driver.step({0: 300})
    rig.cool(0, "disk")
    assert told(rig.say([0], 4), 0) == alone


def test_staging_and_sums_count_in_the_memory_plan(tmp_path: Path) -> None:
    """Staging is bounded by two parts of a segment, whatever contexts are."""
    save("qwen3", tmp_path)
    config = WorkerConfig(model=str(tmp_path / "model"), num_blocks=64, segment_tokens=SEGMENT)
    none = plan_worker(config)
    assert none.streaming_bytes == 0
    assert none.streamed_groups == {}
    both = plan_worker(
        msgspec.structs.replace(config, kv_host_bytes=2**20, kv_tiers=disk_under(tmp_path))
    )
    blocks, layer = SEGMENT // 16, both.kv_bytes_per_token * 16 // len(both.shard.layers)
    halves = 2 * blocks * staging.part_room(layer)
    of_tokens = both.step_tokens * 4 * (32 + 2) * 4
    assert both.streaming_bytes == halves + of_tokens
    assert both.step_bytes - none.step_bytes == both.streaming_bytes


@pytest.mark.parametrize(
    "change",
    [
        {"kv_host_bytes": 0, "kv_tiers": {}},
        {"block_size": 384},
        {"parallel": ParallelConfig(tensor_parallel_size=2, dp_attention=True)},
    ],
    ids=["no tiers", "blocks that cut segments", "ranks with requests of their own"],
)
def test_workers_that_cannot_stream(change: dict[str, Any], tmp_path: Path) -> None:
    save("qwen3", tmp_path)
    config = WorkerConfig(
        model=str(tmp_path / "model"), num_blocks=64, segment_tokens=SEGMENT, kv_host_bytes=2**20
    )
    assert plan_worker(config).streamed_groups == {0: 16}
    assert plan_worker(msgspec.structs.replace(config, **change)).streamed_groups == {}


def test_segments_are_powers_of_two(tmp_path: Path) -> None:
    save("qwen3", tmp_path)
    for wrong in (64, 192):
        with pytest.raises(ConfigError, match=f"power of two of 128 or more, got {wrong}"):
            plan_worker(WorkerConfig(model=str(tmp_path / "model"), segment_tokens=wrong))


def test_places_that_a_worker_lacks(tmp_path: Path, rigs: list[Rig]) -> None:
    save("qwen3", tmp_path)
    rig = cooled(rigs, tmp_path, kv_tiers={})
    runner = rig.driver.runner
    assert isinstance(runner, Runner)
    for place in (TierBlocks("disk", [bytes(32)] * 8), HostSlots([0] * 7)):
        with pytest.raises(
            ValueError, match=r"slot 0 in . blocks of group 0 .* cannot be streamed"
        ):
            runner.batch.add_cold(ColdSegment(0, 0, place))
    for _ in range(300 // SEGMENT):
        runner.batch.add_cold(ColdSegment(0, 0, HostSlots([0] * 8)))
    with pytest.raises(ValueError, match="is cold that is not computed"):
        runner.batch.add_cold(ColdSegment(0, 0, HostSlots([0] * 8)))
