# SPDX-License-Identifier: Apache-2.0
"""Refusals of the block pool, and the order in which it gives blocks; `test_manager` has all else."""

from __future__ import annotations

import pytest

from pagoda.kv.block_pool import BlockPool


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
