"""What is found, kept and removed on disk; the scanner and the workers are played by the tests."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagoda.errors import ConfigError
from pagoda.ipc.clock import Clock, VirtualClock
from pagoda.kv.block_keys import prefix_keys
from pagoda.kv.block_pool import Block, BlockPool
from pagoda.kv.connector import CachedBlock, PrefixRequest
from pagoda.kv.disk_scanner import (
    OWN,
    DirectoryFound,
    FanOutListed,
    News,
    ObjectsFound,
    ProbeAnswer,
    Removed,
    ScanEnded,
)
from pagoda.kv.disk_tier import DiskTier
from pagoda.kv.events import BlockRemoved, BlockStored, KVEventRecorder, Medium
from pagoda.kv.host_tier import HostTier
from pagoda.kv.transfers import TransferLedger
from pagoda.messages.load import TierLoad
from pagoda.messages.transfers import (
    DeviceBlocks,
    DiskObjects,
    HostSlots,
    KVDirectory,
    Transfer,
    TransferEnd,
)
from pagoda.messages.worker import Capabilities, WorkerReady

SIZE = 4
UNIT = 100
"""What a block takes on disk."""
EPOCH = 1_900_000_000
TOKENS = list(range(41 * SIZE))
KEYS = prefix_keys(TOKENS, SIZE, None, 40)
OTHER_KEYS = prefix_keys(TOKENS, SIZE, "salt", 40)


class FakeScanner:
    """A disk in memory, and a scanner that does one job whenever it is told to."""

    def __init__(self) -> None:
        self.disk: dict[int, dict[bytes, int]] = {OWN: {}}
        self.jobs: deque[Callable[[], list[News]]] = deque()
        self.removed: list[tuple[int, list[bytes]]] = []
        self.num_probes = 0
        self.forgotten: list[int] = []
        self.num_rescans = 0
        self.is_closed = False
        self._news: list[News] = []
        self._met: set[int] = set()
        self.jobs.append(self.scan)

    def scan(self) -> list[News]:
        news: list[News] = []
        for directory, objects in self.disk.items():
            if directory != OWN and directory not in self._met:
                self._met.add(directory)
                news.append(DirectoryFound(directory, UNIT // 2))
            news.append(ObjectsFound(directory, dict(objects)))
            for fan_out in range(256):
                used_at = {key: at for key, at in objects.items() if key[0] == fan_out}
                news.append(FanOutListed(directory, fan_out, used_at, EPOCH))
        return [*news, ScanEnded(0.0)]

    def probe(self, probe_id: int, keys: Sequence[bytes]) -> None:
        self.num_probes += 1
        self.jobs.append(lambda: [self._answer(probe_id, keys)])

    def cancel_probe(self, probe_id: int) -> None:
        self.forgotten.append(probe_id)

    def _answer(self, probe_id: int, keys: Sequence[bytes]) -> News:
        return ProbeAnswer(probe_id, list(itertools.takewhile(self.disk[OWN].__contains__, keys)))

    def remove(self, directory: int, keys: Sequence[bytes]) -> None:
        self.removed.append((directory, list(keys)))
        self.jobs.append(lambda: self._remove(directory, keys))

    def _remove(self, directory: int, keys: Sequence[bytes]) -> list[News]:
        for key in keys:
            self.disk[directory].pop(key, None)
        return [Removed(directory, keys)]

    def rescan(self) -> None:
        self.num_rescans += 1

    def work(self, count: int = 1000) -> None:
        while self.jobs and count:
            self._news += self.jobs.popleft()()
            count -= 1

    def poll(self) -> list[News]:
        news, self._news = self._news, []
        return news

    def fileno(self) -> int:
        return 99

    def close(self) -> None:
        self.is_closed = True


class Setup:
    """A tier over a pool, with its ledger and its scanner."""

    def __init__(
        self,
        *,
        quota: int = 20 * UNIT,
        min_touches: int = 2,
        num_blocks: int = 320,
        num_ranks: int = 1,
        host_slots: int = 0,
        is_scanned: bool = True,
    ) -> None:
        self.clock = VirtualClock()
        self.pool = BlockPool(num_blocks)
        self.ledger = TransferLedger(self.pool)
        self.events = KVEventRecorder(SIZE, has_disk=True)
        self.keepers: list[FakeScanner] = []
        self.ready = ready(num_ranks)
        self.host = HostTier(host_slots, SIZE, self.ledger) if host_slots else None
        self.tier = DiskTier(
            self.ready.kv_directories,
            self.ledger,
            self.clock,
            self._open,
            quota_bytes=quota,
            min_touches=min_touches,
            epoch_s=EPOCH,
            host=self.host,
            events=self.events,
        )
        if is_scanned:
            self.work()

    def _open(self, directories: Sequence[KVDirectory], _clock: Clock) -> FakeScanner:
        assert directories
        self.keepers.append(FakeScanner())
        return self.keepers[-1]

    @property
    def keeper(self) -> FakeScanner:
        return self.keepers[-1]

    @property
    def disk(self) -> dict[bytes, int]:
        return self.keeper.disk[OWN]

    @property
    def report(self) -> TierLoad:
        return self.tier.load_report()

    def work(self) -> set[str]:
        """The scanner does all that it was asked for; returns the requests to look up again."""
        changed: set[str] = set()
        while self.keeper.jobs:
            self.keeper.work()
            changed.update(self.tier.poll())
        return changed

    def pass_through(self, keys: Sequence[bytes]) -> int:
        """A request passes through blocks that are on the device."""
        cached_blocks = []
        for index, key in enumerate(keys):
            block = self.pool.find(key)
            if block is None:
                (block,) = self.pool.allocate(1)
                self.pool.publish(block, key)
                self.pool.release([block])
            parent = keys[index - 1] if index else None
            cached_blocks.append(
                CachedBlock(block, key, parent, TOKENS[index * SIZE : (index + 1) * SIZE])
            )
        return self.tier.save(cached_blocks)

    def end(
        self,
        transfer: Transfer,
        failed: Sequence[int] = (),
        error: str = "it is bad",
        unreadable: Sequence[int] = (),
    ) -> None:
        """The workers say that a transfer has ended; what was stored is on disk from then on."""
        if isinstance(transfer.target, DiskObjects):
            for index, key in enumerate(transfer.target.keys):
                if index not in failed:
                    self.disk[key] = int(EPOCH + self.clock.now())
        end = TransferEnd(
            transfer.transfer_id,
            transfer.generation,
            list(failed),
            error if failed else "",
            list(unreadable),
        )
        assert self.ledger.close(end)

    def store(self, keys: Sequence[bytes]) -> None:
        """Passes through blocks twice, and lets the workers write them."""
        self.pass_through(keys)
        self.pass_through(keys)
        for transfer in self.ledger.drain():
            self.end(transfer)

    def load(self, prefix: PrefixRequest, start: int, count: int) -> Transfer:
        blocks = self.pool.allocate(count)
        self.tier.load(prefix, start, blocks, 7)
        self.pool.release(blocks)
        (transfer,) = self.ledger.drain()
        return transfer


def ready(num_ranks: int = 1, name: str = "model") -> WorkerReady:
    directories = tuple(
        KVDirectory(f"/kv/{name}-{rank}", UNIT // num_ranks) for rank in range(num_ranks)
    )
    return WorkerReady(
        capabilities=Capabilities(
            block_sizes=(SIZE,), max_batch_tokens=1000, max_batch_seqs=100, max_model_len=4096
        ),
        num_blocks=320,
        block_size=SIZE,
        max_model_len=4096,
        vocab_size=1000,
        summary="",
        kv_directories=directories,
    )


def prefix(keys: Sequence[bytes] = KEYS, request_id: str = "r") -> PrefixRequest:
    return PrefixRequest(request_id, keys, TOKENS)


def stored_keys(transfers: Sequence[Transfer]) -> list[bytes]:
    return [
        key
        for transfer in transfers
        if isinstance(transfer.target, DiskObjects)
        for key in transfer.target.keys
    ]


# ---- what requests find


def test_what_a_scan_found_can_be_loaded() -> None:
    setup = Setup(is_scanned=False)
    setup.disk.update(dict.fromkeys(KEYS[:5], EPOCH - 100))
    setup.work()
    assert setup.tier.lookup(prefix(), 0) == 5
    assert setup.tier.lookup(prefix(), 2) == 3
    assert setup.tier.lookup(prefix(), 5) == 0
    assert setup.tier.lookup(prefix(KEYS[:3]), 1) == 2
    assert setup.report.num_blocks == 5


def test_while_a_probe_is_under_way_nobody_knows() -> None:
    setup = Setup()
    setup.disk.update(dict.fromkeys(KEYS[:3], EPOCH))  # another process wrote them
    setup.tier.on_queued(prefix(), 0)
    assert setup.tier.lookup(prefix(), 0) is None
    assert setup.tier.lookup(prefix(request_id="another"), 0) == 0
    assert not setup.tier.poll()
    assert setup.work()
    assert setup.tier.lookup(prefix(), 0) == 3
    assert setup.tier.lookup(prefix(request_id="another"), 0) == 3


def test_a_request_whose_blocks_are_all_known_needs_no_probe() -> None:
    setup = Setup()
    setup.store(KEYS[:4])
    setup.tier.on_queued(prefix(KEYS[:4]), 0)
    assert setup.tier.lookup(prefix(KEYS[:4]), 0) == 4
    setup.tier.on_queued(prefix(KEYS[:4]), 4)
    assert setup.keeper.num_probes == 0


def test_the_answer_to_a_request_that_is_gone_tells_nobody() -> None:
    setup = Setup()
    setup.tier.on_queued(prefix(), 0)
    setup.tier.on_dequeued("r")
    assert not setup.work()
    setup.tier.on_dequeued("r")
    setup.tier.on_queued(prefix(), 0)
    assert setup.work()


def test_a_disk_that_does_not_answer_is_not_asked_again_until_it_does() -> None:
    setup = Setup()
    setup.store(KEYS[:2])
    setup.disk.update(dict.fromkeys(KEYS[2:5], EPOCH))
    setup.tier.on_queued(prefix(), 0)
    setup.clock.advance_to(6)
    setup.tier.on_queued(prefix(request_id="second"), 0)
    setup.clock.advance_to(9)
    assert not setup.tier.poll()
    assert setup.tier.lookup(prefix(), 0) is None
    setup.clock.advance_to(10)
    assert setup.tier.poll()  # nobody who waits need wait on
    assert setup.tier.lookup(prefix(), 0) == 2
    assert setup.tier.lookup(prefix(request_id="second"), 0) == 2
    for request_id in ("r", "second"):
        setup.tier.on_dequeued(request_id)
    assert setup.keeper.forgotten == [0, 1]
    setup.tier.on_queued(prefix(request_id="third"), 0)
    assert setup.tier.lookup(prefix(request_id="third"), 0) == 2
    assert setup.keeper.num_probes == 2
    setup.work()
    setup.disk[KEYS[5]] = EPOCH
    setup.tier.on_queued(prefix(request_id="fourth"), 0)
    assert setup.tier.lookup(prefix(request_id="fourth"), 0) is None
    assert setup.work()
    assert setup.tier.lookup(prefix(request_id="fourth"), 0) == 6


def test_a_disk_that_answers_one_after_the_other_is_waited_for() -> None:
    setup = Setup()
    for number in range(4):
        setup.tier.on_queued(prefix(request_id=f"r{number}"), 0)
    for number in range(4):
        setup.clock.advance_to(8 * (number + 1))
        assert setup.tier.lookup(prefix(request_id="r3"), 0) is None
        setup.keeper.work(1)
        assert setup.tier.poll()
    assert setup.tier.lookup(prefix(request_id="r3"), 0) == 0


def test_an_answer_that_is_not_wanted_any_more_is_no_sign_of_a_bad_disk() -> None:
    setup = Setup()
    setup.tier.on_queued(prefix(), 0)
    setup.tier.on_dequeued("r")
    setup.clock.advance_to(100)
    setup.tier.on_queued(prefix(), 0)
    assert setup.keeper.num_probes == 2
    assert setup.tier.lookup(prefix(), 0) is None


def test_probes_are_made_before_the_scan_has_ended() -> None:
    setup = Setup(is_scanned=False)
    setup.disk.update(dict.fromkeys(KEYS[:3], EPOCH))
    setup.keeper.jobs.clear()
    setup.tier.on_queued(prefix(), 0)
    assert setup.work()
    assert setup.tier.lookup(prefix(), 0) == 3
    assert not setup.report.is_indexed


def test_a_load_is_one_transfer_into_the_blocks() -> None:
    setup = Setup()
    setup.store(KEYS[:4])
    transfer = setup.load(prefix(), 1, 3)
    assert transfer.source == DiskObjects(KEYS[1:4])
    assert isinstance(transfer.target, DeviceBlocks)
    assert len(transfer.target.block_ids) == 3
    assert transfer.after_step == 7
    setup.end(transfer)
    setup.tier.loaded(KEYS[1:4], [])
    assert setup.report.num_loaded == 3
    assert setup.tier.lookup(prefix(), 0) == 4


def test_blocks_that_did_not_come_are_removed_and_it_is_said_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    setup = Setup()
    setup.store(KEYS[:4])
    setup.end(setup.load(prefix(), 0, 4), failed=[1, 3], error="its checksum is wrong")
    setup.tier.loaded(KEYS[:4], [1, 3])
    assert setup.tier.lookup(prefix(), 0) == 1
    assert setup.keeper.removed == [(OWN, [KEYS[1], KEYS[3]])]
    assert (setup.report.num_loaded, setup.report.num_failed) == (2, 2)
    assert caplog.messages == [
        "2 KV blocks could not be read from /kv/model-0, the first because its checksum is wrong; "
        "they are computed again."
    ]
    setup.work()
    assert set(setup.disk) == {KEYS[0], KEYS[2]}


def test_objects_that_could_not_be_read_are_left_and_found_again() -> None:
    setup = Setup()
    setup.store(KEYS[:4])
    transfer = setup.load(prefix(), 0, 4)
    setup.end(transfer, failed=[1, 2, 3], error="Input/output error", unreadable=[1, 3])
    assert setup.keeper.removed == [(OWN, [KEYS[2]])]
    assert setup.tier.lookup(prefix(), 0) == 1
    setup.tier.on_queued(prefix(KEYS[:2]), 0)
    assert setup.work()
    assert setup.tier.lookup(prefix(), 0) == 2
    assert set(setup.disk) == {KEYS[0], KEYS[1], KEYS[3]}


def test_loads_that_fail_one_after_the_other_do_not_fill_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    setup = Setup()
    setup.store(KEYS[:8])
    for index in range(8):
        setup.clock.advance_to(index * 4)
        setup.end(setup.load(prefix(), index, 1), failed=[0])
    assert len(caplog.messages) == 3


# ---- what is kept


def test_blocks_are_written_at_the_second_touch() -> None:
    setup = Setup()
    assert setup.pass_through(KEYS[:3]) == 3
    assert not setup.ledger.drain()
    assert setup.pass_through(KEYS[:2]) == 2
    (transfer,) = setup.ledger.drain()
    assert transfer.target == DiskObjects(KEYS[:2])
    assert isinstance(transfer.source, DeviceBlocks)
    setup.pass_through(KEYS[:2])
    assert not setup.ledger.drain()  # they are under way
    assert setup.tier.lookup(prefix(), 0) == 0
    setup.end(transfer)
    assert setup.tier.lookup(prefix(), 0) == 2
    assert setup.report.num_stored == 2
    assert setup.keeper.num_rescans == 1
    setup.pass_through(KEYS[:2])
    assert not setup.ledger.drain()


@pytest.mark.parametrize("min_touches", [1, 3])
def test_the_number_of_touches_can_be_chosen(min_touches: int) -> None:
    setup = Setup(min_touches=min_touches)
    for _ in range(min_touches - 1):
        setup.pass_through(KEYS[:2])
        assert not setup.ledger.drain()
    setup.pass_through(KEYS[:2])
    assert stored_keys(setup.ledger.drain()) == KEYS[:2]


def test_a_block_that_is_offered_twice_at_once_is_written_once() -> None:
    setup = Setup()
    setup.pass_through([KEYS[0], KEYS[0], KEYS[1], KEYS[0]])
    assert stored_keys(setup.ledger.drain()) == KEYS[:2]


def test_nothing_is_written_before_all_that_is_there_is_counted() -> None:
    setup = Setup(is_scanned=False)
    setup.pass_through(KEYS[:2])
    assert setup.pass_through(KEYS[:2]) == 2
    assert not setup.ledger.drain()
    setup.work()
    setup.pass_through(KEYS[:2])
    assert stored_keys(setup.ledger.drain()) == KEYS[:2]


def test_a_scan_that_came_to_nothing_is_asked_for_again() -> None:
    setup = Setup(is_scanned=False)
    setup.pass_through(KEYS[:1])
    assert setup.keeper.num_rescans == 1
    setup.work()
    setup.pass_through(KEYS[:1])
    assert setup.keeper.num_rescans == 1


def test_what_finds_no_room_among_the_stores_is_left_to_be_offered_again() -> None:
    setup = Setup(num_blocks=24)  # three of them may be under store
    setup.pass_through(KEYS[:6])
    assert setup.pass_through(KEYS[:6]) == 3
    (transfer,) = setup.ledger.drain()
    assert stored_keys([transfer]) == KEYS[:3]
    assert setup.pass_through(KEYS[3:6]) == 0
    setup.end(transfer)
    assert setup.pass_through(KEYS[:6]) == 6
    assert stored_keys(setup.ledger.drain()) == KEYS[3:6]


def test_what_was_stored_is_an_event_and_so_is_what_is_gone() -> None:
    setup = Setup()
    setup.pass_through(KEYS[:3])
    setup.pass_through(KEYS[:3])
    (transfer,) = setup.ledger.drain()
    setup.end(transfer, failed=[2])
    (event,) = setup.events.drain()
    assert isinstance(event, BlockStored)
    assert (event.block_hashes, event.medium) == (KEYS[:2], Medium.DISK)
    assert (event.parent_block_hash, event.token_ids) == (None, TOKENS[: 2 * SIZE])
    setup.end(setup.load(prefix(), 0, 2), failed=[1])
    assert setup.events.drain() == [BlockRemoved([KEYS[1]], Medium.DISK)]


# ---- the quota


def test_what_was_used_longest_ago_goes_when_the_quota_is_nearly_full() -> None:
    setup = Setup(quota=20 * UNIT)
    for index in range(19):
        setup.store(KEYS[index : index + 1])
    assert setup.report.num_blocks == 19
    setup.pass_through(KEYS[:1])  # used again
    setup.store(KEYS[19:20])
    assert setup.keeper.removed == [(OWN, KEYS[1:3])]
    assert setup.tier.lookup(prefix(KEYS[:1]), 0) == 1
    assert setup.report.num_removed == 2
    setup.work()
    assert len(setup.disk) == 17 + 1
    assert setup.report.num_total_blocks == 20


def test_blocks_that_are_loaded_are_not_the_oldest_any_more() -> None:
    setup = Setup(quota=20 * UNIT)
    for index in range(19):
        setup.store(KEYS[index : index + 1])
    setup.load(prefix(), 0, 3)
    setup.store(KEYS[19:20])
    assert setup.keeper.removed == [(OWN, KEYS[3:5])]


def test_of_a_prefix_the_end_goes_first() -> None:
    setup = Setup(quota=20 * UNIT)
    for index in range(0, 18, 2):
        setup.store(KEYS[index : index + 2])
    setup.pass_through(KEYS[:18])
    setup.store(OTHER_KEYS[:2])
    assert setup.keeper.removed == [(OWN, [KEYS[17]])]


def test_objects_of_other_models_count_and_go_too() -> None:
    setup = Setup(quota=20 * UNIT, is_scanned=False)
    setup.keeper.disk[1] = {key: EPOCH - 5000 + 64 * n for n, key in enumerate(KEYS[:30])}
    setup.disk.update(dict.fromkeys(KEYS[:2], EPOCH - 9000))
    setup.work()
    assert not setup.keeper.removed  # 17 units
    setup.store(KEYS[4:6])
    assert not setup.keeper.removed  # 19 units
    setup.store(KEYS[6:7])
    setup.work()
    assert setup.keeper.removed == [(OWN, KEYS[:2])]
    setup.store(KEYS[7:8])
    setup.store(KEYS[8:9])
    assert setup.keeper.removed[1:] == [(1, KEYS[:4])]
    setup.work()
    assert list(setup.keeper.disk[1]) == KEYS[4:30]


def test_removals_go_on_in_parts_until_the_low_mark() -> None:
    setup = Setup(quota=10_000 * UNIT, is_scanned=False)
    keys = [number.to_bytes(32) for number in range(9_600)]
    setup.disk.update({key: EPOCH - 64 * (10_000 - n) for n, key in enumerate(keys)})
    setup.keeper.work()
    setup.tier.poll()
    assert sum(len(some) for _, some in setup.keeper.removed) == 512
    setup.work()
    assert set(setup.disk) == set(keys[1_100:])


def test_space_that_is_not_free_yet_is_not_written_to() -> None:
    setup = Setup(quota=4 * UNIT)
    for index in range(3):
        setup.store(KEYS[index : index + 1])
    setup.pass_through(KEYS[3:5])
    setup.pass_through(KEYS[3:5])
    assert stored_keys(setup.ledger.drain()) == KEYS[3:4]
    assert len(setup.disk) == 3
    setup.pass_through(KEYS[4:5])
    assert not setup.ledger.drain()
    setup.work()
    setup.pass_through(KEYS[4:5])
    assert len(setup.disk) <= 3


def test_an_object_that_is_being_removed_is_neither_found_nor_written() -> None:
    setup = Setup()
    setup.store(KEYS[:1])
    setup.end(setup.load(prefix(), 0, 1), failed=[0])
    late = setup.keeper.scan()  # made before the removal, told after it was asked for
    setup.keeper.jobs.appendleft(lambda: late)
    setup.keeper.work(1)
    setup.tier.poll()
    assert setup.tier.lookup(prefix(), 0) == 0
    setup.pass_through(KEYS[:1])
    assert not setup.ledger.drain()
    setup.work()
    setup.pass_through(KEYS[:1])
    assert stored_keys(setup.ledger.drain()) == KEYS[:1]


def test_a_listing_does_not_forget_what_was_written_after_it_was_made() -> None:
    setup = Setup()
    setup.store(KEYS[:2])
    setup.clock.advance_to(100)
    setup.store(KEYS[2:3])
    news = [FanOutListed(OWN, fan_out, {}, EPOCH + 50) for fan_out in range(256)]
    setup.keeper.jobs.append(lambda: [*news])
    setup.work()
    assert [setup.tier.lookup(prefix(), start) for start in range(3)] == [0, 0, 1]
    assert setup.report.num_blocks == 1
    assert BlockRemoved in {type(event) for event in setup.events.drain()}


def test_a_listing_brings_what_was_not_found_one_by_one() -> None:
    setup = Setup()
    setup.store(KEYS[:1])
    setup.store(KEYS[3:4])
    setup.tier.loaded(KEYS[:1], [])
    setup.end(setup.load(prefix(), 3, 1), failed=[0])  # it is being removed
    used_at = dict.fromkeys(KEYS[:4], EPOCH - 60)
    news: list[News] = [
        FanOutListed(OWN, fan_out, {key: at for key, at in used_at.items() if key[0] == fan_out}, 0)
        for fan_out in range(256)
    ]
    setup.keeper.jobs.appendleft(lambda: news)
    setup.keeper.work(1)
    setup.tier.poll()
    assert setup.report.num_blocks == 3
    assert setup.tier.lookup(prefix(), 0) == 3


def test_a_quota_below_one_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--kv-disk-bytes 99 is too small: .* takes 100 bytes"):
        Setup(quota=99)


def test_a_quota_below_one_block_of_new_directories_is_refused() -> None:
    setup = Setup(quota=UNIT)
    larger = [KVDirectory("/kv/larger", UNIT + 1)]
    with pytest.raises(ConfigError, match="takes 101 bytes"):
        setup.tier.workers_ready(msgspec.structs.replace(setup.ready, kv_directories=larger))


def test_workers_that_begin_find_a_tier_that_knows_their_directories() -> None:
    setup = Setup(is_scanned=False)
    setup.disk.update(dict.fromkeys(KEYS[:3], EPOCH))
    setup.work()
    setup.tier.workers_ready(setup.ready)
    assert len(setup.keepers) == 1
    assert setup.tier.lookup(prefix(), 0) == 3


def test_a_quota_of_one_block_holds_one_block() -> None:
    setup = Setup(quota=UNIT)
    for index in range(5):
        setup.store(KEYS[index : index + 1])
        setup.work()
        setup.pass_through(KEYS[index : index + 1])
        for transfer in setup.ledger.drain():
            setup.end(transfer)
        assert list(setup.disk) == KEYS[index : index + 1]


# ---- stores that fail


def test_after_repeated_failures_stores_pause_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    setup = Setup()
    setup.pass_through(KEYS)
    for index in range(3):
        setup.pass_through(KEYS[index : index + 1])
        (transfer,) = setup.ledger.drain()
        setup.end(transfer, failed=[0], error="No space left on device")
    assert caplog.messages == [
        "KV blocks cannot be written to /kv/model-0 (No space left on device); the next try is in 10 s."
    ]
    assert setup.pass_through(KEYS[:3]) == 3
    assert not setup.ledger.drain()
    assert (setup.report.num_failed, setup.report.num_stored) == (3, 0)
    assert not setup.keeper.removed
    setup.clock.advance_to(10)
    setup.pass_through(KEYS[:3])
    (transfer,) = setup.ledger.drain()
    setup.end(transfer)
    assert setup.tier.lookup(prefix(), 0) == 3
    assert len(caplog.messages) == 1


def test_what_some_ranks_may_have_written_is_removed_when_others_could_not() -> None:
    setup = Setup(num_ranks=2)
    setup.pass_through(KEYS[:3])
    setup.pass_through(KEYS[:3])
    (transfer,) = setup.ledger.drain()
    setup.end(transfer, failed=[1])
    assert setup.keeper.removed == [(OWN, KEYS[1:2])]
    assert setup.tier.lookup(prefix(), 0) == 1


# ---- what is brought nearer


def test_blocks_are_brought_to_host_memory_as_far_as_there_is_room() -> None:
    setup = Setup(host_slots=16)
    assert setup.host is not None
    setup.store(KEYS[:8])
    setup.host.reserve(prefix(), 2)
    setup.tier.prefetch(prefix(), 1)
    (transfer,) = setup.ledger.drain()
    assert transfer.source == DiskObjects([KEYS[1], KEYS[3], KEYS[4]])
    assert transfer.target == HostSlots([1, 2, 3])
    setup.tier.prefetch(prefix(), 1)
    assert not setup.ledger.drain()
    setup.end(transfer, failed=[1])
    assert [setup.host.pool.find(key) is not None for key in KEYS[1:5]] == [
        True,
        False,
        False,
        True,
    ]
    assert setup.host.load_report().num_failed == 1
    assert setup.tier.lookup(prefix(), 0) == 3
    # They have come to the host tier, which counts them, and not to the device.
    assert (setup.report.num_loaded, setup.report.num_failed) == (0, 0)


def test_without_host_memory_nothing_is_brought_there() -> None:
    setup = Setup()
    setup.store(KEYS[:8])
    setup.tier.prefetch(prefix(), 0)
    assert not setup.ledger.drain()


# ---- workers come and go


def test_what_is_on_disk_outlives_the_workers() -> None:
    setup = Setup(host_slots=16)
    assert setup.host is not None
    setup.store(KEYS[:6])
    setup.pass_through(KEYS[6:8])
    setup.pass_through(KEYS[6:8])
    setup.tier.prefetch(prefix(), 0)
    setup.ledger.drain()
    setup.load(prefix(), 4, 2)
    setup.ledger.drop_all()
    setup.tier.workers_lost()
    setup.tier.workers_ready(setup.ready)
    assert len(setup.keepers) == 1
    assert setup.keeper.num_rescans == 2
    assert setup.tier.lookup(prefix(), 0) == 6
    assert setup.host.load_report().num_failed == 0
    assert setup.ledger.num_open == 0
    setup.pass_through(KEYS[6:8])
    assert stored_keys(setup.ledger.drain()) == KEYS[6:8]


def test_workers_of_other_directories_begin_with_what_is_in_them() -> None:
    setup = Setup()
    setup.store(KEYS[:6])
    setup.tier.on_queued(prefix(), 0)
    setup.ledger.drop_all()
    setup.tier.workers_lost()
    setup.tier.workers_ready(ready(name="other"))
    assert [keeper.is_closed for keeper in setup.keepers] == [True, False]
    assert setup.tier.lookup(prefix(), 0) == 0
    assert not setup.report.is_indexed
    setup.tier.on_dequeued("r")


def test_its_news_can_be_waited_for_until_it_is_closed() -> None:
    setup = Setup()
    assert setup.tier.pollables() == [99]
    setup.tier.close()
    assert setup.keeper.is_closed


# ---- anything in any order


class TierMachine(RuleBasedStateMachine):
    """Requests, workers that are lost, objects that vanish, and ends of transfers in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.setup = Setup(quota=12 * UNIT, num_blocks=64, num_ranks=2)
        self.open: list[tuple[Transfer, list[Block]]] = []
        self.announced: set[str] = set()
        self.foreign = 0
        self.keys = KEYS[:10] + OTHER_KEYS[:10]

    def take(self, blocks: Sequence[Block] = ()) -> None:
        self.open += [(transfer, list(blocks)) for transfer in self.setup.ledger.drain()]

    def prefix(self, number: int) -> PrefixRequest:
        keys = KEYS if number % 2 else OTHER_KEYS
        return prefix(keys[: 4 + number], f"r{number}")

    @rule(start=st.integers(0, 9), count=st.integers(1, 6), salted=st.booleans())
    def pass_through(self, start: int, count: int, salted: bool) -> None:
        keys = (OTHER_KEYS if salted else KEYS)[start : min(10, start + count)]
        assert 0 <= self.setup.pass_through(keys) <= len(keys)
        self.take()

    @rule(number=st.integers(0, 5))
    def on_queued(self, number: int) -> None:
        if f"r{number}" not in self.announced:
            self.announced.add(f"r{number}")
            self.setup.tier.on_queued(self.prefix(number), 0)

    @rule(number=st.integers(0, 5))
    def forget(self, number: int) -> None:
        self.announced.discard(f"r{number}")
        self.setup.tier.on_dequeued(f"r{number}")

    @rule(number=st.integers(0, 5), start=st.integers(0, 3))
    def load(self, number: int, start: int) -> None:
        wanted = self.prefix(number)
        count = self.setup.tier.lookup(wanted, start)
        assert count is not None or f"r{number}" in self.announced
        if count and count <= self.setup.pool.num_available:
            blocks = self.setup.pool.allocate(count)
            self.setup.tier.load(wanted, start, blocks, -1)
            self.setup.pool.release(blocks)
            self.take(blocks)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.open) - 1))
        transfer, _ = self.open.pop(index)
        if isinstance(transfer.target, DiskObjects):
            keys = transfer.target.keys
            failed = data.draw(st.sets(st.integers(0, len(keys) - 1)))
            self.setup.end(transfer, sorted(failed))
            return
        assert isinstance(transfer.source, DiskObjects)
        keys = transfer.source.keys
        failed = {index for index, key in enumerate(keys) if key not in self.setup.disk}
        failed |= data.draw(st.sets(st.integers(0, len(keys) - 1), max_size=1))
        self.setup.end(transfer, sorted(failed))
        self.setup.tier.loaded(keys, sorted(failed))

    @rule(count=st.integers(1, 3))
    def housekeeping(self, count: int) -> None:
        self.setup.keeper.work(count)
        self.setup.tier.poll()

    @rule()
    def scan(self) -> None:
        self.setup.keeper.jobs.append(self.setup.keeper.scan)

    @rule(key=st.sampled_from(KEYS[:10]))
    def somebody_removes_an_object(self, key: bytes) -> None:
        self.setup.disk.pop(key, None)

    @rule(seconds=st.integers(1, 50))
    def time_goes_by(self, seconds: int) -> None:
        self.setup.clock.advance_to(self.setup.clock.now() + seconds)

    @rule()
    def lose_the_workers(self) -> None:
        self.setup.ledger.drop_all()
        self.setup.tier.workers_lost()
        self.setup.tier.workers_ready(self.setup.ready)
        self.open.clear()

    @invariant()
    def the_quota_is_kept(self) -> None:
        storing = [t for t, _ in self.open if isinstance(t.target, DiskObjects)]
        num_objects = len(self.setup.disk) + len(stored_keys(storing))
        assert num_objects <= 12

    @invariant()
    def the_books_balance(self) -> None:
        report = self.setup.report
        assert self.setup.ledger.num_open == len(self.open)
        assert 0 <= report.num_blocks <= report.num_total_blocks == 12

    def teardown(self) -> None:
        """Once everything has ended and been scanned, the index is the disk, and nothing is held."""
        while self.open:
            transfer, _ = self.open.pop()
            self.setup.end(transfer)
        self.setup.clock.advance_to(self.setup.clock.now() + 1000)
        self.setup.work()
        in_index = {key for key in self.keys if self.setup.tier.lookup(prefix([key], "x"), 0)}
        assert in_index >= set(self.setup.disk)
        assert self.setup.pool.num_available == self.setup.pool.num_blocks
        assert self.setup.ledger.store_room == 8
        for number in range(6):
            self.setup.tier.on_dequeued(f"r{number}")


TestTierMachine = TierMachine.TestCase
