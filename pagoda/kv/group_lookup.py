# SPDX-License-Identifier: Apache-2.0
"""Lookups of prefixes of several KV groups: what the device lacks of one, and where it can be loaded from.

Groups that keep all are followed block by block, as far as the device or any connector goes on. Of the others only
what the token behind the prefix needs is looked for. The longest prefix that all groups allow is what counts.
All blocks lie on one rank: contexts that several share have one group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pagoda.kv.block_pool import BlockPool
from pagoda.kv.connector import IsThere, KVConnector, PrefixRequest
from pagoda.kv.layout import KVLayout


class Segment(NamedTuple):
    """Blocks `start` to `end` of a group, which one connector has."""

    connector: KVConnector
    start: int
    end: int
    group: int = 0


class PendingLookup(NamedTuple):
    """A lookup that cannot be answered yet."""

    connector: KVConnector
    """The connector that does not know yet, or that is loading the next block for another request."""


NextSegment = Callable[[PrefixRequest, int], Segment | PendingLookup]
"""The segment of blocks of one group that begins at an index; an empty one if no connector has that block."""


class GroupLookup:
    """One lookup of one prefix."""

    def __init__(
        self,
        layout: KVLayout,
        pool: BlockPool,
        prefix: PrefixRequest,
        next_segment: NextSegment,
    ) -> None:
        self._layout = layout
        self._pool = pool
        self._prefix = prefix
        self._next_segment = next_segment
        self._found: list[dict[int, KVConnector]] = [{} for _ in layout.groups]
        """Connectors that have what the device lacks, by group and index."""
        self.pending: PendingLookup | None = None
        """An answer that is still to come, and may lengthen the prefix."""

    def segments(self, start: int) -> tuple[int, list[Segment]]:
        """The length of the longest prefix that can be loaded, and what is to be loaded of it.

        The device has a usable prefix of `start` blocks.
        """
        layout, end = self._layout, len(self._prefix.keys)
        for group, it in enumerate(layout.groups):
            if it.keeps_all:
                end = self._follow(group, start, end)
        if self.pending is None:
            end = layout.longest_usable(end, self._has)
        if self.pending is not None or end <= start:
            return start, []
        return end, self._segments(end)

    def _view(self, group: int, num_blocks: int) -> PrefixRequest:
        return self._prefix.of_group(group, self._layout.ratios[group], num_blocks)

    def _follow(self, group: int, start: int, end: int) -> int:
        """Blocks of the prefix that a group has without a gap, of which it has `start` on the device."""
        ratio = self._layout.ratios[group]
        view = self._view(group, end // ratio)
        keys, found, find = view.keys, self._found[group], self._pool.find
        index, count, rank = start // ratio, len(keys), view.ranks.first
        while index < count:
            if find(keys[index], rank) is not None:
                index += 1
                continue
            segment = self._next_segment(view, index)
            if isinstance(segment, PendingLookup):
                self.pending = segment
                break
            if segment.end == index:
                break
            for position in range(index, segment.end):
                if find(keys[position], rank) is None:
                    found[position] = segment.connector
            index = segment.end
        return index * ratio

    def _has(self, group: int, index: int) -> bool:
        """True if a group that does not keep all has a block."""
        view = self._view(group, index + 1)
        if self._pool.find(view.keys[index], view.ranks.first) is not None:
            return True
        segment = self._next_segment(view, index)
        if isinstance(segment, PendingLookup):
            self.pending = segment
            return False
        if segment.end > index:
            self._found[group][index] = segment.connector
        return segment.end > index

    def _segments(self, end: int) -> list[Segment]:
        """Blocks beyond the device, group after group; adjacent ones of one connector together."""
        segments: list[Segment] = []
        for group, found in enumerate(self._found):
            needed, connector, start = self._layout.needed(group, end), None, 0
            for index in (*needed, needed.stop):
                following = found.get(index) if index < needed.stop else None
                if following is not connector:
                    if connector is not None:
                        segments.append(Segment(connector, start, index, group))
                    connector, start = following, index
        return segments


def other_blocks(
    layout: KVLayout,
    prefix: PrefixRequest,
    start: int,
    is_near: IsThere,
    num_blocks: int,
    is_there: IsThere,
) -> list[bytes]:
    """Keys of blocks in a slow place that the longest usable prefix needs besides the leading ones of group 0.

    Group 0 has `num_blocks` leading blocks if it keeps all; if not, it is looked for like other groups. The first
    `start` blocks are on the device. What `is_near` finds is not looked for in the slow place.
    """
    found: list[bytes] = []
    end = num_blocks if layout.groups[0].keeps_all else len(prefix.keys)
    views = [
        prefix.of_group(group, ratio, len(prefix.keys) // ratio).keys
        for group, ratio in enumerate(layout.ratios)
    ]

    def has(group: int, index: int) -> bool:
        key = views[group][index]
        if is_near(key):
            return True
        if is_there(key):
            found.append(key)
            return True
        return False

    for group, (it, ratio) in enumerate(zip(layout.groups, layout.ratios, strict=True)):
        if group and it.keeps_all:
            count = end // ratio
            lacking = (index for index in range(start // ratio, count) if not has(group, index))
            end = next(lacking, count) * ratio
    layout.longest_usable(end, has)
    return found
