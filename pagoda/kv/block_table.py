# SPDX-License-Identifier: Apache-2.0
"""Block tables: the blocks of requests, by KV group, and the prefixes with which they begin."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from pagoda.kv.block_pool import Block
from pagoda.kv.cold_segments import Segment, num_blocks
from pagoda.messages.spans import EmbeddedSpan


class GroupTable:
    """Blocks of one request in one group."""

    __slots__ = ("blocks", "first", "num_adopted", "num_shared")

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        """Blocks from index `first` on."""
        self.first = 0
        """Index of the first block that is held; what is before it is behind the window."""
        self.num_adopted = 0
        """Index behind the last block that was cached before the request came."""
        self.num_shared = 0
        """Number of these that others referenced then: given back, they are not free."""

    @property
    def end(self) -> int:
        """Index behind the last block."""
        return self.first + len(self.blocks)


class BlockTable:
    """Blocks of one request in all groups."""

    __slots__ = (
        "cold",
        "cooling",
        "groups",
        "holds_until",
        "keys",
        "num_published",
        "num_reusable_tokens",
        "rank",
        "spans",
    )

    def __init__(
        self, root_key: bytes, num_groups: int = 1, spans: Sequence[EmbeddedSpan] = ()
    ) -> None:
        self.spans = spans
        """Embedded spans of the prompt."""
        self.rank = 0
        """The rank that attends to the request, where each has its own; chosen while the table is empty."""
        self.groups = [GroupTable() for _ in range(num_groups)]
        self.keys: list[bytes] = [root_key]
        """`keys[i + 1]` is the key of block i; computed once, also across preemptions."""
        self.num_published = 0
        """Leading blocks that have been offered to the prefix index."""
        self.num_reusable_tokens = sys.maxsize
        """Leading tokens whose K and V may come from a cache; others are computed for their hidden states."""
        self.holds_until = 0
        """Computed tokens up to which no block lies behind what later tokens need."""
        self.cold: list[Segment] = []
        """Leading segments that lie in a storey below the device (`pagoda.kv.cold_segments`)."""
        self.cooling: Segment | None = None
        """The next one, while it is copied there."""

    @property
    def blocks(self) -> list[Block]:
        """All blocks that are held, group after group."""
        if len(self.groups) == 1:
            return self.groups[0].blocks
        return list(chain.from_iterable(group.blocks for group in self.groups))

    @property
    def num_cold_blocks(self) -> int:
        """Blocks in cold segments, all of which are equally large."""
        return len(self.cold) * num_blocks(self.cold[0]) if self.cold else 0

    def block_ids(self) -> list[list[int]]:
        """Ids by group and index; a block that is not held has any valid id."""
        return [
            [0] * group.first + [block.block_id for block in group.blocks] for group in self.groups
        ]


class PrefixHit(NamedTuple):
    """A cached prefix: the blocks that a request needs to go on behind it."""

    num_blocks: int
    """Blocks of the prefix, of the manager's `block_size`."""
    firsts: Sequence[int]
    """Index of the first block, by group."""
    groups: Sequence[Sequence[Block]]
    """Blocks without a gap up to the end of the prefix, by group."""
    num_cold: int = 0
    """Segments of the prefix that lie in a storey below the device, and stay there."""

    def blocks(self) -> Iterator[Block]:
        """All blocks, group after group."""
        return chain.from_iterable(self.groups)

    def num_shared(self) -> list[int]:
        """Blocks that somebody references, by group."""
        return [sum(block.ref_count > 0 for block in blocks) for blocks in self.groups]


class GroupBlocks(NamedTuple):
    """Ids of blocks that a table has gained in a group."""

    group: int
    block_ids: list[int]
