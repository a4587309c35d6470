# SPDX-License-Identifier: Apache-2.0
"""The KV manager: block tables of requests, and the prefix cache.

The block table of a request lists the blocks that hold its K and V. Full blocks are published under their keys,
and later requests with the same prefix share them. A request has a block table in each KV group
(`pagoda.messages.kv_groups`). Blocks of all groups come out of one pool of equally large ones. Equal keys
(`pagoda.kv.block_keys`) mean equal prefixes. Keys are made of blocks of `block_size` tokens, the smallest of any
group, in which prefixes are counted too.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from pagoda.kv.block_keys import block_key, extend_keys, group_key, root_key
from pagoda.kv.block_pool import Block, BlockPool
from pagoda.kv.block_table import BlockTable, GroupBlocks, PrefixHit
from pagoda.kv.capacity import resident_tokens, segment_blocks, streamed_from
from pagoda.kv.connector import CachedBlock
from pagoda.kv.events import CacheRecorder
from pagoda.kv.layout import KVLayout
from pagoda.kv.spread import SpreadBlocks
from pagoda.messages.kv_groups import KVGroup, KVKind
from pagoda.messages.spans import EmbeddedSpan
from pagoda.parallel.segments import ALL_ON_FIRST, ALL_ON_ONE, BlockRanks, SegmentShares

if TYPE_CHECKING:
    from pagoda.kv.cold_segments import ColdSegments

UNLIMITED_RUN = sys.maxsize


class KVManager:
    """Gives blocks to requests and takes them back; knows tokens, but no requests and no devices."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        groups: Sequence[KVGroup] = (),
        run_tokens: int = UNLIMITED_RUN,
        prefix_caching: bool = True,
        recorder: CacheRecorder | None = None,
        segment_tokens: int = 0,
        num_cold_segments: int = 0,
        shares: SegmentShares = ALL_ON_ONE,
        num_ranks: int = 1,
    ) -> None:
        """One group keeps all where `groups` is empty. Of several context-parallel ranks (`shares`) one does.

        `run_tokens` is the most tokens of a request that may be under way at once, as far as some group does not
        keep all. It is lowered where the pool would not hold that of a long sequence; see `fit`.
        `num_cold_segments` of so many tokens may lie in storeys below the device. Of `num_ranks`, each attends to
        requests of its own over its part of the blocks.
        """
        pools = max(shares.size, num_ranks)
        self.pool = BlockPool(num_blocks, recorder, num_ranks=pools, own_keys=num_ranks > 1)
        self.shares = shares
        self.num_ranks = num_ranks
        self._rank_blocks = num_blocks // num_ranks
        self.block_size = block_size
        self.spread = SpreadBlocks(self.pool, shares, block_size) if shares.size > 1 else None
        self.layout = KVLayout(block_size, groups)
        self.groups, self._ratios = self.layout.groups, self.layout.ratios
        self.keeps_all = self.layout.keeps_all
        self.keeps_states = any(group.kind is KVKind.STATE for group in self.groups)
        """States stay behind known tokens: drafts that were right are computed again."""
        self.run_tokens = UNLIMITED_RUN if self.keeps_all else run_tokens
        self._prefix_caching = prefix_caching
        self.segment_tokens = segment_tokens
        self._num_cold_segments = num_cold_segments
        self.resident_tokens = UNLIMITED_RUN
        """The most tokens on the device of a request that is streamed."""
        self._streamed_from = sys.maxsize
        self.cold: ColdSegments | None = None
        """Segments of requests that are streamed; None where there are no storeys for them."""

    def fit(self, num_tokens: int, multiple: int = 1) -> bool:
        """Lowers `run_tokens` to the highest multiple with which the pool holds a sequence of so many tokens,
        alone or together with the storeys below it.

        Returns False if there is none.
        """
        most = self.shares.most_tokens(num_tokens)
        if self.num_blocks_for(most) * self.shares.size <= self._rank_blocks:
            return True
        highest = 1 if self.keeps_all else min(self.run_tokens, num_tokens) // multiple
        num_blocks = self._rank_blocks
        fitting = 0
        if not self.keeps_all:
            fitting = bisect_right(
                range(1, highest + 1),
                num_blocks,
                key=lambda count: self._most_blocks(num_tokens, 0, count * multiple),
            )
        if fitting:
            self.run_tokens = fitting * multiple
            return True
        return self._num_cold_segments > 0 and self._fit_streamed(num_tokens, multiple, highest)

    def _fit_streamed(self, num_tokens: int, multiple: int, highest: int) -> bool:
        """Chooses how much of a sequence that is streamed lies on the device; False if all storeys together do not
        hold so many tokens."""
        num_blocks, size, groups = self.pool.num_blocks, self.segment_tokens, self.groups
        resident = resident_tokens(groups, num_blocks, num_tokens, self.run_tokens, size)
        if not (resident or self.keeps_all):
            fitting = bisect_left(
                range(1, highest + 1),
                True,
                key=lambda count: (
                    not resident_tokens(self.groups, num_blocks, num_tokens, count * multiple, size)
                ),
            )
            run_tokens = fitting * multiple
            if fitting:
                resident = resident_tokens(self.groups, num_blocks, num_tokens, run_tokens, size)
                self.run_tokens = run_tokens
        if not resident or num_tokens > resident + self._num_cold_segments * size:
            return False
        self.resident_tokens = resident
        self._streamed_from = streamed_from(groups, num_blocks, num_tokens, self.run_tokens, size)
        return True

    def is_streamed(self, num_tokens: int) -> bool:
        """True if a sequence of so many tokens keeps only a part of its blocks on the device."""
        return num_tokens >= self._streamed_from

    def new_table(
        self,
        cache_salt: str | None = None,
        adapter: str = "",
        spans: Sequence[EmbeddedSpan] = (),
    ) -> BlockTable:
        """An empty table of a request with this salt and adapter, whose prompt has these spans."""
        return BlockTable(root_key(self.block_size, cache_salt, adapter), len(self.groups), spans)

    # ---- prefixes

    def find_prefix(self, table: BlockTable, token_ids: Sequence[int]) -> PrefixHit:
        """The longest cached prefix of `token_ids`; takes no references.

        Groups that keep all have all of it, and the others what the token behind it needs. It never covers the
        last token: that one is computed, so that the request can sample.
        """
        end, leading = 0, dict[int, list[Block]]()
        num_cold = self.num_cold_found(table, token_ids)
        first = num_cold * self.segment_tokens // self.block_size
        if self._prefix_caching:
            end = self.most_reused(table, token_ids, num_cold)
            for group, it in enumerate(self.groups):
                if it.keeps_all:
                    leading[group] = self._leading(table, token_ids, group, first, end)
                    end = first + len(leading[group]) * self._ratios[group]
            end = self.layout.longest_usable(
                end, lambda group, index: self._find(table, token_ids, group, index) is not None
            )
        if end < first:  # other groups lack what they need behind the cold segments
            end = num_cold = first = 0
        needed = [self._held(group, end, first) for group in range(len(self.groups))]
        hits: list[list[Block]] = []
        for group, indices in enumerate(needed):
            if group in leading:
                hits.append(leading[group][: len(indices)])
                continue
            found = (self._find(table, token_ids, group, index) for index in indices)
            hits.append([block for block in found if block is not None])
        return PrefixHit(end, [indices.start for indices in needed], hits, num_cold)

    def num_cold_blocks(self, hit: PrefixHit) -> int:
        """Blocks of the cold segments of a prefix."""
        return hit.num_cold and hit.num_cold * segment_blocks(self.groups, self.segment_tokens)

    def num_cold_found(self, table: BlockTable, token_ids: Sequence[int]) -> int:
        """Leading segments of a sequence which lie in storeys, and stay there as what is behind them takes the
        device's room."""
        size, num_tokens = self.segment_tokens, len(token_ids)
        if self.cold is None or not self.is_streamed(num_tokens):
            return 0
        wanted = -(-(num_tokens + size - self.resident_tokens) // size)
        most = min(wanted, self._num_reusable(table, token_ids) * self.block_size // size)
        return self.cold.num_found(table, token_ids, most)

    def most_reused(self, table: BlockTable, token_ids: Sequence[int], num_cold: int) -> int:
        """The most leading blocks that a cache may have of a sequence, of which so many segments are cold.

        A sequence that is streamed has room on the device for some more tokens behind them."""
        end = self._num_reusable(table, token_ids)
        if not self.is_streamed(len(token_ids)):
            return end
        tokens = num_cold * self.segment_tokens + self.resident_tokens
        return min(end, tokens // self.block_size - self.layout.multiple)

    def _held(self, group: int, end: int, first: int) -> range:
        """Indices of a group's blocks on the device without which a prefix of `end` blocks is not usable, of which
        the first ones are cold."""
        needed = self.layout.needed(group, end)
        if self.groups[group].keeps_all:
            return range(first // self._ratios[group], needed.stop)
        return needed

    def _find(
        self, table: BlockTable, token_ids: Sequence[int], group: int, index: int
    ) -> Block | None:
        """The cached block `index` of a group."""
        return self.pool.find(self._group_key(table, token_ids, group, index), table.rank)

    def _group_key(
        self, table: BlockTable, token_ids: Sequence[int], group: int, index: int
    ) -> bytes:
        """The key of block `index` of a group."""
        return group_key(self._key(table, token_ids, (index + 1) * self._ratios[group] - 1), group)

    def block_key(self, table: BlockTable, token_ids: Sequence[int], index: int) -> bytes:
        """The key of block `index`, all of whose tokens are known."""
        return self._key(table, token_ids, index)

    def known_key(self, table: BlockTable, group: int, index: int) -> bytes:
        """The key of block `index` of a group, which the table has."""
        return group_key(table.keys[(index + 1) * self._ratios[group]], group)

    def _leading(
        self, table: BlockTable, token_ids: Sequence[int], group: int, first: int, most: int
    ) -> list[Block]:
        """Cached blocks of a group from `first` on without a gap, up to at most `most` blocks of `block_size`."""
        ratio, keys, find = self._ratios[group], table.keys, self.pool.find
        blocks: list[Block] = []
        for end in range(first + ratio, most + 1, ratio):
            key = keys[end] if end < len(keys) else self._key(table, token_ids, end - 1)
            block = find(group_key(key, group), table.rank)
            if block is None or (
                blocks and self.spread is not None and not self.spread.may_follow(blocks, block)
            ):
                break
            blocks.append(block)
        return blocks

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

    def next_key(self, table: BlockTable, token_ids: Sequence[int], index: int) -> bytes | None:
        """The key of block `index`, those before which the table has; None if its tokens are not all known."""
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
        """Tokens of blocks from `first` on, which is equal, that a table could reuse of another one.

        They end where a prefix may be usable.
        """
        end = min(self._num_reusable(*wanted), len(other[1]) // self.block_size)
        low, high = first, end - 1
        while low < high:  # keys are chained: those in front of equal ones are equal
            middle = (low + high + 1) // 2
            if self._key(*wanted, middle) == self._key(*other, middle):
                low = middle
            else:
                high = middle - 1
        return max(0, self.layout.usable(low + 1) - first) * self.block_size

    def _num_reusable(self, table: BlockTable, token_ids: Sequence[int]) -> int:
        """Leading blocks that `find_prefix` may find."""
        return min(len(token_ids) - 1, table.num_reusable_tokens) // self.block_size

    def sequence_key(self, table: BlockTable, token_ids: Sequence[int]) -> bytes:
        """Names all of `token_ids`, as `block_keys` names those of full blocks."""
        num_blocks, num_behind = divmod(len(token_ids), self.block_size)
        if num_blocks:
            self._key(table, token_ids, num_blocks - 1)
        parent = table.keys[num_blocks]
        if not num_behind:
            return parent
        start = len(token_ids) - num_behind
        return block_key(parent, token_ids[start:], table.spans, start)

    # ---- blocks that requests hold

    def num_blocks_for(self, num_tokens: int, num_computed_tokens: int = 0) -> int:
        """The most blocks that a sequence holds at once while it goes on to `num_tokens` tokens."""
        return self._most_blocks(num_tokens, num_computed_tokens, self.run_tokens)

    def _most_blocks(self, num_tokens: int, num_computed_tokens: int, run_tokens: int) -> int:
        return sum(
            self._group_blocks(group, num_tokens, num_computed_tokens, run_tokens)
            for group in self.groups
        )

    def _group_blocks(
        self, group: KVGroup, num_tokens: int, num_computed_tokens: int, run_tokens: int
    ) -> int:
        most = group.most_blocks(num_computed_tokens, num_tokens, run_tokens)
        if group.keeps_all and self.is_streamed(num_tokens):
            return min(most, self.resident_tokens // group.block_size)
        return most

    def num_blocks_behind(self, hit: PrefixHit, num_tokens: int) -> int:
        """The most blocks that a sequence which starts with a cached prefix takes from the pool.

        What others share of groups that keep all is never needed again. That of a window is left behind, without
        being free, for blocks of the sequence's own.
        """
        most = self.num_blocks_for(num_tokens, hit.num_blocks * self.block_size)
        shared = zip(self.groups, hit.num_shared(), strict=True)
        return most - sum(count for group, count in shared if group.keeps_all)

    def num_missing(self, table: BlockTable, num_tokens: int, num_computed_tokens: int) -> int:
        """The most blocks that a table gains, besides those that it gives back, until it holds `num_tokens`."""
        missing = 0
        for group, held in zip(self.groups, table.groups, strict=True):
            most = self._group_blocks(group, num_tokens, num_computed_tokens, self.run_tokens)
            if not group.keeps_all:
                most += max(0, min(held.num_shared, held.num_adopted - held.first))
            gained = group.num_blocks_for(num_tokens) - held.end
            missing += max(0, min(most - len(held.blocks), gained))
        return missing

    def adopt(self, table: BlockTable, hit: PrefixHit) -> None:
        """Starts an empty table with a cached prefix; its blocks become shared and are never written again."""
        if self.cold is not None:
            self.cold.adopt(table, hit.num_cold)
        for held, first, blocks in zip(table.groups, hit.firsts, hit.groups, strict=True):
            held.num_shared = sum(block.ref_count > 0 for block in blocks)
            self.pool.share(blocks)
            held.first = first
            held.blocks.extend(blocks)
            held.num_adopted = held.end
        table.num_published = hit.num_blocks

    def has_room_for(self, table: BlockTable, num_tokens: int) -> bool:
        """True if the table holds `num_tokens` already."""
        return all(
            num_tokens <= held.end * group.block_size
            for group, held in zip(self.groups, table.groups, strict=True)
        )

    def grow(self, table: BlockTable, num_tokens: int) -> list[GroupBlocks] | None:
        """Extends the table to hold `num_tokens`; returns the new blocks, or None if there are too few."""
        missing = [
            max(0, group.num_blocks_for(num_tokens) - held.end)
            for group, held in zip(self.groups, table.groups, strict=True)
        ]
        total = sum(missing)
        if total > self.num_available(table.rank):
            return None
        if self.spread is not None:
            return self.spread.grow(table.groups[0], total)
        new = self.pool.allocate(total, table.rank) if total else []
        gained: list[GroupBlocks] = []
        start = 0
        for group, count in enumerate(missing):
            if count:
                blocks = new[start : start + count]
                start += count
                table.groups[group].blocks.extend(blocks)
                gained.append(GroupBlocks(group, [block.block_id for block in blocks]))
        return gained

    def num_available(self, rank: int) -> int:
        """Blocks that a request of a rank may take."""
        return self.pool.available[rank] if self.num_ranks > 1 else self.pool.num_available

    def drop_behind(self, table: BlockTable, num_computed_tokens: int, last_step: int) -> bool:
        """Releases blocks that no token behind `num_computed_tokens` needs; returns whether there were any.

        Steps up to `last_step` may still use them. A block is likely to be wanted again if it was cached before
        this request came: it belongs to a beginning that several have in common. Others would drive out what is
        worth more.
        """
        if num_computed_tokens <= table.holds_until:
            return False
        has_dropped = False
        for group, held in zip(self.groups, table.groups, strict=True):
            first = min(group.first_block(num_computed_tokens), held.end)
            count = first - held.first
            if count <= 0:
                continue
            dropped = held.blocks[:count]
            shared = max(0, min(count, held.num_adopted - held.first))
            del held.blocks[:count]
            held.first = first
            for block in dropped:
                block.used_by = max(block.used_by, last_step)
            self.pool.release(dropped[:shared])
            self.pool.release(dropped[shared:], likely=False)
            has_dropped = True
        both = zip(self.groups, table.groups, strict=True)
        table.holds_until = min(group.last_use(held.first) for group, held in both)
        return has_dropped

    def publish(
        self, table: BlockTable, token_ids: Sequence[int], num_computed_tokens: int
    ) -> None:
        """Makes the blocks that `num_computed_tokens` fill available to later requests."""
        if not self._prefix_caching:
            return
        num_computed = num_computed_tokens // self.block_size
        for index in range(table.num_published, num_computed):
            key = self._key(table, token_ids, index)
            end = index + 1
            for group, (held, ratio) in enumerate(zip(table.groups, self._ratios, strict=True)):
                place, rest = divmod(end, ratio)
                place -= 1 + held.first
                if rest == 0 and place >= 0:
                    parent = group_key(table.keys[end - ratio], group) if end > ratio else None
                    tokens = token_ids[(end - ratio) * self.block_size : end * self.block_size]
                    self.pool.publish(
                        held.blocks[place], group_key(key, group), parent, tokens, group
                    )
            table.num_published = index + 1

    def cached_blocks(
        self, table: BlockTable, token_ids: Sequence[int], first: int, end: int
    ) -> list[CachedBlock]:
        """Published blocks of groups that keep all, from `first` to `end` of a prefix."""
        cached_blocks: list[CachedBlock] = []
        for group, ratio in enumerate(self._ratios):
            if self.groups[group].keeps_all:
                indices = range(first // ratio, end // ratio)
                cached_blocks += self._cached(table, token_ids, group, indices)
        return cached_blocks

    def cached_tails(
        self, table: BlockTable, token_ids: Sequence[int], first: int, end: int
    ) -> list[CachedBlock]:
        """Published blocks of other groups that a prefix needs which ends at `end`, or just before it.

        What a prefix that ends at `first` needs is not among them.
        """
        first, end = self.layout.usable(first), self.layout.usable(end)
        cached_blocks: list[CachedBlock] = []
        for group, it in enumerate(self.groups):
            if not it.keeps_all:
                indices = self.layout.part(group, end, first, end)
                cached_blocks += self._cached(table, token_ids, group, indices)
        return cached_blocks

    def needed_blocks(
        self, table: BlockTable, token_ids: Sequence[int], end: int
    ) -> list[CachedBlock]:
        """Published blocks that a prefix of `end` blocks needs, as `is_needed`, the most important ones first.

        That is the beginning, for any leading part is of use; or what is evicted first, where other groups have
        what is needed at the end alone. Without all of that, as of a state that has moved on, there are none.
        """
        end = self.layout.usable(end)
        for group, it in enumerate(self.groups):
            indices = () if it.keeps_all else self.layout.needed(group, end)
            if any(self._find(table, token_ids, group, index) is None for index in indices):
                return []
        blocks: list[CachedBlock] = []
        step, cold = max(self._ratios), len(table.cold) * self.segment_tokens // self.block_size
        for first in range(cold // step * step, end, step):
            blocks += self.cached_blocks(table, token_ids, first, min(end, first + step))
        if not self.keeps_all:
            blocks = [*self.cached_tails(table, token_ids, 0, end), *reversed(blocks)]
        return [it._replace(is_needed=True) for it in blocks]

    def _cached(
        self, table: BlockTable, token_ids: Sequence[int], group: int, indices: range
    ) -> Iterator[CachedBlock]:
        size = self.groups[group].block_size
        for index in indices:
            block = self._find(table, token_ids, group, index)
            if block is None:  # what is findable may be a copy of this table's
                continue
            parent = self._group_key(table, token_ids, group, index - 1) if index else None
            key = self._group_key(table, token_ids, group, index)
            tokens = token_ids[index * size : (index + 1) * size]
            yield CachedBlock(block, key, parent, tokens, group)

    # ---- blocks for other engines

    def num_handed_over(self, num_tokens: int) -> int:
        """Blocks of the prefix of a prompt that another engine is given to go on behind it.

        It may have to compute the last token itself, and needs windows in front of that one: where groups do not
        keep all, the prefix ends there.
        """
        return self.layout.usable((num_tokens - (not self.keeps_all)) // self.block_size)

    def part(self, table: BlockTable, prefix: int, first: int, end: int) -> list[list[Block]]:
        """Blocks needed for a prefix of `prefix` blocks that blocks `first` to `end` of it complete, by group.

        The table has published them, and has not dropped any of them yet.
        """
        parts = (self.layout.part(group, prefix, first, end) for group in range(len(self.groups)))
        return [
            held.blocks[indices.start - held.first : indices.stop - held.first]
            for held, indices in zip(table.groups, parts, strict=True)
        ]

    # ---- blocks that transfers fill

    def begin_load(
        self,
        table: BlockTable,
        token_ids: Sequence[int],
        end: int,
        targets: Collection[tuple[int, int]],
        num_cold: int = 0,
        ranks: BlockRanks = ALL_ON_FIRST,
    ) -> list[Block]:
        """Fills an empty table with what a prefix of `end` blocks needs; returns the blocks that are to be loaded.

        `targets` are groups and indices of these, in order, and `ranks` says where they are to lie; all others are
        cached, or in the first `num_cold` segments, which are in storeys.

        Raises ValueError if there are too few blocks, or another one is not cached.
        """
        loaded = set(targets)
        first = num_cold * self.segment_tokens // self.block_size
        kept: list[dict[int, Block]] = []
        for group in range(len(self.groups)):
            indices = self._held(group, end, first)
            wanted = [index for index in indices if (group, index) not in loaded]
            found = {i: self._find(table, token_ids, group, i) for i in wanted}
            kept.append({i: block for i, block in found.items() if block is not None})
            if len(kept[-1]) < len(wanted):
                raise ValueError(f"Group {group} has not all blocks that are not to be loaded.")
        for blocks in kept:
            self.pool.share(blocks.values())
        try:
            new = self.pool.allocate_on([ranks.of(index) for _, index in targets])
        except ValueError:
            for blocks in kept:
                self.pool.release(list(blocks.values()))
            raise
        for (group, index), block in zip(targets, new, strict=True):
            kept[group][index] = block
        for group, held in enumerate(table.groups):
            held.first = self._held(group, end, first).start
            held.blocks.extend(kept[group][index] for index in sorted(kept[group]))
        if self.cold is not None:
            self.cold.adopt(table, num_cold)
        return new

    def publish_loaded(
        self, table: BlockTable, token_ids: Sequence[int], loaded: Sequence[tuple[int, int]]
    ) -> None:
        """Makes blocks available that transfers have filled, by group and index."""
        for group, index in loaded:
            held, size = table.groups[group], self.groups[group].block_size
            parent = self._group_key(table, token_ids, group, index - 1) if index else None
            self.pool.publish(
                held.blocks[index - held.first],
                self._group_key(table, token_ids, group, index),
                parent,
                token_ids[index * size : (index + 1) * size],
                group,
            )

    def free(self, table: BlockTable, *, last_step: int = -1) -> None:
        """Returns all blocks; what was published stays cached until it is evicted.

        Steps up to `last_step` may still use them. They write behind what is computed only, but read all of it.
        """
        if self.cold is not None:
            self.cold.release(table, last_step)
        for held in reversed(table.groups):
            if last_step >= 0:
                for block in held.blocks:
                    block.used_by = max(block.used_by, last_step)
            self.pool.release(held.blocks)
            held.blocks.clear()
            held.first = held.num_adopted = 0
        table.num_published = table.holds_until = 0

    def _key(self, table: BlockTable, token_ids: Sequence[int], index: int) -> bytes:
        if len(table.keys) <= index + 1:
            extend_keys(table.keys, token_ids, self.block_size, index + 1, table.spans)
        return table.keys[index + 1]
