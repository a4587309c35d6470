"""The block pool against a model of it: plain lists and dictionaries."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagoda.kv.block_pool import Block, BlockPool


def test_taking_more_than_there_is_raises_and_takes_nothing() -> None:
    pool = BlockPool(4)
    pool.allocate(3)
    with pytest.raises(ValueError, match="2 blocks wanted, 1 available"):
        pool.allocate(2)
    assert pool.num_available == 1


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(0)


def test_releasing_twice_raises() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(ValueError, match="more often"):
        pool.release(blocks)


def test_chains_are_evicted_from_their_ends() -> None:
    pool = BlockPool(3)
    chain = pool.allocate(3)
    for index, block in enumerate(chain):
        pool.publish(block, bytes([index]))
    pool.release(chain)
    assert pool.allocate(1) == [chain[2]]
    assert pool.allocate(1) == [chain[1]]
    assert pool.find(b"\x00") is chain[0]
    assert pool.find(b"\x01") is None


def test_worthless_blocks_are_reused_before_cached_ones() -> None:
    pool = BlockPool(2)
    cached, plain = pool.allocate(2)
    pool.publish(cached, b"key")
    pool.release([cached])
    pool.release([plain])
    assert pool.allocate(1) == [plain]


def test_evicting_a_copy_leaves_the_entry_of_the_original() -> None:
    pool = BlockPool(2)
    original, copy = pool.allocate(2)
    pool.publish(original, b"key")
    pool.publish(copy, b"key")
    pool.release([copy])
    pool.allocate(1)
    assert pool.find(b"key") is original


def test_a_discarded_block_is_found_no_longer_and_free_when_its_readers_are_gone() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.publish(block, b"key")
    pool.discard(b"key")
    pool.discard(b"key")
    assert pool.find(b"key") is None
    assert (pool.num_stored, pool.num_removed) == (1, 1)
    pool.check()
    pool.release([block])
    assert pool.num_available == 2


def test_steps_of_lost_workers_write_no_more() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    for block in blocks:
        block.used_by = 7
    pool.clear_cache()
    assert [block.used_by for block in blocks] == [-1, -1]


class PoolMachine(RuleBasedStateMachine):
    """Chains are taken, published, shared and released in any order; the books must balance."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.holders: list[list[Block]] = []
        self.next_key = 0

    @rule(count=st.integers(0, 5))
    def take(self, count: int) -> None:
        if count <= self.pool.num_available:
            self.holders.append(self.pool.allocate(count))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), fresh=st.booleans())
    def publish(self, data: st.DataObject, fresh: bool) -> None:
        chain = data.draw(st.sampled_from(self.holders))
        for block in chain:
            if block.key is None:
                self.next_key += fresh
                self.pool.publish(block, self.next_key.to_bytes(4))

    @rule(data=st.data())
    def share_cached(self, data: st.DataObject) -> None:
        found = [
            block
            for key in range(self.next_key + 1)
            if (block := self.pool.find(key.to_bytes(4))) is not None
        ]
        if found:
            chosen = data.draw(st.lists(st.sampled_from(found), max_size=4, unique_by=id))
            self.pool.share(chosen)
            self.holders.append(chosen)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        self.pool.release(self.holders.pop(index))

    @rule()
    def lose_the_device(self) -> None:
        self.pool.clear_cache()
        assert self.pool.num_cached == 0

    @invariant()
    def books_balance(self) -> None:
        self.pool.check()
        held: dict[int, int] = {}
        for chain in self.holders:
            for block in chain:
                held[block.block_id] = held.get(block.block_id, 0) + 1
                assert block.ref_count >= 1
        assert len(held) + self.pool.num_available == self.pool.num_blocks
        for chain in self.holders:
            for block in chain:
                assert block.ref_count == held[block.block_id]


TestPoolMachine = PoolMachine.TestCase
