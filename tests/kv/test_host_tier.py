# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import msgspec
import pytest
from kv_tiers import BLOCK_SIZE, PREFIX, READY, cached_blocks_of, end_of

from pagoda.kv.block_pool import BlockPool
from pagoda.kv.events import BlockRemoved, BlockStored, CacheRecorder, Medium
from pagoda.kv.host_tier import HostTier
from pagoda.kv.transfers import TransferLedger
from pagoda.messages.transfers import (
    DeviceBlocks,
    HostSlots,
    TierPlace,
    Transfer,
)
from pagoda.parallel.segments import BlockRanks, SegmentShares


class Host:
    """A host tier over a pool of 64 blocks, and what it has asked the workers for."""

    def __init__(self, num_slots: int = 8) -> None:
        self.pool = BlockPool(64)
        self.ledger = TransferLedger(self.pool)
        self.events = CacheRecorder(outlives_workers=True)
        self.tier = HostTier(num_slots, 4, self.ledger, self.events)

    def store(self, start: int, end: int) -> list[Transfer]:
        """Offers blocks of the prefix; what the workers do of it goes well."""
        self.tier.save(cached_blocks_of(self.pool, PREFIX, start, end))
        transfers = self.ledger.drain()
        for transfer in transfers:
            self.ledger.close(end_of(transfer))
        return transfers

    def load(self, count: int) -> Transfer:
        blocks = self.pool.allocate(count)
        self.tier.load(PREFIX, 0, blocks, after_step=5)
        self.pool.release(blocks)
        return self.ledger.drain()[-1]

    @property
    def num_free(self) -> int:
        """Slots that no transfer uses."""
        return self.tier.pool.num_available


@pytest.fixture
def host() -> Host:
    return Host()


def test_what_is_offered_is_stored_once_and_found_from_then_on(host: Host) -> None:
    (transfer,) = host.store(0, 3)
    assert isinstance(transfer.source, DeviceBlocks)
    assert transfer.target == HostSlots([0, 1, 2])
    assert host.tier.lookup(PREFIX, 0) == 3
    assert host.tier.lookup(PREFIX, 2) == 1
    assert host.tier.lookup(PREFIX, 3) == 0
    assert host.tier.lookup(PREFIX, len(PREFIX.keys) + 1) == 0
    assert host.store(0, 3) == []
    assert host.tier.load_report().num_stored == 3


def test_nothing_is_found_before_it_is_there_and_nothing_is_stored_twice_meanwhile() -> None:
    host = Host()
    cached_blocks = cached_blocks_of(host.pool, PREFIX, 0, 2)
    assert host.tier.save(cached_blocks) == 2
    assert host.tier.lookup(PREFIX, 0) == 0
    assert host.tier.save([*cached_blocks, *cached_blocks]) == 4
    (transfer,) = host.ledger.drain()
    host.ledger.close(end_of(transfer, failed=[0]))
    assert [host.tier.lookup(PREFIX, start) for start in (0, 1)] == [0, 1]
    assert host.tier.load_report().num_failed == 1
    assert host.num_free == 8


def test_it_stops_where_there_is_no_room_for_more_stores() -> None:
    small = Host(num_slots=3)
    small.store(0, 5)
    assert small.tier.lookup(PREFIX, 0) == 3, "as far as the arena goes"
    host = Host(num_slots=64)
    assert host.tier.save(cached_blocks_of(host.pool, PREFIX, 0, 10)) == 8
    assert host.ledger.store_room == 0
    assert host.tier.save(cached_blocks_of(host.pool, PREFIX, 0, 8)) == 8
    assert host.tier.save(cached_blocks_of(host.pool, PREFIX, 10, 11)) == 0


def test_slots_under_transfer_are_not_evicted() -> None:
    host = Host(num_slots=4)
    host.store(0, 4)
    transfer = host.load(3)
    assert transfer.source == HostSlots([0, 1, 2])
    assert transfer.after_step == 5
    host.store(4, 8)
    assert host.tier.lookup(PREFIX, 0) == 3
    assert host.tier.lookup(PREFIX, 4) == 1
    host.ledger.close(end_of(transfer, failed=[1]))
    assert host.num_free == 4
    report = host.tier.load_report()
    assert (report.num_loaded, report.num_failed) == (2, 1)
    assert host.tier.lookup(PREFIX, 0) == 1, "what failed to load is not found again"


def test_what_requests_pass_through_is_evicted_last_and_ends_before_roots() -> None:
    host = Host(num_slots=6)
    host.store(0, 3)
    host.store(5, 8)
    host.store(0, 3)  # offered once more, since another request passed through it
    host.store(8, 10)
    assert host.tier.lookup(PREFIX, 0) == 3
    assert host.tier.lookup(PREFIX, 5) == 1


def test_more_than_there_is_cannot_be_loaded(host: Host) -> None:
    host.store(0, 1)
    with pytest.raises(ValueError, match="2 blocks are wanted, 1 are here"):
        host.load(2)


def test_a_slower_tier_may_fill_a_quarter_of_the_slots_at_a_time() -> None:
    host = Host(num_slots=8)
    slots = [host.tier.reserve(PREFIX, index) for index in range(3)]
    assert [slot is None for slot in slots] == [False, False, True]
    assert host.tier.reserve(PREFIX, 0) is None
    host.tier.settle(PREFIX.keys[0], is_good=True)
    assert host.tier.poll()
    assert not host.tier.poll()
    assert host.tier.reserve(PREFIX, 0) is None
    assert host.tier.reserve(PREFIX, 2) is not None
    assert host.tier.lookup(PREFIX, 0) is None
    host.tier.settle(PREFIX.keys[1], is_good=False)
    assert host.tier.lookup(PREFIX, 0) == 1
    host.tier.settle(PREFIX.keys[2], is_good=True)
    assert host.num_free == 8


def test_a_prefix_longer_than_the_arena_puts_none_of_its_own_blocks_out() -> None:
    host = Host(num_slots=4)
    host.store(8, 10)
    assert host.tier.room_behind(PREFIX, 0) == 4, "blocks of others give way"
    host.store(0, 3)
    assert [host.tier.room_behind(PREFIX, index) for index in (0, 1, 3)] == [4, 3, 1]
    host.store(3, 4)
    assert host.tier.room_behind(PREFIX, 4) == 0
    host.tier.reserve(PREFIX, 9)
    host.tier.settle(PREFIX.keys[9], is_good=True)
    assert PREFIX.request_id in host.tier.poll(), "it is told when there may be more room"


def test_no_more_is_on_its_way_than_can_be_read_in_about_a_second() -> None:
    directories = tuple(TierPlace("disk", f"/{rank}", 300 * 2**20) for rank in range(2))
    tier = Host(64).tier
    tier.workers_ready(msgspec.structs.replace(READY, kv_host_slots=64, kv_places=directories))
    assert [tier.reserve(PREFIX, index) for index in range(5)] == [0, 1, 2, None, None]


def test_a_block_on_its_way_is_waited_for_rather_than_stored_or_read_from_afar(host: Host) -> None:
    host.store(0, 1)
    host.tier.reserve(PREFIX, 1)
    assert host.tier.lookup(PREFIX, 0) is None
    assert host.tier.lookup(PREFIX, 2) == 0
    assert host.store(1, 2) == []


def test_there_is_nothing_to_reserve_while_all_slots_are_used() -> None:
    host = Host(num_slots=2)
    host.tier.save(cached_blocks_of(host.pool, PREFIX, 0, 2))
    assert host.tier.reserve(PREFIX, 3) is host.tier.reserve(PREFIX, 0) is None


def test_arenas_go_with_their_workers(host: Host) -> None:
    host.store(0, 3)
    host.load(2)
    host.tier.save(cached_blocks_of(host.pool, PREFIX, 3, 4))
    host.tier.reserve(PREFIX, 5)
    host.ledger.drop_all()
    host.tier.workers_lost()
    assert host.tier.lookup(PREFIX, 0) == 0
    assert host.tier.lookup(PREFIX, 5) == 0
    assert host.num_free == 8
    report = host.tier.load_report()
    assert (report.num_blocks, report.num_stored, report.num_removed) == (0, 3, 3)
    host.tier.workers_ready(READY)
    host.store(0, 4)
    assert host.tier.lookup(PREFIX, 0) == 4
    host.tier.pool.check()


def test_later_arenas_must_not_be_smaller() -> None:
    with pytest.raises(RuntimeError, match="8 slots, those before had 9"):
        Host(num_slots=9).tier.workers_ready(READY)


def test_events_tell_what_host_memory_holds() -> None:
    host = Host(num_slots=4)
    host.store(0, 2)
    host.tier.reserve(PREFIX, 2)
    host.tier.settle(PREFIX.keys[2], is_good=True)
    (stored,) = host.events.drain()
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == list(PREFIX.keys[:3])
    assert stored.parent_block_hash is None
    assert stored.token_ids == list(PREFIX.token_ids[:12])
    assert stored.medium == Medium.HOST
    host.store(6, 8)
    removed, again = host.events.drain()
    assert isinstance(removed, BlockRemoved)
    assert removed.medium == Medium.HOST
    assert isinstance(again, BlockStored)
    assert again.parent_block_hash == PREFIX.keys[5]


# ---- segments of running requests


def test_what_is_held_is_copied_if_it_lacks_and_not_evicted_until_it_is_let_go() -> None:
    host = Host(num_slots=4)
    host.store(0, 1)
    hold = host.tier.hold(cached_blocks_of(host.pool, PREFIX, 0, 3))
    assert hold is not None
    assert not hold.is_there
    (transfer,) = host.ledger.drain()
    assert isinstance(transfer.source, DeviceBlocks)
    assert len(transfer.source.block_ids) == 2
    host.ledger.close(end_of(transfer))
    assert hold.is_there
    assert (host.tier.num_held, host.tier.num_holdable) == (3, 4)
    host.store(4, 8)
    assert host.tier.lookup(PREFIX, 0) == 3
    again = host.tier.hold_found(PREFIX.keys[:2])
    assert again.is_there
    assert again.place == HostSlots([0, 1])
    for _ in range(2):
        hold.release()
    assert (host.num_free, host.tier.num_held) == (2, 2)
    again.release()
    assert (host.num_free, host.tier.num_held) == (4, 0)


def test_what_is_under_way_or_has_no_room_is_not_held() -> None:
    host = Host(num_slots=4)
    host.tier.save(cached_blocks_of(host.pool, PREFIX, 0, 2))
    assert host.tier.hold(cached_blocks_of(host.pool, PREFIX, 0, 2)) is None
    assert host.tier.hold(cached_blocks_of(host.pool, PREFIX, 2, 8)) is None
    (transfer,) = host.ledger.drain()
    host.ledger.close(end_of(transfer))
    assert host.num_free == 4
    with pytest.raises(ValueError, match="3 blocks are to be held, 2 are here"):
        host.tier.hold_found(PREFIX.keys[:3])


@pytest.mark.parametrize("dies", [False, True])
def test_a_copy_that_fails_says_so_and_ends_by_itself(host: Host, dies: bool) -> None:
    hold = host.tier.hold(cached_blocks_of(host.pool, PREFIX, 0, 3))
    assert hold is not None
    (transfer,) = host.ledger.drain()
    if dies:
        host.ledger.drop_all()
        host.tier.workers_lost()
    else:
        host.ledger.close(end_of(transfer, failed=[1], error="it is broken"))
    assert not hold.is_there
    assert hold.error == ("the workers are lost" if dies else "it is broken")
    hold.release()
    assert host.num_free == 8


def test_blocks_that_prefixes_of_today_have_on_another_rank_give_way_unless_they_are_in_use() -> (
    None
):
    pool = BlockPool(64, num_ranks=2)
    ledger = TransferLedger(pool)
    tier = HostTier(16, BLOCK_SIZE, ledger, num_ranks=2)
    shares = SegmentShares(2, 4 * BLOCK_SIZE)
    before, today = (
        msgspec.structs.replace(PREFIX, ranks=BlockRanks(first, shares, BLOCK_SIZE))
        for first in range(2)
    )

    def end_all() -> list[Transfer]:
        transfers = ledger.drain()
        for transfer in transfers:
            ledger.close(end_of(transfer))
        return transfers

    tier.save(cached_blocks_of(pool, before, 4, 8))
    end_all()
    in_use = tier.pool.find(PREFIX.keys[7])
    assert in_use is not None
    tier.pool.share([in_use])
    for start, end in ((0, 4), (4, 7)):
        tier.save(cached_blocks_of(pool, today, start, end))
        end_all()
    assert tier.lookup(today, 0) == 7
    assert tier.lookup(before, 4) == 0
    assert tier.reserve(today, 7) is None
    tier.save(cached_blocks_of(pool, today, 7, 8))
    assert end_all() == []
    tier.pool.release([in_use])
    assert tier.reserve(today, 7) is not None, "another tier may bring it to its rank"
    tier.settle(PREFIX.keys[7], 0, is_good=True)
    assert tier.lookup(today, 0) == 8
    tier.pool.check()
