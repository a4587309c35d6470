# SPDX-License-Identifier: Apache-2.0
"""Blocks of one request on several context-parallel ranks, each of which has some of its segments."""

from __future__ import annotations

from collections.abc import Sequence
from operator import gt

from pagoda.kv.block_pool import Block, BlockPool
from pagoda.kv.block_table import GroupBlocks, GroupTable, PrefixHit
from pagoda.parallel.segments import SegmentShares


class SpreadBlocks:
    """Chooses the ranks of blocks of the one group that there is."""

    def __init__(self, pool: BlockPool, shares: SegmentShares, block_size: int) -> None:
        self._pool, self._shares, self._block_size = pool, shares, block_size

    def may_follow(self, leading: Sequence[Block], block: Block) -> bool:
        """True if a cached block lies on the rank that the one behind these, from index 0 on, belongs to."""
        return block.rank == self._rank(leading[0].rank, len(leading))

    def grow(self, held: GroupTable, count: int) -> list[GroupBlocks] | None:
        """Extends a table by blocks of the ranks that they belong to; None if one of these has too few."""
        if not count:
            return []
        available = self._pool.available
        first = self._first_rank(held.blocks, available)
        ranks = [self._rank(first, index) for index in range(held.end, held.end + count)]
        wanted = [ranks.count(rank) for rank in range(self._shares.size)]
        if any(map(gt, wanted, available)):
            return None
        taken = [iter(self._pool.allocate(number, rank)) for rank, number in enumerate(wanted)]
        new = [next(taken[rank]) for rank in ranks]
        held.blocks.extend(new)
        return [GroupBlocks(0, [block.block_id for block in new])]

    def has_room(self, hit: PrefixHit, num_blocks: int) -> bool:
        """True if each rank has blocks for a sequence of `num_blocks` that starts with a cached prefix."""
        available = list(self._pool.available)
        (held,) = hit.groups
        for block in held:
            available[block.rank] -= block.ref_count == 0
        first = self._first_rank(held, available)
        for index in range(len(held), num_blocks):
            available[self._rank(first, index)] -= 1
        return min(available) >= 0

    def _first_rank(self, held: Sequence[Block], available: list[int]) -> int:
        return held[0].rank if held else available.index(max(available))

    def _rank(self, first: int, index: int) -> int:
        return self._shares.rank_of(first, index * self._block_size)
