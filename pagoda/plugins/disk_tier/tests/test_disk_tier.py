# SPDX-License-Identifier: Apache-2.0
"""Blocks on disk: what requests find, what is kept, and what workers and prefetches do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from disk_rig import EPOCH, KEYS, OTHER_KEYS, TOKENS, UNIT, DiskRig, prefix, ready, stored_keys
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagoda.kv.block_pool import Block
from pagoda.kv.connector import PrefixRequest
from pagoda.kv.events import BlockRemoved, BlockStored
from pagoda.messages.transfers import DeviceBlocks, HostSlots, TierBlocks, Transfer
from pagoda.plugins.disk_tier.scanner import OWN

# ---- what requests find


def test_what_a_scan_found_can_be_loaded() -> None:
    rig = DiskRig(is_scanned=False)
    rig.disk.update(dict.fromkeys(KEYS[:5], EPOCH - 100))
    rig.work()
    assert [rig.tier.lookup(prefix(), start) for start in (0, 2, 5)] == [5, 3, 0]
    assert rig.tier.lookup(prefix(KEYS[:3]), 1) == 2
    assert rig.report.num_blocks == 5


def test_while_a_probe_is_under_way_nobody_knows(rig: DiskRig) -> None:
    rig.disk.update(dict.fromkeys(KEYS[:3], EPOCH))  # another process wrote them
    rig.tier.on_queued(prefix(), 0)
    assert rig.tier.lookup(prefix(), 0) is None
    assert rig.tier.lookup(prefix(request_id="another"), 0) == 0
    assert not rig.tier.poll()
    assert rig.work()
    assert rig.tier.lookup(prefix(), 0) == 3
    assert rig.tier.lookup(prefix(request_id="another"), 0) == 3


def test_a_request_whose_blocks_are_all_known_needs_no_probe(rig: DiskRig) -> None:
    rig.store(KEYS[:4])
    rig.tier.on_queued(prefix(KEYS[:4]), 0)
    assert rig.tier.lookup(prefix(KEYS[:4]), 0) == 4
    rig.tier.on_queued(prefix(KEYS[:4]), 4)
    assert not rig.keeper.probed


def test_the_answer_to_a_request_that_is_gone_tells_nobody(rig: DiskRig) -> None:
    rig.tier.on_queued(prefix(), 0)
    rig.tier.on_dequeued("r")
    rig.clock.advance_to(100)  # what nobody waits for is no sign of a bad disk
    rig.tier.on_queued(prefix(request_id="next"), 0)
    assert rig.tier.lookup(prefix(request_id="next"), 0) is None
    for _ in range(2):
        rig.tier.on_dequeued("next")
    assert not rig.work()
    rig.tier.on_queued(prefix(), 0)
    assert rig.work()


def test_a_late_answer_to_an_earlier_probe_of_a_request_does_not_end_its_next_one(
    rig: DiskRig,
) -> None:
    rig.tier.on_queued(prefix(), 0)
    rig.tier.on_dequeued("r")
    rig.tier.on_queued(prefix(), 0)  # it was preempted
    rig.keeper.work(1)
    rig.disk.update(dict.fromkeys(KEYS[:3], EPOCH))  # others write meanwhile
    assert not rig.tier.poll()
    assert rig.tier.lookup(prefix(), 0) is None
    assert rig.work() == {"r"}
    assert rig.tier.lookup(prefix(), 0) == 3


def test_a_disk_that_does_not_answer_is_not_asked_again_until_it_does(rig: DiskRig) -> None:
    rig.store(KEYS[:2])
    rig.disk.update(dict.fromkeys(KEYS[2:5], EPOCH))
    rig.tier.on_queued(prefix(), 0)
    rig.clock.advance_to(6)
    rig.tier.on_queued(prefix(request_id="second"), 0)
    rig.clock.advance_to(9)
    assert not rig.tier.poll()
    assert rig.tier.lookup(prefix(), 0) is None
    rig.clock.advance_to(10)
    assert rig.tier.poll()  # nobody who waits need wait on
    assert rig.tier.lookup(prefix(), 0) == 2
    assert rig.tier.lookup(prefix(request_id="second"), 0) == 2
    for request_id in ("r", "second"):
        rig.tier.on_dequeued(request_id)
    assert rig.keeper.forgotten == ["r", "second"]
    rig.tier.on_queued(prefix(request_id="third"), 0)
    assert rig.tier.lookup(prefix(request_id="third"), 0) == 2
    assert len(rig.keeper.probed) == 2
    rig.work()
    rig.disk[KEYS[5]] = EPOCH
    rig.tier.on_queued(prefix(request_id="fourth"), 0)
    assert rig.tier.lookup(prefix(request_id="fourth"), 0) is None
    assert rig.work()
    assert rig.tier.lookup(prefix(request_id="fourth"), 0) == 6


def test_a_disk_that_answers_one_after_the_other_is_waited_for(rig: DiskRig) -> None:
    for number in range(4):
        rig.tier.on_queued(prefix(request_id=f"r{number}"), 0)
    for number in range(4):
        rig.clock.advance_to(8 * (number + 1))
        assert rig.tier.lookup(prefix(request_id="r3"), 0) is None
        rig.keeper.work(1)
        assert rig.tier.poll()
    assert rig.tier.lookup(prefix(request_id="r3"), 0) == 0


def test_probes_are_made_before_the_scan_has_ended() -> None:
    rig = DiskRig(is_scanned=False)
    rig.disk.update(dict.fromkeys(KEYS[:3], EPOCH))
    rig.keeper.jobs.clear()
    rig.tier.on_queued(prefix(), 0)
    assert rig.work()
    assert rig.tier.lookup(prefix(), 0) == 3
    assert not rig.report.is_indexed


def test_a_load_is_one_transfer_into_the_blocks(rig: DiskRig) -> None:
    rig.store(KEYS[:4])
    transfer = rig.load(prefix(), 1, 3)
    assert transfer.source == TierBlocks("disk", KEYS[1:4])
    assert isinstance(transfer.target, DeviceBlocks)
    assert len(transfer.target.block_ids) == 3
    assert transfer.after_step == 7
    rig.end(transfer)
    assert rig.report.num_loaded == 3
    assert rig.tier.lookup(prefix(), 0) == 4


def test_blocks_that_did_not_come_are_removed_and_it_is_said_why(
    rig: DiskRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.store(KEYS[:4])
    rig.end(rig.load(prefix(), 0, 4), failed=[1, 3], error="its checksum is wrong")
    assert rig.tier.lookup(prefix(), 0) == 1
    assert rig.keeper.removed == [(OWN, [KEYS[1], KEYS[3]])]
    assert (rig.report.num_loaded, rig.report.num_failed) == (2, 2)
    assert caplog.messages == [
        "2 KV blocks could not be read from /kv/model-0, the first because its checksum is wrong; "
        "they are computed again."
    ]
    rig.work()
    assert set(rig.disk) == {KEYS[0], KEYS[2]}


def test_objects_that_could_not_be_read_are_left_and_found_again(rig: DiskRig) -> None:
    rig.store(KEYS[:4])
    transfer = rig.load(prefix(), 0, 4)
    rig.end(transfer, failed=[1, 2, 3], error="Input/output error", unreadable=[1, 3])
    assert rig.keeper.removed == [(OWN, [KEYS[2]])]
    assert rig.tier.lookup(prefix(), 0) == 1
    rig.tier.on_queued(prefix(KEYS[:2]), 0)
    assert rig.work()
    assert rig.tier.lookup(prefix(), 0) == 2
    assert set(rig.disk) == {KEYS[0], KEYS[1], KEYS[3]}


def test_loads_that_fail_one_after_the_other_do_not_fill_the_log(
    rig: DiskRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.store(KEYS[:8])
    for index in range(8):
        rig.clock.advance_to(index * 4)
        rig.end(rig.load(prefix(), index, 1), failed=[0])
    assert len(caplog.messages) == 3


# ---- what is kept


def test_blocks_are_written_at_the_second_touch(rig: DiskRig) -> None:
    assert rig.pass_through(KEYS[:3]) == 3
    assert not rig.ledger.drain()
    assert rig.pass_through(KEYS[:2]) == 2
    (transfer,) = rig.ledger.drain()
    assert transfer.target == TierBlocks("disk", KEYS[:2])
    assert isinstance(transfer.source, DeviceBlocks)
    rig.pass_through(KEYS[:2])
    assert not rig.ledger.drain()  # they are under way
    assert rig.tier.lookup(prefix(), 0) == 0
    rig.end(transfer)
    assert rig.tier.lookup(prefix(), 0) == 2
    assert rig.report.num_stored == 2
    assert rig.keeper.num_rescans == 1
    rig.pass_through(KEYS[:2])
    assert not rig.ledger.drain()


@pytest.mark.parametrize("min_touches", [1, 3])
def test_the_number_of_touches_can_be_chosen(min_touches: int) -> None:
    rig = DiskRig(min_touches=min_touches)
    for _ in range(min_touches - 1):
        rig.pass_through(KEYS[:2])
        assert not rig.ledger.drain()
    rig.pass_through(KEYS[:2])
    assert rig.begun_stores() == KEYS[:2]


def test_a_block_that_is_offered_twice_at_once_is_written_once(rig: DiskRig) -> None:
    rig.pass_through([KEYS[0], KEYS[0], KEYS[1], KEYS[0]])
    assert rig.begun_stores() == KEYS[:2]


def test_nothing_is_written_before_all_that_is_there_is_counted() -> None:
    rig = DiskRig(is_scanned=False)
    rig.pass_through(KEYS[:2])
    assert rig.pass_through(KEYS[:2]) == 2
    assert not rig.ledger.drain()
    assert rig.keeper.num_rescans == 2, "the first scan may have come to nothing"
    rig.work()
    rig.pass_through(KEYS[:2])
    assert rig.keeper.num_rescans == 2
    assert rig.begun_stores() == KEYS[:2]


def test_what_finds_no_room_among_the_stores_is_left_to_be_offered_again() -> None:
    rig = DiskRig(num_blocks=24)  # three of them may be under store
    rig.pass_through(KEYS[:6])
    assert rig.pass_through(KEYS[:6]) == 3
    (transfer,) = rig.ledger.drain()
    assert stored_keys([transfer]) == KEYS[:3]
    assert rig.pass_through(KEYS[3:6]) == 0
    rig.end(transfer)
    assert rig.pass_through(KEYS[:6]) == 6
    assert rig.begun_stores() == KEYS[3:6]


def test_what_was_stored_is_an_event_and_so_is_what_is_gone(rig: DiskRig) -> None:
    transfer = rig.begin_store(KEYS[:3])
    rig.end(transfer, failed=[2])
    (event,) = rig.events.drain()
    assert isinstance(event, BlockStored)
    assert (event.block_hashes, event.medium) == (KEYS[:2], "DISK")
    assert (event.parent_block_hash, event.token_ids) == (None, TOKENS[:8])
    rig.end(rig.load(prefix(), 0, 2), failed=[1])
    assert rig.events.drain() == [BlockRemoved([KEYS[1]], "DISK", None)]


# ---- what is brought nearer


def test_blocks_are_brought_to_host_memory_as_far_as_there_is_room() -> None:
    rig = DiskRig(host_slots=16)
    assert rig.host is not None
    rig.store(KEYS[:8])
    rig.host.reserve(prefix(), 2)
    rig.tier.prefetch(prefix(), 1)
    (transfer,) = rig.ledger.drain()
    assert transfer.source == TierBlocks("disk", [KEYS[1], KEYS[3], KEYS[4]])
    assert transfer.target == HostSlots([1, 2, 3])
    rig.tier.prefetch(prefix(), 1)
    assert not rig.ledger.drain()
    rig.end(transfer, failed=[1])
    assert [key for key in KEYS[1:5] if rig.host.pool.find(key)] == [KEYS[1], KEYS[4]]
    assert rig.host.load_report().num_failed == 1
    assert rig.tier.lookup(prefix(), 0) == 3
    # They have come to the host tier, which counts them, and not to the device.
    assert (rig.report.num_loaded, rig.report.num_failed) == (0, 0)
    without = DiskRig()
    without.store(KEYS[:8])
    without.tier.prefetch(prefix(), 0)
    assert not without.ledger.drain()


# ---- workers come and go


def test_what_is_on_disk_outlives_the_workers() -> None:
    rig = DiskRig(host_slots=16)
    assert rig.host is not None
    rig.store(KEYS[:6])
    rig.pass_through(KEYS[6:8])
    rig.pass_through(KEYS[6:8])
    rig.tier.prefetch(prefix(), 0)
    rig.ledger.drain()
    rig.load(prefix(), 4, 2)
    rig.ledger.drop_all()
    rig.tier.workers_lost()
    rig.tier.workers_ready(rig.ready)
    assert len(rig.keepers) == 1
    assert rig.keeper.num_rescans == 2
    assert rig.tier.lookup(prefix(), 0) == 6
    assert rig.host.load_report().num_failed == 0
    assert rig.ledger.num_open == 0
    rig.pass_through(KEYS[6:8])
    assert rig.begun_stores() == KEYS[6:8]


def test_workers_of_other_directories_begin_with_what_is_in_them(rig: DiskRig) -> None:
    rig.store(KEYS[:6])
    rig.tier.on_queued(prefix(), 0)
    rig.ledger.drop_all()
    rig.tier.workers_lost()
    rig.tier.workers_ready(ready(name="other"))
    assert [keeper.is_closed for keeper in rig.keepers] == [True, False]
    assert not rig.report.is_indexed
    assert rig.tier.lookup(prefix(), 0) is None, "a request in line asks again"
    rig.keeper.disk[OWN].update(dict.fromkeys(KEYS[:2], EPOCH))
    rig.work()
    assert rig.tier.lookup(prefix(), 0) == 2
    rig.tier.on_dequeued("r")


# ---- anything in any order


class TierMachine(RuleBasedStateMachine):
    """Requests, workers that are lost, objects that vanish, and ends of transfers in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = DiskRig(quota=12 * UNIT, num_blocks=64, num_ranks=2)
        self.open: list[tuple[Transfer, list[Block]]] = []
        self.announced: set[str] = set()
        self.foreign = 0
        self.keys = KEYS[:10] + OTHER_KEYS[:10]

    def take(self, blocks: Sequence[Block] = ()) -> None:
        self.open += [(transfer, list(blocks)) for transfer in self.rig.ledger.drain()]

    def prefix(self, number: int) -> PrefixRequest:
        keys = KEYS if number % 2 else OTHER_KEYS
        return prefix(keys[: 4 + number], f"r{number}")

    @rule(start=st.integers(0, 9), count=st.integers(1, 6), salted=st.booleans())
    def pass_through(self, start: int, count: int, salted: bool) -> None:
        keys = (OTHER_KEYS if salted else KEYS)[start : min(10, start + count)]
        assert 0 <= self.rig.pass_through(keys) <= len(keys)
        self.take()

    @rule(number=st.integers(0, 5))
    def on_queued(self, number: int) -> None:
        if f"r{number}" not in self.announced:
            self.announced.add(f"r{number}")
            self.rig.tier.on_queued(self.prefix(number), 0)

    @rule(number=st.integers(0, 5))
    def forget(self, number: int) -> None:
        self.announced.discard(f"r{number}")
        self.rig.tier.on_dequeued(f"r{number}")

    @rule(number=st.integers(0, 5), start=st.integers(0, 3))
    def load(self, number: int, start: int) -> None:
        wanted = self.prefix(number)
        count = self.rig.tier.lookup(wanted, start)
        assert count is not None or f"r{number}" in self.announced
        if count and count <= self.rig.pool.num_available:
            blocks = self.rig.pool.allocate(count)
            self.rig.tier.load(wanted, start, blocks, -1)
            self.rig.pool.release(blocks)
            self.take(blocks)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.open) - 1))
        transfer, _ = self.open.pop(index)
        if isinstance(transfer.target, TierBlocks):
            keys = transfer.target.keys
            failed = data.draw(st.sets(st.integers(0, len(keys) - 1)))
            self.rig.end(transfer, sorted(failed))
            return
        assert isinstance(transfer.source, TierBlocks)
        keys = transfer.source.keys
        failed = {index for index, key in enumerate(keys) if key not in self.rig.disk}
        failed |= data.draw(st.sets(st.integers(0, len(keys) - 1), max_size=1))
        self.rig.end(transfer, sorted(failed))

    @rule(count=st.integers(1, 3))
    def housekeeping(self, count: int) -> None:
        self.rig.keeper.work(count)
        self.rig.tier.poll()

    @rule()
    def scan(self) -> None:
        self.rig.keeper.later(self.rig.keeper.scan)

    @rule(key=st.sampled_from(KEYS[:10]))
    def somebody_removes_an_object(self, key: bytes) -> None:
        self.rig.disk.pop(key, None)

    @rule(seconds=st.integers(1, 50))
    def time_goes_by(self, seconds: int) -> None:
        self.rig.clock.advance_to(self.rig.clock.now() + seconds)

    @rule()
    def lose_the_workers(self) -> None:
        self.rig.ledger.drop_all()
        self.rig.tier.workers_lost()
        self.rig.tier.workers_ready(self.rig.ready)
        self.open.clear()

    @invariant()
    def the_quota_is_kept(self) -> None:
        storing = [t for t, _ in self.open if isinstance(t.target, TierBlocks)]
        num_objects = len(self.rig.disk) + len(stored_keys(storing))
        assert num_objects <= 12

    @invariant()
    def the_books_balance(self) -> None:
        report = self.rig.report
        assert self.rig.ledger.num_open == len(self.open)
        assert 0 <= report.num_blocks <= report.num_total_blocks == 12

    def teardown(self) -> None:
        """The index is the disk when everything has ended and been scanned, and nothing is held."""
        while self.open:
            transfer, _ = self.open.pop()
            self.rig.end(transfer)
        self.rig.clock.advance_to(self.rig.clock.now() + 1000)
        self.rig.work()
        in_index = {key for key in self.keys if self.rig.tier.lookup(prefix([key], "x"), 0)}
        assert in_index >= set(self.rig.disk)
        assert self.rig.pool.num_available == self.rig.pool.num_blocks
        assert self.rig.ledger.store_room == 8
        for number in range(6):
            self.rig.tier.on_dequeued(f"r{number}")


TestTierMachine = TierMachine.TestCase
