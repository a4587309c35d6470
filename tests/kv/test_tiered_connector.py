# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from kv_tiers import PREFIX, READY, cached_blocks_of, end_of
from operations import assert_linear
from scripted_tier import ScriptedTier

from pagoda.ipc.clock import VirtualClock
from pagoda.kv.block_pool import Block, BlockPool
from pagoda.kv.connector import PrefixRequest
from pagoda.kv.group_lookup import PendingLookup, Segment
from pagoda.kv.tiered_connector import LOAD_TIMEOUT_S, LoadEnd, TieredKVConnector, TierMatch
from pagoda.kv.transfers import TransferLedger
from pagoda.messages.transfers import DeviceBlocks, TierBlocks, Transfer

OTHER = msgspec.structs.replace(PREFIX, request_id="other")


class Stack:
    """Two connectors, near and far, over a pool of 64 blocks."""

    def __init__(self, *, fails: bool = False) -> None:
        self.clock = VirtualClock()
        self.pool = BlockPool(64)
        self.ledger = TransferLedger(self.pool)
        self.near = ScriptedTier("near", self.ledger)
        self.far = ScriptedTier("far", self.ledger)
        self.stack = TieredKVConnector(
            [self.near, self.far], self.pool, self.ledger, self.clock, fail_on_load_failure=fails
        )
        self.stack.workers_ready(READY)

    def have(self, near: range | list[int], far: range | list[int]) -> None:
        self.near.has = {PREFIX.keys[index] for index in near}
        self.far.has = {PREFIX.keys[index] for index in far}

    def lookup(self, prefix: PrefixRequest, start: int) -> int | None:
        found = self.stack.lookup(prefix, start)
        return None if isinstance(found, PendingLookup) else found.num_blocks

    def load(self, count: int, start: int = 0, prefix: PrefixRequest = PREFIX) -> list[Transfer]:
        """Loads like a request that holds the blocks only while it waits."""
        found = self.stack.lookup(prefix, start)
        assert not isinstance(found, PendingLookup)
        end = start + count
        segments = [
            Segment(it.connector, it.start, min(it.end, end))
            for it in found.segments
            if it.start < end
        ]
        self.blocks = self.pool.allocate(count)
        self.stack.load(TierMatch(prefix, start, end, segments), self.blocks)
        return self.stack.drain_transfers()

    def end(self, transfer: Transfer, failed: list[int] | None = None, error: str = "") -> None:
        self.stack.transfer_ended(end_of(transfer, failed, error))

    def pass_time(self, seconds: float) -> None:
        self.clock.advance_to(self.clock.now() + seconds)


@pytest.fixture
def it() -> Stack:
    return Stack()


def numbers(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def test_a_prefix_is_found_as_far_as_any_connector_goes_on(it: Stack) -> None:
    it.have(near=[0, 1, 4], far=range(2, 8))
    assert it.lookup(PREFIX, 0) == 8
    assert it.lookup(PREFIX, 5) == 3
    assert it.lookup(PREFIX, 8) == 0
    assert it.lookup(PREFIX, 16) == 0
    assert it.lookup(PREFIX, 17) == 0


def test_an_answer_may_be_due_later(it: Stack) -> None:
    it.have(near=[0, 1], far=[])
    it.far.is_unsure = True
    assert it.lookup(PREFIX, 0) is None
    it.far.is_unsure = False
    it.far.changed = {"r"}
    assert [it.stack.poll() for _ in range(2)] == [{"r"}, set()]
    assert it.lookup(PREFIX, 0) == 2


def test_a_hold_that_was_settled_wakes_the_engine(it: Stack) -> None:
    it.pass_time(5.0)
    held_id = it.ledger.hold(it.pool.allocate(1))
    assert it.stack.next_event_at() is None
    it.ledger.settle(held_id, [])
    assert it.stack.next_event_at() == 5.0
    it.stack.drain_load_ends()
    assert it.stack.next_event_at() is None


def test_a_load_is_one_transfer_for_each_part_of_the_prefix(it: Stack) -> None:
    it.have(near=[1, 2, 5], far=[3, 4, 6, 7])
    transfers = it.load(6, start=1)
    parts = [PREFIX.keys[start:end] for start, end in ((1, 3), (3, 5), (5, 6), (6, 7))]
    assert [transfer.source for transfer in transfers] == [
        TierBlocks("disk", list(p)) for p in parts
    ]
    first, second, third, fourth = transfers
    assert first.target == DeviceBlocks(numbers(it.blocks[:2]))
    for transfer in (third, first, fourth):
        it.end(transfer)
        assert it.stack.drain_load_ends() == []
    it.end(second)
    assert it.stack.drain_load_ends() == [LoadEnd("r", 6)]
    assert it.stack.drain_load_ends() == []
    assert ("ended", second.transfer_id, []) in it.far.calls


def test_transfers_wait_for_steps_that_may_use_their_blocks(it: Stack) -> None:
    it.have(near=[0, 1], far=[2])
    blocks = it.pool.allocate(3)
    for block, step in zip(blocks, (3, 9, 4), strict=True):
        block.used_by = step
    it.pool.release(blocks)
    assert [transfer.after_step for transfer in it.load(3)] == [9, 4]


def test_only_what_was_found_can_be_loaded(it: Stack) -> None:
    it.have(near=[0], far=[])
    with pytest.raises(ValueError, match="1 blocks were found, 2 are to be filled"):
        it.load(2)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    ("failed_near", "failed_far", "num_good", "reason"),
    [
        ([], [1], 3, "it rusted"),
        ([1], [], 1, "it burnt"),
        ([1], [0], 1, "it burnt"),
        ([0], [], 0, "it burnt"),
    ],
)
def test_leading_blocks_that_came_are_good(
    failed_near: list[int], failed_far: list[int], num_good: int, reason: str, fails: bool
) -> None:
    it = Stack(fails=fails)
    it.have(near=[0, 1], far=[2, 3, 4])
    near, far = it.load(5)
    it.end(far, failed_far, "it rusted")
    it.end(near, failed_near, "it burnt")
    sentence = f"KV that was found for this request could not be loaded: {reason}."
    assert it.stack.drain_load_ends() == [LoadEnd("r", num_good, sentence if fails else None)]


def test_two_requests_never_load_the_same_block(it: Stack) -> None:
    it.have(near=range(8), far=[])
    (transfer,) = it.load(4)
    assert it.lookup(OTHER, 0) is None
    assert it.lookup(OTHER, 2) is None
    assert it.lookup(OTHER, 4) == 4
    it.stack.poll()
    it.end(transfer)
    assert [it.stack.poll() for _ in range(2)] == [{"r", "other"}, set()]
    assert it.lookup(OTHER, 0) == 8


def test_when_the_first_gives_up_the_second_may_load(it: Stack) -> None:
    it.have(near=range(4), far=[])
    (transfer,) = it.load(4)
    it.stack.poll()
    it.stack.abandon("r")
    assert it.stack.poll()
    assert it.lookup(OTHER, 0) == 4
    it.pool.release(it.blocks)
    assert it.pool.num_available == 60
    it.end(transfer)
    assert it.pool.num_available == 64
    assert it.stack.drain_load_ends() == []
    assert ("ended", transfer.transfer_id, []) in it.near.calls


def test_patience_with_an_answer_ends() -> None:
    it = Stack(fails=True)
    it.stack.wait("r", PendingLookup(it.near))
    it.pass_time(LOAD_TIMEOUT_S / 2)
    it.stack.wait("r", PendingLookup(it.near))
    it.stack.wait("other", PendingLookup(it.near))
    assert it.stack.next_event_at() == LOAD_TIMEOUT_S
    it.pass_time(LOAD_TIMEOUT_S / 2)
    assert it.stack.drain_load_ends() == [LoadEnd("r", 0)]
    it.stack.abandon("other")
    assert it.stack.next_event_at() is None
    it.stack.wait("other", PendingLookup(it.near))
    assert it.stack.next_event_at() == 2 * LOAD_TIMEOUT_S


@pytest.mark.parametrize("fails", [False, True])
def test_patience_with_a_load_ends_but_blocks_stay_until_the_transfer_does(fails: bool) -> None:
    it = Stack(fails=fails)
    it.have(near=[0, 1], far=[2, 3])
    near, far = it.load(4)
    it.end(near)
    it.pass_time(LOAD_TIMEOUT_S)
    failure = "KV that was found for this request could not be loaded: it took longer than 10 s."
    assert it.stack.drain_load_ends() == [LoadEnd("r", 2, failure if fails else None)]
    it.pool.release(it.blocks)
    assert it.pool.num_available == 62
    it.end(far)
    assert it.pool.num_available == 64
    assert it.stack.drain_load_ends() == []


def test_a_connector_that_keeps_blocks_too_long_is_not_asked_meanwhile(it: Stack) -> None:
    it.have(near=[0, 1], far=range(2, 16))
    near, far = it.load(4)
    it.end(near)
    it.pass_time(LOAD_TIMEOUT_S)
    it.stack.drain_load_ends()
    assert it.lookup(PREFIX, 0) == 2
    assert it.lookup(PREFIX, 2) == 0
    it.end(far)
    assert it.lookup(PREFIX, 0) == 16


def test_offers_beyond_the_room_for_stores_are_made_again(it: Stack) -> None:
    cached_blocks = cached_blocks_of(it.pool, PREFIX, 0, 12)
    it.stack.save(cached_blocks)
    assert it.near.offered == [cached.key for cached in cached_blocks[:8]]
    assert it.far.offered == []
    (stored,) = it.stack.drain_transfers()
    it.end(stored)
    assert it.near.offered == [cached.key for cached in cached_blocks]
    assert it.far.offered == [cached.key for cached in cached_blocks[:4]]
    while transfers := it.stack.drain_transfers():
        for transfer in transfers:
            it.end(transfer)
    assert it.far.offered == [cached.key for cached in cached_blocks]
    assert it.ledger.num_open == 0


def test_later_offers_wait_behind_earlier_ones(it: Stack) -> None:
    cached_blocks = cached_blocks_of(it.pool, PREFIX, 0, 12)
    it.stack.save(cached_blocks[:10])
    it.near.stores = False  # from now on it only counts what is offered, which it has room for
    it.stack.save(cached_blocks[10:])
    assert it.near.offered == [cached.key for cached in cached_blocks[:8]]
    (stored,) = it.stack.drain_transfers()
    it.end(stored)
    assert it.near.offered == [cached.key for cached in cached_blocks]


def test_a_block_that_is_gone_is_not_offered_again(it: Stack) -> None:
    it.far.stores = False  # blocks wait in line even for a connector that wants none
    cached_blocks = cached_blocks_of(it.pool, PREFIX, 0, 10)
    it.stack.save(cached_blocks)
    assert it.far.offered == [cached.key for cached in cached_blocks]
    it.pool.discard(cached_blocks[8].key)
    for transfer in it.stack.drain_transfers():
        it.end(transfer)
    assert it.near.offered == [it.key for it in cached_blocks if it is not cached_blocks[8]]


def test_no_more_offers_are_kept_than_there_are_blocks(it: Stack) -> None:
    cached_blocks = cached_blocks_of(it.pool, PREFIX, 0, 16)
    for _ in range(10):
        it.stack.save(cached_blocks)
    assert sum(map(len, it.stack.backlog)) == 2 * 64


def test_prefetching_starts_behind_what_is_nearer(it: Stack) -> None:
    it.have(near=[2, 3], far=[4, 5])
    it.stack.prefetch(PREFIX, 2)
    assert ("prefetch", "r", 2) in it.near.calls
    assert ("prefetch", "r", 4) in it.far.calls


def test_prefetching_is_over_when_all_is_near(it: Stack) -> None:
    it.have(near=[0, 1], far=[2])
    assert not it.stack.prefetch(PREFIX, 0)
    it.near.has.add(PREFIX.keys[2])
    assert it.stack.prefetch(PREFIX, 0)
    it.far.is_unsure = True
    assert not it.stack.prefetch(PREFIX, 0)
    assert it.stack.prefetch(PREFIX, 16)
    it.stack.workers_lost()
    assert not it.stack.prefetch(PREFIX, 0)


def test_nothing_is_prefetched_from_a_connector_that_keeps_blocks_too_long(it: Stack) -> None:
    it.have(near=[], far=range(16))
    (transfer,) = it.load(4)
    it.pass_time(LOAD_TIMEOUT_S)
    it.stack.drain_load_ends()
    assert not it.stack.prefetch(OTHER, 0)
    assert ("prefetch", "other", 0) not in it.far.calls
    it.end(transfer)
    it.stack.prefetch(OTHER, 0)
    assert ("prefetch", "other", 0) in it.far.calls


def test_all_hear_of_a_request_and_of_its_end(it: Stack) -> None:
    it.stack.on_queued(PREFIX, 3)
    it.stack.on_dequeued("r")
    it.stack.close()
    for tier in (it.near, it.far):
        assert tier.calls == [("ready", 8), ("announce", "r", 3), ("forget", "r"), ("close",)]
    assert it.stack.pollables() == ["near", "far"]
    assert [load.name for load in it.stack.load_report()] == ["near", "far"]


def test_nothing_of_lost_workers_remains(it: Stack) -> None:
    it.have(near=range(4), far=[])
    (transfer,) = it.load(4)
    it.stack.save(cached_blocks_of(it.pool, PREFIX, 6, 16))
    it.pool.release(it.blocks)
    it.stack.wait("other", PendingLookup(it.near))
    it.stack.workers_lost()
    assert it.near.calls[-2:] == [("lost",), ("workers lost",)]
    assert it.pool.num_available == 64
    assert it.stack.drain_transfers() == []
    assert it.stack.next_event_at() is None
    it.end(transfer)
    it.pass_time(LOAD_TIMEOUT_S)
    assert it.stack.drain_load_ends() == []
    assert it.lookup(PREFIX, 0) == 0
    it.stack.prefetch(PREFIX, 0)
    it.stack.save(cached_blocks_of(it.pool, PREFIX, 0, 2))
    assert it.near.calls[-1] == ("workers lost",)
    assert it.stack.drain_transfers() == []
    it.stack.workers_ready(READY)
    assert it.lookup(PREFIX, 0) == 4
    it.load(4)
    assert it.stack.next_event_at() == 2 * LOAD_TIMEOUT_S


def test_who_gives_up_by_himself_is_waited_for_as_long_as_he_does(it: Stack) -> None:
    it.far.has_own_timeout = True
    it.stack.wait("r", PendingLookup(it.near))
    it.stack.wait("r", PendingLookup(it.far))
    assert it.stack.next_event_at() is None
    it.have(near=[], far=range(4))
    (transfer,) = it.load(4)
    assert it.stack.next_event_at() is None
    it.pass_time(10 * LOAD_TIMEOUT_S)
    assert it.stack.drain_load_ends() == []
    it.end(transfer)
    assert it.stack.drain_load_ends() == [LoadEnd("r", 4)]


@pytest.mark.parametrize("is_near_late", [True, False])
def test_patience_with_a_part_of_a_load_ends_whoever_has_the_other(
    it: Stack, is_near_late: bool
) -> None:
    it.far.has_own_timeout = True
    it.have(near=range(2), far=range(2, 4))
    near, far = it.load(4)
    if not is_near_late:
        it.end(near)
    it.pass_time(LOAD_TIMEOUT_S)
    if is_near_late:
        assert it.stack.drain_load_ends() == [LoadEnd("r", 0)]
        assert it.lookup(OTHER, 2) == 2, "only the slow one is not asked any more"
        it.end(far)
        it.end(near)
        assert it.lookup(OTHER, 0) == 4
    else:
        assert it.stack.drain_load_ends() == []
        assert it.stack.next_event_at() is None
        it.end(far)
        assert it.stack.drain_load_ends() == [LoadEnd("r", 4)]


def test_who_waits_for_what_another_loads_waits_for_its_source(it: Stack) -> None:
    it.far.has_own_timeout = True
    it.have(near=range(2), far=range(2, 8))
    it.load(8)
    assert it.stack.lookup(OTHER, 0) == PendingLookup(it.near)
    assert it.stack.lookup(OTHER, 3) == PendingLookup(it.far)


# ---- several events in one turn


def test_an_end_that_is_not_drained_yet_is_dropped_with_its_request(it: Stack) -> None:
    it.have(near=range(4), far=[])
    (transfer,) = it.load(4)
    it.end(transfer)
    it.stack.abandon("r")
    assert it.stack.drain_load_ends() == []
    assert it.stack.is_idle


# ---- growth


def burst(count: int) -> Callable[[], None]:
    """A burst of requests, each with a prefix of its own that lies near and far; all time out or end at once."""
    pool = BlockPool(4 * count)
    ledger = TransferLedger(pool)
    clock = VirtualClock()
    near, far = ScriptedTier("near", ledger), ScriptedTier("far", ledger)
    stack = TieredKVConnector([near, far], pool, ledger, clock)
    stack.workers_ready(READY)
    requests = [
        PrefixRequest(str(number), [f"{number} {index}".encode() for index in range(4)], [0] * 16)
        for number in range(count)
    ]
    near.has = {key for request in requests for key in request.keys[:2]}
    far.has = {key for request in requests for key in request.keys[2:]}

    def live() -> None:
        for request in requests:
            stack.on_queued(request, 0)
        for request in requests:
            match = stack.lookup(request, 0)
            assert not isinstance(match, PendingLookup)
            stack.load(match, pool.allocate(4))
        for request in requests:  # a second one for each prefix waits for the first
            other = msgspec.structs.replace(request, request_id=f"{request.request_id} again")
            pending = stack.lookup(other, 0)
            assert isinstance(pending, PendingLookup)
            stack.wait(other.request_id, pending)
        transfers = stack.drain_transfers()
        for transfer in transfers[: len(transfers) // 2]:
            stack.transfer_ended(end_of(transfer))
        clock.advance_to(LOAD_TIMEOUT_S)
        stack.drain_load_ends()
        stack.poll()
        for transfer in transfers:
            stack.transfer_ended(end_of(transfer))
        for request in requests:
            stack.on_dequeued(request.request_id)

    return live


def test_a_burst_of_requests_costs_as_many_operations_as_it_has_requests() -> None:
    assert_linear(burst, (512, 1024, 4096))
