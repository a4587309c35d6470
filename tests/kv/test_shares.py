# SPDX-License-Identifier: Apache-2.0
"""Blocks of requests whose segments go round several ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagoda.kv.manager import BlockTable, KVManager
from pagoda.parallel.segments import BlockNumbers, SegmentShares

BLOCK, SEGMENT, LONGEST = 4, 16, 200
COMMON = list(range(LONGEST))


def _tokens(shared: int, own: int, length: int) -> list[int]:
    return (COMMON[:shared] + [1000 + own] * LONGEST)[:length]


def _check_ranks(kv: KVManager, table: BlockTable) -> None:
    blocks = table.blocks
    per_segment = SEGMENT // BLOCK
    for index, block in enumerate(blocks):
        turn = (blocks[0].rank + index // per_segment) % kv.shares.size
        assert block.rank == turn == block.block_id * kv.shares.size // kv.pool.num_blocks


@given(
    st.integers(2, 4),
    st.lists(
        st.tuples(
            st.integers(0, LONGEST),
            st.integers(0, 3),
            st.integers(1, LONGEST),
            st.booleans(),
            st.integers(0, 3),
        ),
        max_size=40,
    ),
)
def test_segments_go_round_the_ranks(
    size: int, steps: list[tuple[int, int, int, bool, int]]
) -> None:
    """Whatever prefixes are found and whoever holds what; alone, a request of the greatest length always fits."""
    shares = SegmentShares(size, SEGMENT)
    per_rank = -(-shares.most_tokens(LONGEST) // BLOCK)
    kv = KVManager(per_rank * size, BLOCK, shares=shares)
    assert kv.fit(LONGEST)
    assert kv.spread is not None
    assert not KVManager((per_rank - 1) * size, BLOCK, shares=shares).fit(LONGEST)
    held: list[BlockTable] = []
    for shared, own, length, stays, freed in steps:
        tokens, table = _tokens(shared, own, length), kv.new_table()
        hit = kv.find_prefix(table, tokens)
        had_room = kv.spread.has_room(hit, -(-length // BLOCK), kept=[0] * size)
        kv.adopt(table, hit)
        gained = kv.grow(table, length)
        assert (gained is not None) == had_room
        assert gained is not None or held
        if gained is not None:
            assert sum(len(each.block_ids) for each in gained) == len(table.blocks) - len(
                hit.groups[0]
            )
            kv.publish(table, tokens, length)
        _check_ranks(kv, table)
        if gained is not None and stays:
            held.append(table)
        else:
            kv.free(table)
        if held and freed == 0:
            kv.free(held.pop(0))
        kv.pool.check()
    for table in held:
        kv.free(table)
    assert kv.pool.available == [per_rank] * size


def test_short_requests_fill_all_ranks_alike() -> None:
    kv = KVManager(40, BLOCK, shares=SegmentShares(2, SEGMENT))
    tables = [kv.new_table() for _ in range(10)]
    for own, table in enumerate(tables):
        assert kv.grow(table, len(_tokens(0, own, SEGMENT))) is not None
    assert kv.pool.available == [0, 0]


def test_a_prefix_ends_where_its_segments_leave_the_round() -> None:
    """Two requests computed the same prefix side by side, from different ranks; one published more of it."""
    kv = KVManager(80, BLOCK, shares=SegmentShares(2, SEGMENT))
    first, second, third = (kv.new_table() for _ in range(3))
    tokens = _tokens(LONGEST, 0, 4 * SEGMENT)
    kv.grow(first, SEGMENT)
    kv.grow(second, 3 * SEGMENT)
    assert first.blocks[0].rank != second.blocks[0].rank
    kv.publish(first, tokens, SEGMENT)
    kv.publish(second, tokens, 3 * SEGMENT)
    assert kv.find_prefix(third, tokens).num_blocks == SEGMENT // BLOCK


def test_each_rank_sees_its_own_blocks_and_whose_others_are() -> None:
    assert BlockNumbers(1, 10, 3).seen([0, 10, 19, 29]) == [-1, 0, 9, -3]
    assert BlockNumbers().seen([5, 6]) == [5, 6]
