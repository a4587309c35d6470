"""Blocks on disk: what requests find, what is kept, and what workers and prefetches do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from disk_rig import EPOCH, KEYS, OTHER_KEYS, SIZE, TOKENS, UNIT, Setup, prefix, ready, stored_keys
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagoda.kv.block_pool import Block
from pagoda.kv.connector import PrefixRequest
from pagoda.kv.disk_scanner import OWN
from pagoda.kv.events import BlockRemoved, BlockStored, Medium
from pagoda.messages.transfers import DeviceBlocks, DiskObjects, HostSlots, Transfer

# ---- what requests find


def test_what_a_scan_found_can_be_loaded() -> None:
    setup = Setup(is_scanned=False)
    setup.disk.update(dict.fromkeys(KEYS[:5], EPOCH - 100))
    setup.work()
    assert [setup.tier.lookup(prefix(), start) for start in (0, 2, 5)] == [5, 3, 0]
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
    assert not setup.keeper.probed


def test_the_answer_to_a_request_that_is_gone_tells_nobody() -> None:
    setup = Setup()
    setup.tier.on_queued(prefix(), 0)
    setup.tier.on_dequeued("r")
    setup.clock.advance_to(100)  # what nobody waits for is no sign of a bad disk
    setup.tier.on_queued(prefix(request_id="next"), 0)
    assert setup.tier.lookup(prefix(request_id="next"), 0) is None
    for _ in range(2):
        setup.tier.on_dequeued("next")
    assert not setup.work()
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
    assert setup.keeper.forgotten == ["r", "second"]
    setup.tier.on_queued(prefix(request_id="third"), 0)
    assert setup.tier.lookup(prefix(request_id="third"), 0) == 2
    assert len(setup.keeper.probed) == 2
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
    assert setup.report.num_loaded == 3
    assert setup.tier.lookup(prefix(), 0) == 4


def test_blocks_that_did_not_come_are_removed_and_it_is_said_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    setup = Setup()
    setup.store(KEYS[:4])
    setup.end(setup.load(prefix(), 0, 4), failed=[1, 3], error="its checksum is wrong")
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
    assert setup.begun_stores() == KEYS[:2]


def test_a_block_that_is_offered_twice_at_once_is_written_once() -> None:
    setup = Setup()
    setup.pass_through([KEYS[0], KEYS[0], KEYS[1], KEYS[0]])
    assert setup.begun_stores() == KEYS[:2]


def test_nothing_is_written_before_all_that_is_there_is_counted() -> None:
    setup = Setup(is_scanned=False)
    setup.pass_through(KEYS[:2])
    assert setup.pass_through(KEYS[:2]) == 2
    assert not setup.ledger.drain()
    assert setup.keeper.num_rescans == 2, "the first scan may have come to nothing"
    setup.work()
    setup.pass_through(KEYS[:2])
    assert setup.keeper.num_rescans == 2
    assert setup.begun_stores() == KEYS[:2]


def test_what_finds_no_room_among_the_stores_is_left_to_be_offered_again() -> None:
    setup = Setup(num_blocks=24)  # three of them may be under store
    setup.pass_through(KEYS[:6])
    assert setup.pass_through(KEYS[:6]) == 3
    (transfer,) = setup.ledger.drain()
    assert stored_keys([transfer]) == KEYS[:3]
    assert setup.pass_through(KEYS[3:6]) == 0
    setup.end(transfer)
    assert setup.pass_through(KEYS[:6]) == 6
    assert setup.begun_stores() == KEYS[3:6]


def test_what_was_stored_is_an_event_and_so_is_what_is_gone() -> None:
    setup = Setup()
    transfer = setup.begin_store(KEYS[:3])
    setup.end(transfer, failed=[2])
    (event,) = setup.events.drain()
    assert isinstance(event, BlockStored)
    assert (event.block_hashes, event.medium) == (KEYS[:2], Medium.DISK)
    assert (event.parent_block_hash, event.token_ids) == (None, TOKENS[: 2 * SIZE])
    setup.end(setup.load(prefix(), 0, 2), failed=[1])
    assert setup.events.drain() == [BlockRemoved([KEYS[1]], Medium.DISK)]


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
    without = Setup()
    without.store(KEYS[:8])
    without.tier.prefetch(prefix(), 0)
    assert not without.ledger.drain()


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
    assert setup.begun_stores() == KEYS[6:8]


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

    @rule(count=st.integers(1, 3))
    def housekeeping(self, count: int) -> None:
        self.setup.keeper.work(count)
        self.setup.tier.poll()

    @rule()
    def scan(self) -> None:
        self.setup.keeper.later(self.setup.keeper.scan)

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
        """The index is the disk when everything has ended and been scanned, and nothing is held."""
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
