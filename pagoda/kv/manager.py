"""Block tables: which blocks hold the K and V of which request, and which of them others may reuse.

Blocks are found by the keys of `pagoda.kv.block_keys`: equal keys mean equal prefixes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pagoda.kv.block_keys import block_key, root_key
from pagoda.kv.block_pool import Block, BlockPool
from pagoda.kv.connector import CachedBlock
from pagoda.kv.events import CacheRecorder


class BlockTable:
    __slots__ = ("blocks", "keys", "num_published", "num_reusable_tokens")

    def __init__(self, root_key: bytes) -> None:
        self.blocks: list[Block] = []
        self.keys: list[bytes] = [root_key]
        """`keys[i + 1]` is the key of block i; computed once, also across preemptions."""
        self.num_published = 0
        """Leading blocks that have been offered to the prefix index."""
        self.num_reusable_tokens = sys.maxsize
        """Leading tokens whose K and V may come from a cache; others are computed for their hidden states."""

    def block_ids(self) -> list[int]:
        return [block.block_id for block in self.blocks]


class KVManager:
    """Gives blocks to requests and takes them back; knows tokens, but no requests and no devices."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        recorder: CacheRecorder | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks, recorder)
        self.block_size = block_size
        self._prefix_caching = prefix_caching

    def new_table(self, cache_salt: str | None = None, adapter: str = "") -> BlockTable:
        return BlockTable(root_key(self.block_size, cache_salt, adapter))

    def find_prefix(self, table: BlockTable, token_ids: Sequence[int]) -> list[Block]:
        """The longest cached prefix of `token_ids`, as blocks; takes no references.

        It never covers the last token: that one is computed, so that the request can sample.
        """
        hits: list[Block] = []
        if not self._prefix_caching:
            return hits
        for index in range(self._num_reusable(table, token_ids)):
            block = self.pool.find(self._key(table, token_ids, index))
            if block is None:
                break
            hits.append(block)
        return hits

    def prefix_keys(
        self, table: BlockTable, token_ids: Sequence[int], *, whole: bool = False
    ) -> list[bytes]:
        """The keys of all blocks that `find_prefix` might find; if `whole`, with one more token behind these."""
        if not self._prefix_caching:
            return []
        most = min(len(token_ids) - (not whole), table.num_reusable_tokens)
        num_blocks = most // self.block_size
        self._key(table, token_ids, num_blocks - 1)
        return table.keys[1 : num_blocks + 1]

    def next_key(self, table: BlockTable, token_ids: Sequence[int]) -> bytes | None:
        """The key of the block that the table will publish next; None if its tokens are not all known."""
        index = table.num_published
        if not self._prefix_caching or (index + 1) * self.block_size > len(token_ids):
            return None
        return self._key(table, token_ids, index)

    def reusable_key(self, table: BlockTable, token_ids: Sequence[int], index: int) -> bytes | None:
        """The key of block `index`; None if `find_prefix` would not look for it."""
        if not self._prefix_caching or index >= self._num_reusable(table, token_ids):
            return None
        return self._key(table, token_ids, index)

    def num_shared_tokens(
        self,
        wanted: tuple[BlockTable, Sequence[int]],
        other: tuple[BlockTable, Sequence[int]],
        first: int,
    ) -> int:
        """Tokens of blocks from `first` on, which is equal, that a table could reuse of another one."""
        end = min(self._num_reusable(*wanted), len(other[1]) // self.block_size)
        low, high = first, end - 1
        while low < high:  # keys are chained: those in front of equal ones are equal
            middle = (low + high + 1) // 2
            if self._key(*wanted, middle) == self._key(*other, middle):
                low = middle
            else:
                high = middle - 1
        return (low + 1 - first) * self.block_size

    def _num_reusable(self, table: BlockTable, token_ids: Sequence[int]) -> int:
        """Leading blocks that `find_prefix` may find."""
        return min(len(token_ids) - 1, table.num_reusable_tokens) // self.block_size

    def sequence_key(self, table: BlockTable, token_ids: Sequence[int]) -> bytes:
        """Names all of `token_ids`, as `block_keys` names those of full blocks."""
        num_blocks, num_behind = divmod(len(token_ids), self.block_size)
        if num_blocks:
            self._key(table, token_ids, num_blocks - 1)
        parent = table.keys[num_blocks]
        return block_key(parent, token_ids[-num_behind:]) if num_behind else parent

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def adopt(self, table: BlockTable, hits: list[Block]) -> None:
        """Starts an empty table with cached blocks; they become shared and are never written again."""
        self.pool.share(hits)
        table.blocks.extend(hits)
        table.num_published = len(hits)

    def grow(self, table: BlockTable, num_tokens: int) -> list[int] | None:
        """Extends the table to hold `num_tokens`; returns the new block ids, or None if there are too few."""
        missing = self.num_blocks_for(num_tokens) - len(table.blocks)
        if missing <= 0:
            return []
        if missing > self.pool.num_available:
            return None
        new = self.pool.allocate(missing)
        table.blocks.extend(new)
        return [block.block_id for block in new]

    def publish(
        self, table: BlockTable, token_ids: Sequence[int], num_computed_tokens: int
    ) -> None:
        """Makes the blocks that `num_computed_tokens` fill available to later requests."""
        if not self._prefix_caching:
            return
        for index in range(table.num_published, num_computed_tokens // self.block_size):
            key = self._key(table, token_ids, index)
            start = index * self.block_size
            tokens = token_ids[start : start + self.block_size]
            parent = table.keys[index] if index else None
            self.pool.publish(table.blocks[index], key, parent, tokens)
            table.num_published = index + 1

    def cached_blocks(
        self, table: BlockTable, token_ids: Sequence[int], first: int, end: int
    ) -> list[CachedBlock]:
        """Published blocks of the table, as others may find them."""
        cached_blocks = []
        for index in range(first, end):
            key = table.keys[index + 1]
            block = self.pool.find(key)
            if block is not None:  # it may be a copy of this table's
                start = index * self.block_size
                tokens = token_ids[start : start + self.block_size]
                cached_blocks.append(
                    CachedBlock(block, key, table.keys[index] if index else None, tokens)
                )
        return cached_blocks

    def free(self, table: BlockTable, *, last_step: int = -1) -> None:
        """Returns all blocks; what was published stays cached until it is evicted.

        Steps up to `last_step` may still use them. They write behind what is computed only, but read all of it.
        """
        if last_step >= 0:
            for block in table.blocks:
                block.used_by = max(block.used_by, last_step)
        self.pool.release(table.blocks)
        table.blocks.clear()
        table.num_published = 0

    def _key(self, table: BlockTable, token_ids: Sequence[int], index: int) -> bytes:
        while len(table.keys) <= index + 1:
            start = (len(table.keys) - 1) * self.block_size
            tokens = token_ids[start : start + self.block_size]
            table.keys.append(block_key(table.keys[-1], tokens))
        return table.keys[index + 1]
