# SPDX-License-Identifier: Apache-2.0
"""Transfers of the ledger in `pagoda.kv.transfers`, and the blocks that they hold."""

from __future__ import annotations

import pytest
from kv_tiers import end_of

from pagoda.kv.block_pool import Block, BlockPool
from pagoda.kv.transfers import TransferLedger
from pagoda.messages.transfers import DeviceBlocks, HostSlots, Transfer, TransferEnd


class Book:
    """A ledger over a pool, and the ends that it has told."""

    def __init__(self, num_blocks: int = 4) -> None:
        self.pool = BlockPool(num_blocks)
        self.ledger = TransferLedger(self.pool)
        self.ends: list[tuple[TransferEnd | None, int]] = []
        """Ends, and the references of the first block at that time."""

    def open(self, blocks: list[Block], *, is_store: bool = False, step: int = -1) -> Transfer:
        numbers = [block.block_id for block in blocks]
        places = [HostSlots(numbers), DeviceBlocks(numbers)]
        if is_store:
            places.reverse()
        count = self.ledger.num_open

        def on_end(end: TransferEnd | None) -> None:
            self.ends.append((end, blocks[0].ref_count))

        self.ledger.open(on_end, *places, blocks, after_step=step)
        assert self.ledger.num_open == count + 1
        return self.ledger.drain()[-1]


def test_blocks_stay_referenced_until_the_transfer_ends_whatever_the_request_does() -> None:
    it = Book()
    blocks = it.pool.allocate(2)
    transfer = it.open(blocks, step=7)
    assert (transfer.after_step, transfer.target) == (7, DeviceBlocks([0, 1]))
    it.pool.release(blocks)
    assert it.pool.num_available == 2
    end = end_of(transfer, failed=[1])
    assert it.ledger.close(end)
    assert not it.ledger.close(end)
    assert not it.ledger.close(TransferEnd(99, 0))
    assert it.ends == [(end, 1)]
    assert it.pool.num_available == 4
    assert it.ledger.num_open == 0


def test_what_lost_workers_were_doing_goes_on_no_more() -> None:
    it = Book()
    blocks = it.pool.allocate(2)
    first = it.open(blocks)
    it.ledger.open(it.ends.append, HostSlots([3]), DeviceBlocks([0]), blocks[:1])
    it.ledger.drop_all()
    assert it.ends == [(None, 3), None]
    assert it.ledger.drain() == []
    assert not it.ledger.close(end_of(first))
    assert [block.ref_count for block in blocks] == [1, 1]
    again = it.open(blocks)
    assert (again.generation, again.transfer_id) == (1, 2)
    assert not it.ledger.close(TransferEnd(again.transfer_id, generation=0))
    assert it.ledger.close(end_of(again))


def test_stores_hold_an_eighth_of_the_pool_at_most() -> None:
    it = Book(32)
    blocks = it.pool.allocate(8)
    it.open(blocks)
    assert it.ledger.store_room == 4
    stored = it.open(blocks[:3], is_store=True)
    assert it.ledger.store_room == 1
    it.ledger.close(end_of(stored))
    assert it.ledger.store_room == 4
    it.open(blocks[:4], is_store=True)
    it.ledger.drop_all()
    assert it.ledger.store_room == 4
    assert Book(3).ledger.store_room == 1, "the smallest pool has room for one"


def test_a_load_of_several_transfers_ends_as_one() -> None:
    it = Book()
    blocks = it.pool.allocate(2)
    held = it.ledger.hold(blocks)
    first = it.open(blocks[:1])
    it.pool.release(blocks)
    assert it.pool.num_available == 2
    it.ledger.settle(held, [0, 1], "nothing came")
    it.ledger.settle(held, [])
    assert it.ledger.drain_settled() == [TransferEnd(held, 0, [0, 1], "nothing came")]
    assert it.ledger.drain_settled() == []
    assert it.pool.num_available == 3, "one is still being written"
    assert it.ledger.close(end_of(first))
    assert (it.pool.num_available, it.ledger.num_open) == (4, 0)


@pytest.mark.parametrize("is_settled", [True, False])
def test_what_is_held_is_lost_with_the_workers(is_settled: bool) -> None:
    it = Book()
    blocks = it.pool.allocate(3)
    held = it.ledger.hold(blocks)
    it.pool.release(blocks)
    if is_settled:
        it.ledger.settle(held, [])
    it.ledger.drop_all()
    it.ledger.settle(held, [])
    assert it.ledger.drain_settled() == []
    assert it.pool.num_available == 4
