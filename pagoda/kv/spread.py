# SPDX-License-Identifier: Apache-2.0
"""Blocks of one request on several context-parallel ranks, each of which has some of its segments."""

from __future__ import annotations

from collections.abc import Sequence
from operator import gt, sub

from pagoda.kv.block_pool import Block, BlockPool
from pagoda.kv.block_table import GroupBlocks, GroupTable, PrefixHit
from pagoda.parallel.segments import BlockRanks, SegmentShares


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
        new = self._pool.allocate_on(ranks)
        held.blocks.extend(new)
        return [GroupBlocks(0, [block.block_id for block in new])]

    def ranks(
        self, hit: PrefixHit, num_blocks: int, wanted: int | None, *, kept: Sequence[int]
    ) -> BlockRanks:
        """The ranks of a sequence that starts with a cached prefix: without one, it begins on the `wanted` rank if
        there is room for it then besides what is `kept`, or on the one with the most room."""
        (held,) = hit.groups
        if held or wanted is None or not self.has_room(hit, num_blocks, wanted, kept=kept):
            wanted = self._first_rank(held, self._pool.available)
        return BlockRanks(wanted, self._shares, self._block_size)

    def next_rank(self, held: GroupTable) -> int:
        """The rank of the next block that a table gains."""
        return self._rank(self._first_rank(held.blocks, self._pool.available), held.end)

    def by_rank(self, held: GroupTable, count: int) -> list[tuple[int, int]]:
        """Ranks of the next blocks that a table gains, and how many of them each has."""
        first = self._first_rank(held.blocks, self._pool.available)
        return list(enumerate(self._counts(first, held.end, held.end + count)))

    def has_room(
        self,
        hit: PrefixHit,
        num_blocks: int,
        first: int | None = None,
        *,
        kept: Sequence[int],
    ) -> bool:
        """True if each rank has blocks for a sequence of `num_blocks` that starts with a cached prefix, besides
        those that are `kept` there; without a prefix, on the `first` rank if that is given."""
        (held,) = hit.groups
        if first is None:
            first = self._first_rank(held, self._pool.available)
        available = list(map(sub, self._pool.available, kept))
        for block in held:
            available[block.rank] -= block.ref_count == 0
        return not any(map(gt, self._counts(first, len(held), num_blocks), available))

    def _counts(self, first: int, start: int, end: int) -> list[int]:
        """Blocks from `start` to `end` of a context, by rank."""
        counts = [0] * self._shares.size
        step = self._shares.segment_tokens // self._block_size
        while start < end:
            behind = min(end, start - start % step + step)
            counts[self._rank(first, start)] += behind - start
            start = behind
        return counts

    def _first_rank(self, held: Sequence[Block], available: list[int]) -> int:
        return held[0].rank if held else available.index(max(available))

    def _rank(self, first: int, index: int) -> int:
        return self._shares.rank_of(first, index * self._block_size)
