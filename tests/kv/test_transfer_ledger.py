"""Transfers of the ledger in `pagoda.kv.transfers`, and the blocks that they hold."""

from __future__ import annotations

from pagoda.kv.block_pool import Block, BlockPool
from pagoda.kv.transfers import TransferLedger
from pagoda.messages.transfers import DeviceBlocks, HostSlots, Transfer, TransferEnd


class Owner:
    def __init__(self) -> None:
        self.ends: list[tuple[TransferEnd | None, int]] = []
        """Ends, and the references of the first block at that time."""
        self.blocks: list[Block] = []

    def on_end(self, end: TransferEnd | None) -> None:
        self.ends.append((end, self.blocks[0].ref_count if self.blocks else 0))


def load(
    ledger: TransferLedger, owner: Owner, blocks: list[Block], after_step: int = -1
) -> Transfer:
    numbers = [block.block_id for block in blocks]
    places = HostSlots(numbers), DeviceBlocks(numbers)
    ledger.open(owner.on_end, *places, blocks, after_step=after_step)
    return ledger.drain()[-1]


def store(ledger: TransferLedger, owner: Owner, blocks: list[Block]) -> Transfer:
    numbers = [block.block_id for block in blocks]
    ledger.open(owner.on_end, DeviceBlocks(numbers), HostSlots(numbers), blocks)
    return ledger.drain()[-1]


def end_of(transfer: Transfer, failed: list[int] | None = None) -> TransferEnd:
    return TransferEnd(transfer.transfer_id, transfer.generation, failed or [])


def test_blocks_stay_referenced_until_the_transfer_ends_whatever_the_request_does() -> None:
    pool, owner = BlockPool(4), Owner()
    ledger = TransferLedger(pool)
    blocks = owner.blocks = pool.allocate(2)
    transfer = load(ledger, owner, blocks, after_step=7)
    assert (transfer.after_step, transfer.target) == (7, DeviceBlocks([0, 1]))
    pool.release(blocks)
    assert pool.num_available == 2
    end = end_of(transfer, failed=[1])
    assert ledger.close(end)
    assert owner.ends == [(end, 1)]
    assert pool.num_available == 4
    assert ledger.num_open == 0


def test_an_end_counts_once() -> None:
    pool, owner = BlockPool(4), Owner()
    ledger = TransferLedger(pool)
    blocks = pool.allocate(1)
    transfer = load(ledger, owner, blocks)
    assert ledger.close(end_of(transfer))
    assert not ledger.close(end_of(transfer))
    assert not ledger.close(TransferEnd(99, 0))
    assert len(owner.ends) == 1
    assert blocks[0].ref_count == 1


def test_what_lost_workers_were_doing_goes_on_no_more() -> None:
    pool, owner = BlockPool(4), Owner()
    ledger = TransferLedger(pool)
    blocks = pool.allocate(2)
    first = load(ledger, owner, blocks)
    ledger.open(owner.on_end, HostSlots([3]), DeviceBlocks([0]), blocks[:1])
    ledger.drop_all()
    assert owner.ends == [(None, 0), (None, 0)]
    assert ledger.drain() == []
    assert not ledger.close(end_of(first))
    assert [block.ref_count for block in blocks] == [1, 1]
    again = load(ledger, owner, blocks)
    assert (again.generation, again.transfer_id) == (1, 2)
    assert not ledger.close(TransferEnd(again.transfer_id, generation=0))
    assert ledger.close(end_of(again))


def test_stores_hold_an_eighth_of_the_pool_at_most() -> None:
    pool, owner = BlockPool(32), Owner()
    ledger = TransferLedger(pool)
    blocks = pool.allocate(8)
    assert ledger.store_room == 4
    load(ledger, owner, blocks)
    assert ledger.store_room == 4
    stored = store(ledger, owner, blocks[:3])
    assert ledger.store_room == 1
    ledger.close(end_of(stored))
    assert ledger.store_room == 4
    store(ledger, owner, blocks[:4])
    ledger.drop_all()
    assert ledger.store_room == 4


def test_the_smallest_pool_has_room_for_one_store() -> None:
    assert TransferLedger(BlockPool(3)).store_room == 1


def test_a_load_of_several_transfers_ends_as_one() -> None:
    pool, owner = BlockPool(4), Owner()
    ledger = TransferLedger(pool)
    blocks = pool.allocate(2)
    held = ledger.hold(blocks)
    first = load(ledger, owner, blocks[:1])
    assert held != first.transfer_id
    pool.release(blocks)
    assert (pool.num_available, ledger.num_open) == (2, 2)
    ledger.settle(held, [0, 1], "nothing came")
    ledger.settle(held, [])
    assert ledger.drain_settled() == [TransferEnd(held, 0, [0, 1], "nothing came")]
    assert ledger.drain_settled() == []
    assert pool.num_available == 3, "one is still being written"
    assert ledger.close(end_of(first))
    assert pool.num_available == 4
    assert ledger.num_open == 0


def test_what_is_held_is_lost_with_the_workers() -> None:
    pool = BlockPool(4)
    ledger = TransferLedger(pool)
    blocks = pool.allocate(3)
    held, settled = ledger.hold(blocks[:2]), ledger.hold(blocks[2:])
    ledger.settle(settled, [])
    pool.release(blocks)
    ledger.drop_all()
    assert ledger.drain_settled() == []
    assert pool.num_available == 4
    ledger.settle(held, [])
    assert ledger.drain_settled() == []
