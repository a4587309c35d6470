# SPDX-License-Identifier: Apache-2.0
"""The choice between copying and computing again, and the order of copies."""

from __future__ import annotations

import msgspec
from kv_tiers import BLOCK_SIZE, PREFIX, READY, cached_blocks_of, end_of
from scripted_tier import ScriptedTier

from pagoda.ipc.clock import VirtualClock
from pagoda.kv.block_pool import BlockPool
from pagoda.kv.tiered_connector import TieredKVConnector
from pagoda.kv.transfers import TransferLedger
from pagoda.messages.transfers import Transfer
from pagoda.parallel.segments import BlockRanks, SegmentShares

NUM_BLOCKS = 64


class Swapped:
    """A request of sixteen blocks on a device of 64, and a tier that stores what it is offered."""

    def __init__(self, num_ranks: int = 1) -> None:
        """Segments of four blocks go round the ranks."""
        self.prefix = PREFIX
        if num_ranks > 1:
            ranks = BlockRanks(0, SegmentShares(num_ranks, 4 * BLOCK_SIZE), BLOCK_SIZE)
            self.prefix = msgspec.structs.replace(PREFIX, ranks=ranks)
        self.clock = VirtualClock()
        self.pool = BlockPool(NUM_BLOCKS, num_ranks=num_ranks)
        ledger = TransferLedger(self.pool)
        self.tier = ScriptedTier("disk", ledger)
        self.stack = TieredKVConnector([self.tier], self.pool, ledger, self.clock)
        self.stack.workers_ready(READY)

    def preempt(self, recomputing_s: float = 1e9) -> None:
        """All blocks are in use but those of the request, which loses them."""
        blocks = cached_blocks_of(self.pool, self.prefix, 0, 16)
        self.pool.share([it.block for it in blocks])
        left = enumerate(self.pool.available)
        others = [it for rank, count in left for it in self.pool.allocate(count, rank)]
        needed = [it._replace(is_needed=True) for it in blocks]
        self.stack.swap.preempted(PREFIX.request_id, needed, recomputing_s)
        self.pool.release([it.block for it in blocks])
        self.others = others

    def offered(self, num_wanted: int = 0) -> tuple[list[int], list[Transfer]]:
        """Blocks that the tier was offered with the next transfers, and these."""
        self.tier.offered.clear()
        transfers = self.stack.drain_transfers([num_wanted] * self.pool.num_ranks)
        return [PREFIX.keys.index(key) for key in self.tier.offered], transfers

    def end(self, transfers: list[Transfer], seconds: float) -> None:
        self.clock.advance_to(self.clock.now() + seconds)
        for transfer in transfers:
            self.stack.transfer_ended(end_of(transfer))


def test_the_beginning_is_held_first_and_its_end_is_copied_first() -> None:
    it = Swapped()
    it.preempt()
    indices, transfers = it.offered(num_wanted=4)
    assert indices == [*range(8, 12), *range(8)]
    assert it.pool.num_available == 4, "running requests have what they want soon"
    it.end(transfers, 1.0)
    indices, _ = it.offered(num_wanted=4)
    assert indices == [12, 13, 14, 15]


def test_copied_blocks_are_evicted_before_the_others() -> None:
    it = Swapped()
    it.preempt()
    _, transfers = it.offered(num_wanted=8)
    it.end(transfers, 1.0)
    it.pool.allocate(8)
    kept = [index for index in range(16) if it.pool.find(PREFIX.keys[index]) is not None]
    assert kept == list(range(8, 16))


def test_nothing_is_copied_while_others_go_first_or_once_the_request_is_back() -> None:
    it = Swapped()
    it.preempt()
    it.pool.release(it.others)
    assert it.offered() == ([], [])
    it.others = it.pool.allocate(48)
    assert it.offered()[0] != []
    it = Swapped()
    it.preempt()
    it.stack.on_dequeued(PREFIX.request_id)
    assert it.offered() == ([], [])


def test_what_takes_longer_than_computing_is_not_copied_until_it_is_worth_another_try() -> None:
    it = Swapped()
    it.preempt()
    it.end(it.offered()[1], 16.0)
    it.stack.on_dequeued(PREFIX.request_id)
    num_tries = 0
    for _ in range(10):
        it.pool.release(it.others)
        it.preempt(recomputing_s=8.0)
        num_tries += it.offered()[0] != []
        it.stack.on_dequeued(PREFIX.request_id)
    assert num_tries
    assert num_tries < 5


def test_a_lost_worker_takes_all_of_it() -> None:
    it = Swapped()
    it.preempt()
    it.stack.workers_lost()
    it.stack.workers_ready(READY)
    assert it.offered() == ([], [])
    assert it.stack.swap.find(PREFIX.keys[0]) is None


def test_of_several_ranks_no_more_is_held_at_once_than_tiers_take() -> None:
    it = Swapped(num_ranks=2)
    it.preempt()
    indices, transfers = it.offered()
    assert sorted(indices) == list(range(8)), "a quarter of a rank's blocks, from the beginning on"
    it.end(transfers, 1.0)
    assert sorted(it.offered()[0]) == list(range(8, 16))
