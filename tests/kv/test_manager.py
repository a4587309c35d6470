# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagoda.kv.block_keys import block_key, prefix_keys, root_key
from pagoda.kv.block_pool import Block
from pagoda.kv.block_table import BlockTable
from pagoda.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheRecorder
from pagoda.kv.manager import KVManager

SALTS = (None, "tenant-a")


def filled(kv: KVManager, token_ids: list[int], salt: str | None = None) -> BlockTable:
    table = kv.new_table(salt)
    assert kv.grow(table, len(token_ids)) is not None
    kv.publish(table, token_ids, len(token_ids))
    return table


def found(kv: KVManager, token_ids: list[int], salt: str | None = None) -> list[Block]:
    return list(kv.find_prefix(kv.new_table(salt), token_ids).blocks())


def test_salts_separate_tenants() -> None:
    kv = KVManager(16, 4)
    table = filled(kv, list(range(9)), "tenant-a")
    assert found(kv, list(range(9)), "tenant-b") == []
    assert found(kv, list(range(9))) == []
    assert found(kv, list(range(9)), "tenant-a") == table.blocks[:2]


def test_without_prefix_caching_nothing_is_found() -> None:
    kv = KVManager(16, 4, prefix_caching=False)
    filled(kv, list(range(9)))
    assert found(kv, list(range(9))) == []


def test_growing_fails_whole_when_blocks_run_out() -> None:
    kv = KVManager(3, 4)
    table = kv.new_table()
    assert kv.grow(table, 5) is not None
    assert kv.grow(table, 17) is None
    assert len(table.blocks) == 2
    assert kv.grow(table, 8) == []


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=24), st.lists(st.integers(0, 3), max_size=24)
)
def test_hits_are_exactly_the_common_whole_blocks(first: list[int], second: list[int]) -> None:
    kv = KVManager(16, 4)
    table = filled(kv, first)
    common = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        common += 1
    expected = min(common // 4, max(0, len(second) - 1) // 4)
    assert found(kv, second) == table.blocks[:expected]


def test_keys_are_those_of_blocks_that_may_be_found() -> None:
    kv = KVManager(16, 4)
    for num_tokens in (0, 1, 4, 5, 8, 9):
        tokens = list(range(num_tokens))
        keys = kv.prefix_keys(kv.new_table("salt"), tokens)
        assert keys == prefix_keys(tokens, 4, "salt", 99)
    uncached = KVManager(16, 4, prefix_caching=False)
    assert uncached.prefix_keys(uncached.new_table(), list(range(20))) == []


def test_the_next_key_is_known_once_all_tokens_of_its_block_are() -> None:
    kv = KVManager(16, 4)
    tokens = list(range(9))
    table = kv.new_table()
    keys = prefix_keys(tokens, 4, None, 99)
    for index, end in ((0, 4), (1, 8)):
        assert kv.next_key(table, tokens[: end - 1], index) is None
        assert kv.next_key(table, tokens[:end], index) == keys[index]
        assert kv.next_key(table, tokens, index) == keys[index]
    uncached = KVManager(16, 4, prefix_caching=False)
    assert uncached.next_key(uncached.new_table(), tokens, 0) is None


def test_offers_are_blocks_as_others_find_them() -> None:
    kv = KVManager(16, 4)
    first = filled(kv, list(range(10)))
    copy = filled(kv, list(range(14)))
    cached_blocks = kv.cached_blocks(copy, list(range(14)), 1, 3)
    assert [cached.block for cached in cached_blocks] == [first.blocks[1], copy.blocks[2]]
    assert [cached.key for cached in cached_blocks] == copy.keys[2:4]
    assert [cached.parent for cached in cached_blocks] == copy.keys[1:3]
    assert [cached.token_ids for cached in cached_blocks] == [[4, 5, 6, 7], [8, 9, 10, 11]]
    (root,) = kv.cached_blocks(copy, list(range(14)), 0, 1)
    assert root.parent is None


def test_freed_blocks_remember_which_step_may_still_use_them() -> None:
    """All of them: a step reads also what was computed before it."""
    kv = KVManager(16, 4)
    table = kv.new_table()
    kv.grow(table, 14)
    blocks = list(table.blocks)
    kv.free(table, last_step=5)
    assert [block.used_by for block in blocks] == [5, 5, 5, 5]
    kv.grow(table, 5)
    kv.free(table, last_step=9)
    assert sorted(block.used_by for block in blocks) == [5, 5, 9, 9]
    kv.grow(table, 16)
    kv.free(table, last_step=7)
    assert sorted(block.used_by for block in blocks) == [7, 7, 9, 9]
    kv.grow(table, 16)
    kv.free(table)
    assert sorted(block.used_by for block in blocks) == [7, 7, 9, 9]


def test_a_load_for_which_too_few_blocks_are_left_takes_none() -> None:
    """Cached blocks that the load keeps are not among those that it may fill."""
    kv, tokens = KVManager(4, 4), list(range(20))
    kv.free(filled(kv, tokens[:8]))
    other = kv.pool.allocate(1)
    table = kv.new_table()
    with pytest.raises(ValueError, match="2 blocks wanted, 1 available"):
        kv.begin_load(table, tokens, 4, [(0, 2), (0, 3)])
    assert table.blocks == []
    kv.pool.check()
    assert kv.pool.references() == {other[0].block_id: 1}
    new = kv.begin_load(table, tokens, 3, [(0, 2)])
    assert table.blocks == [*found(kv, tokens), *new]


def test_keys_stay_what_they_are() -> None:
    """Keys are in names of objects on disk, and on the wire."""
    table = filled(KVManager(4, 4), [1, 2, 3, 4, 5, 6, 7, 70000], "s")
    assert table.keys[2].hex() == "50380e5b5de13ca0b04882bd33c7a2ea652fc8c9920abcbda428faae31d4edfb"


class CacheMachine(RuleBasedStateMachine):
    """Requests come, grow, publish, go and are lost with their device; events are drained now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.events = CacheRecorder()
        self.kv = KVManager(10, 4, recorder=self.events)
        self.live: list[tuple[BlockTable, list[int], list[int]]] = []
        """(table, tokens, [computed])"""
        self.contents: dict[int, list[int]] = {}
        """Content of each block on the device: the whole prefix up to its last written cell."""
        self.prefixes: dict[bytes, list[int]] = {}
        """The whole prefix that each key was said to stand for, of all that were ever stored."""
        self.cached: set[bytes] = set()

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=24), salt=st.sampled_from(SALTS))
    def start(self, tokens: list[int], salt: str | None) -> None:
        table = self.kv.new_table(salt)
        hit = self.kv.find_prefix(table, tokens)
        for index, block in enumerate(hit.blocks()):
            assert self.contents[block.block_id] == tokens[: (index + 1) * 4]
        self.kv.adopt(table, hit)
        self.live.append((table, tokens, [hit.num_blocks * 4]))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 9))
    def compute(self, data: st.DataObject, count: int) -> None:
        table, tokens, computed = data.draw(st.sampled_from(self.live))
        end = min(len(tokens), computed[0] + count)
        if self.kv.grow(table, end) is None:
            return
        for position in range(computed[0], end):
            block = table.blocks[position // 4]
            assert block.ref_count == 1
            assert block.key is None
            self.contents[block.block_id] = tokens[: position + 1]
        computed[0] = end
        self.kv.publish(table, tokens, end)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        table, _, _ = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.kv.free(table)
        assert table.blocks == []

    @rule()
    def lose_the_device(self) -> None:
        for table, _, _ in self.live:
            self.kv.free(table)
        self.live.clear()
        self.kv.pool.clear_cache()

    @rule()
    def drain_events(self) -> None:
        for event in self.events.drain():
            match event:
                case BlockStored():
                    self.store(event)
                case BlockRemoved():
                    assert self.cached.issuperset(event.block_hashes)
                    self.cached.difference_update(event.block_hashes)
                case AllBlocksCleared():
                    self.cached.clear()
        assert self.cached == self.kv.pool.keys()

    def store(self, event: BlockStored) -> None:
        parent = event.parent_block_hash
        prefix = [] if parent is None else self.prefixes[parent]
        assert len(event.token_ids) == 4 * len(event.block_hashes)
        for index, key in enumerate(event.block_hashes):
            tokens = event.token_ids[index * 4 : (index + 1) * 4]
            parents = [root_key(4, salt) for salt in SALTS] if parent is None else [parent]
            assert key in [block_key(parent, tokens) for parent in parents]
            assert key not in self.cached
            self.cached.add(key)
            prefix = self.prefixes[key] = prefix + tokens
            parent = key

    @invariant()
    def books_balance(self) -> None:
        self.kv.pool.check()
        held = Counter(block.block_id for table, _, _ in self.live for block in table.blocks)
        assert self.kv.pool.references() == held
        assert len(held) + self.kv.pool.num_available == 10

    def teardown(self) -> None:
        self.drain_events()


TestCacheMachine = CacheMachine.TestCase
