# SPDX-License-Identifier: Apache-2.0
"""Ranks of the segments of a context (context parallelism).

A request's segments go round the ranks: segment i + 1 lies on the rank behind that of segment i. The first lies
where a cached prefix does, or else where the most blocks are free, so that short requests fill all ranks alike.
Blocks are numbered over all ranks: those of one rank follow each other.
"""

from __future__ import annotations

import msgspec

from pagoda.messages.segments import SEGMENT


class SegmentShares(msgspec.Struct, frozen=True):
    """Sizes that say which rank holds what."""

    size: int = 1
    """Ranks."""
    segment_tokens: int = SEGMENT

    def most_tokens(self, num_tokens: int) -> int:
        """The most of a context's tokens that lie on one rank: that of its first segment."""
        rounds, rest = divmod(num_tokens, self.size * self.segment_tokens)
        return rounds * self.segment_tokens + min(rest, self.segment_tokens)

    def rank_of(self, first_rank: int, token: int) -> int:
        """The rank of a token, by that of the first one."""
        return (first_rank + token // self.segment_tokens) % self.size


class BlockRanks(msgspec.Struct, frozen=True):
    """The ranks on which blocks of one context lie."""

    first: int = 0
    """Rank of the first block, and of all where contexts are not shared."""
    shares: SegmentShares = SegmentShares()
    block_size: int = 1

    def of(self, index: int) -> int:
        """The rank of a block."""
        if self.shares.size == 1:
            return self.first
        return self.shares.rank_of(self.first, index * self.block_size)


class BlockNumbers(msgspec.Struct, frozen=True):
    """Numbers of blocks over all ranks, as one rank sees them."""

    rank: int = 0
    of_rank: int = 0
    """Blocks of each rank."""
    size: int = 1
    """Ranks."""

    def seen(self, block_ids: list[int]) -> list[int]:
        """This rank's blocks by their numbers there; for those of rank *r*, -1 - *r*."""
        if self.size == 1:
            return block_ids
        places = (divmod(block_id, self.of_rank) for block_id in block_ids)
        return [place if rank == self.rank else -1 - rank for rank, place in places]


ALL_ON_ONE = SegmentShares()
ALL_HERE = BlockNumbers()
ALL_ON_FIRST = BlockRanks()
