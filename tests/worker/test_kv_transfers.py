# SPDX-License-Identifier: Apache-2.0
"""The worker's half of the tiers: real threads and files; transfers end once, with what came of each block."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from small_objects import small_manifest

from pagoda.backend.kv_store import DONE, DeviceEvent
from pagoda.messages.transfers import (
    DeviceBlocks,
    HostSlots,
    TierBlocks,
    Transfer,
    TransferEnd,
    TransferPlace,
)
from pagoda.plugins.disk_tier import transfers
from pagoda.plugins.disk_tier.objects import ObjectFiles, object_name, open_directory
from pagoda.plugins.disk_tier.transfers import tier_of
from pagoda.worker.kv.jobs import Jobs
from pagoda.worker.kv.memory import HostArena
from pagoda.worker.kv.transfers import KVTiers, TransferWorker

BLOCK_BYTES = 5000
NUM_BLOCKS = 8


class Memory:
    """Blocks in a list."""

    block_bytes = BLOCK_BYTES
    batch_blocks = 1

    def __init__(self) -> None:
        self.blocks = [bytes([65 + index]) * BLOCK_BYTES for index in range(NUM_BLOCKS)]
        self.gate = threading.Event()
        """Reads of block 7 wait for it."""
        self.is_waiting = threading.Event()
        """One of them does."""
        self.touched: list[tuple[str, int]] = []

    def read(
        self, block_ids: list[int], into: list[memoryview], after: DeviceEvent = DONE
    ) -> DeviceEvent:
        [block_id], [buffer] = block_ids, into
        assert after is DONE
        if block_id == 7:
            self.is_waiting.set()
            assert self.gate.wait(20)
        self.touched.append(("read", block_id))
        buffer[:] = self.blocks[block_id]
        return DONE

    def write(
        self, block_ids: list[int], sources: list[memoryview], after: DeviceEvent = DONE
    ) -> DeviceEvent:
        [block_id], [source] = block_ids, sources
        assert after is DONE
        self.touched.append(("write", block_id))
        self.blocks[block_id] = bytes(source)
        return DONE


class Rig:
    def __init__(self, root: Path) -> None:
        self.memory = Memory()
        manifest = small_manifest(BLOCK_BYTES)
        self.directory = open_directory(root, manifest)
        self._ended = threading.Semaphore(0)
        files = ObjectFiles(self.directory, manifest)
        self.arena = HostArena(4 * 5056, BLOCK_BYTES)
        tiers = KVTiers(self.memory, self.arena, {"disk": tier_of(files)})
        self.jobs = Jobs(self._ended.release)
        self.transfers = TransferWorker(tiers, None, self.jobs)
        self._next_id = 0

    def begin(self, source: TransferPlace, target: TransferPlace, after_step: int = -1) -> int:
        transfer = Transfer(self._next_id, 3, source, target, after_step)
        self._next_id += 1
        self.transfers.start([transfer])
        return transfer.transfer_id

    def wait(self) -> TransferEnd:
        assert self._ended.acquire(timeout=20)
        (end,) = self.jobs.poll()
        assert end.generation == 3
        return end

    def run(self, source: TransferPlace, target: TransferPlace) -> TransferEnd:
        transfer_id = self.begin(source, target)
        end = self.wait()
        assert end.transfer_id == transfer_id
        return end

    def order_of_ends(self, count: int) -> list[int]:
        order: list[int] = []
        while len(order) < count:
            assert self._ended.acquire(timeout=20)
            order += [end.transfer_id for end in self.jobs.poll()]
        return order

    def path(self, key: bytes) -> Path:
        return self.directory / object_name(key)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "kv")
    yield rig
    rig.memory.gate.set()
    rig.transfers.close()
    rig.arena.taking.join()  # it ends by itself
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv-")]


def key(number: int) -> bytes:
    return bytes([number]) * 32


def blocks(*ids: int) -> DeviceBlocks:
    return DeviceBlocks(list(ids))


def objects(*numbers: int) -> TierBlocks:
    return TierBlocks("disk", [key(number) for number in numbers])


@pytest.mark.parametrize("there", [HostSlots([2, 3]), objects(10, 11)])
def test_blocks_go_to_a_tier_and_come_back(rig: Rig, there: TransferPlace) -> None:
    back = HostSlots([3, 2]) if isinstance(there, HostSlots) else objects(11, 10)
    assert rig.run(blocks(0, 1), there).failed == []
    assert rig.run(back, blocks(4, 5)).failed == []
    assert rig.memory.blocks[4] == b"B" * BLOCK_BYTES
    assert rig.memory.blocks[5] == b"A" * BLOCK_BYTES


def test_blocks_come_from_disk_into_host_memory(rig: Rig) -> None:
    rig.run(blocks(0, 1), objects(1, 2))
    assert rig.run(objects(2, 1), HostSlots([0, 1])).failed == []
    rig.run(HostSlots([0]), blocks(6))
    assert rig.memory.blocks[6] == b"B" * BLOCK_BYTES


def test_blocks_go_from_host_memory_to_disk(rig: Rig) -> None:
    assert rig.run(blocks(0, 1), HostSlots([2, 3])).failed == []
    assert rig.run(HostSlots([3, 2]), objects(11, 10)).failed == []
    assert rig.run(objects(10, 11), blocks(4, 5)).failed == []
    assert rig.memory.blocks[4:6] == [b"A" * BLOCK_BYTES, b"B" * BLOCK_BYTES]


def test_nothing_ends_at_once(rig: Rig) -> None:
    assert rig.run(blocks(), objects()).failed == []


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(("damage", "reason"), [(_flip, "checksum"), (os.unlink, "not there")])
def test_a_damaged_object_fails_alone_and_writes_nothing(
    rig: Rig, damage: Callable[[Path], None], reason: str
) -> None:
    rig.run(blocks(0, 1, 2), objects(1, 2, 3))
    damage(rig.path(key(1)))
    end = rig.run(objects(2, 1, 3), blocks(3, 4, 5))
    assert end.failed == [1]
    assert reason in end.error
    assert not end.unreadable
    assert [rig.memory.blocks[number][:1] for number in (3, 4, 5)] == [b"B", b"E", b"C"]


def test_an_object_that_cannot_be_read_now_is_told_from_a_bad_one(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.run(blocks(0, 1), objects(1, 2))

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        end = rig.run(objects(1, 9, 2), blocks(3, 4, 5))
    assert (end.failed, end.unreadable) == ([0, 1, 2], [0, 2])
    end = rig.run(objects(1, 2), blocks(3, 99))
    assert (end.failed, end.unreadable) == ([1], [1])  # it is the device that failed


def test_a_disk_that_hangs_is_given_up_until_it_answers(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written to blocks that were given back, though the disk answers later."""
    rig.run(blocks(0, 1, 2), objects(1, 2, 3))
    read, answers = ObjectFiles.read, threading.Event()
    asked = threading.Semaphore(0)

    def hang(files: ObjectFiles, key: bytes, buffer: memoryview) -> None:
        asked.release()
        assert answers.wait(20)
        read(files, key, buffer)

    monkeypatch.setattr(ObjectFiles, "read", hang)
    rig.begin(objects(1, 2, 3), blocks(4, 5, 6))
    for _ in range(transfers.NUM_READERS):
        assert asked.acquire(timeout=20)
    rig.transfers.give_up()
    assert rig.transfers.owes_blocks, "it has had no time yet"
    monkeypatch.setattr(transfers, "READ_TIMEOUT_S", 0.0)
    rig.transfers.give_up()
    end = rig.wait()
    assert end.failed == end.unreadable == [0, 1, 2]
    assert "has not answered" in end.error
    assert not rig.transfers.owes_blocks
    assert rig.run(objects(1), blocks(4)).unreadable == [0], "it is not asked"
    answers.set()
    while rig.run(objects(1), blocks(7)).failed:
        pass
    assert rig.memory.blocks[7] == b"A" * BLOCK_BYTES
    assert not {("write", 4), ("write", 5), ("write", 6)}.intersection(rig.memory.touched)


def test_what_cannot_be_written_fails_and_later_writes_go_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        end = rig.run(blocks(0), objects(1))
    assert (end.failed, end.error) == ([0], "No space left on device")
    assert rig.run(blocks(0), objects(1)).failed == []


@pytest.mark.parametrize("place", [HostSlots([0]), objects(1)])
def test_a_block_is_written_only_when_no_step_does_any_more(rig: Rig, place: TransferPlace) -> None:
    rig.run(blocks(0), place)
    rig.jobs.step_done(6)
    slow = rig.begin(place, blocks(5), after_step=7)
    if isinstance(place, TierBlocks):  # what another thread does meanwhile
        other = rig.begin(place, blocks(6), after_step=6)
    else:
        other = rig.begin(blocks(2), objects(9))
    assert rig.wait().transfer_id == other
    assert rig.jobs.poll() == []
    assert rig.memory.blocks[5] == b"F" * BLOCK_BYTES
    rig.jobs.step_done(7)
    assert rig.wait().transfer_id == slow
    assert rig.memory.blocks[5] == b"A" * BLOCK_BYTES


def test_a_read_that_waits_for_a_step_keeps_no_writer(rig: Rig) -> None:
    rig.run(blocks(0), objects(1))
    load = rig.begin(objects(1), blocks(4), after_step=5)
    store = rig.begin(blocks(2, 3), objects(2, 3))
    assert rig.wait().transfer_id == store
    assert rig.jobs.poll() == []
    rig.jobs.step_done(5)
    assert rig.wait().transfer_id == load


def test_writes_do_not_wait_for_ever(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "_WRITE_PATIENCE_S", 0.01)
    rig.run(blocks(0), objects(1))
    rig.begin(objects(1), blocks(4), after_step=5)
    assert rig.run(blocks(2, 3), objects(2, 3)).failed == []
    assert ("write", 4) not in rig.memory.touched


def test_a_request_does_not_wait_for_stores(rig: Rig) -> None:
    rig.run(blocks(0), HostSlots([0]))
    first = rig.begin(blocks(7), HostSlots([1]))
    assert rig.memory.is_waiting.wait(
        20
    )  # what follows is there when the thread takes its next block
    later = rig.begin(blocks(1, 2), HostSlots([2, 3]))
    load = rig.begin(HostSlots([0]), blocks(5))
    rig.memory.gate.set()
    assert rig.order_of_ends(3) == [first, load, later]


def test_what_a_request_waits_for_goes_before_what_one_will(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "NUM_READERS", 1)
    rig = Rig(tmp_path)
    rig.run(blocks(0), objects(1))
    first = rig.begin(objects(1), blocks(1), after_step=9)  # the reader does not go on before that
    later = rig.begin(objects(1), HostSlots([0]))
    urgent = rig.begin(objects(1), blocks(3))
    rig.jobs.step_done(9)
    assert rig.order_of_ends(3) == [first, urgent, later]
    rig.transfers.close()


def test_unforeseen_errors_end_the_transfer_and_do_not_flood_the_log(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    end = rig.run(blocks(0, 99, 98, 97), HostSlots([0, 1, 2, 3]))
    assert end.failed == [1, 2, 3]
    assert "IndexError" in end.error
    (record,) = caplog.records
    assert record.exc_info is not None
    assert rig.run(blocks(0), HostSlots([1])).failed == []


@pytest.mark.parametrize("seed", range(20))
def test_each_of_many_transfers_ends_once(rig: Rig, seed: int) -> None:
    """Transfers of all kinds begin together, some broken; blocks of good loads hold what was stored."""
    rng = random.Random(seed)
    rig.memory.gate.set()
    rig.run(blocks(0, 1, 2, 3), objects(0, 1, 2, 3))
    rig.run(blocks(0, 1), HostSlots([0, 1]))
    _flip(rig.path(key(2)))
    kinds = [
        lambda: (objects(0, 2, 9, 1), blocks(4, 5, 6, 7)),
        lambda: (HostSlots([0, 1]), blocks(4, 7)),
        lambda: (objects(3, 9), HostSlots([2, 3])),
        lambda: (blocks(0, 1, 99), objects(*rng.sample(range(20, 60), 3))),
        lambda: (blocks(3), HostSlots([rng.choice((2, 3))])),
    ]
    begun = {}
    for _ in range(30):
        number = rng.randrange(len(kinds))
        begun[rig.begin(*kinds[number](), after_step=rng.choice((-1, 3)))] = number
    rig.jobs.step_done(3)
    ends: list[TransferEnd] = []
    while len(ends) < len(begun):
        assert rig._ended.acquire(timeout=20)
        ends += rig.jobs.poll()
    assert sorted(end.transfer_id for end in ends) == sorted(begun)
    failures = [[1, 2], [], [1], [2], []]
    assert all(end.failed == failures[begun[end.transfer_id]] for end in ends)
    if 0 in begun.values() or 1 in begun.values():
        assert rig.memory.blocks[4] == b"A" * BLOCK_BYTES
        assert rig.memory.blocks[7] == b"B" * BLOCK_BYTES
    assert rig.memory.blocks[5] == b"F" * BLOCK_BYTES
    assert rig.memory.blocks[6] == b"G" * BLOCK_BYTES
    assert rig.jobs.poll() == []


def test_places_that_are_not_here_are_refused(rig: Rig) -> None:
    with pytest.raises(ValueError, match="places that are not here"):
        rig.begin(HostSlots([0]), HostSlots([1]))
    with pytest.raises(ValueError, match="unlike"):
        rig.begin(blocks(0, 1), objects(1))


def test_closing_does_not_wait_for_steps(rig: Rig) -> None:
    rig.run(blocks(0), objects(1))
    rig.begin(objects(1), blocks(5), after_step=100)
    rig.begin(objects(1, 1, 1, 1), blocks(1, 2, 3, 4), after_step=100)
    rig.transfers.close()
    assert rig.memory.blocks[5] == b"F" * BLOCK_BYTES
