# SPDX-License-Identifier: Apache-2.0
"""Layout of prefixes over KV groups: which blocks of which group they need, on the device and beyond it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from pagoda.messages.kv_groups import KVGroup, full_group


class KVLayout:
    """The KV groups of a model. Prefixes are counted in blocks of `block_size` tokens, the fewest of any group."""

    def __init__(self, block_size: int, groups: Sequence[KVGroup] = ()) -> None:
        """One group keeps all where `groups` is empty."""
        self.block_size = block_size
        self.groups = tuple(groups) or (full_group(0, block_size),)
        self.keeps_all = all(group.keeps_all for group in self.groups)
        self.is_chain = self.keeps_all and len(self.groups) == 1
        """True if a prefix is a chain of blocks, each of which is usable if those before it are."""
        self.ratios = [group.block_size // block_size for group in self.groups]
        """Blocks of `block_size` in a block of each group."""
        self.multiple = max(self.ratios)
        """Prefixes that end elsewhere are not usable."""

    def needed(self, group: int, end: int) -> range:
        """Indices of the group's blocks without which a prefix of `end` blocks is not usable."""
        first = self.groups[group].first_block(end * self.block_size)
        return range(first, end // self.ratios[group])

    def usable(self, num_blocks: int) -> int:
        """The longest prefix of at most so many blocks that may be usable."""
        return num_blocks - num_blocks % self.multiple

    def part(self, group: int, prefix: int, first: int, end: int) -> range:
        """Indices of those needed for a prefix that blocks `first` to `end` of it complete."""
        needed, ratio = self.needed(group, prefix), self.ratios[group]
        start = max(needed.start, first // ratio)
        return range(start, max(start, min(needed.stop, end // ratio)))

    def longest_usable(self, end: int, has: Callable[[int, int], bool]) -> int:
        """The longest prefix of at most `end` blocks behind which groups that do not keep all have what is needed.

        `has` tells whether a group has a block of some index. It is asked about a block once, and first about the
        one that is farthest from the end: if that is lacking, all ends that need it are ruled out at once.
        """
        known = [sys.maxsize] * len(self.groups)
        """Index from which on a group is known to have all blocks up to the end."""
        end = self.usable(end)
        while (shorter := self._longest_without(end, has, known)) is not None:
            end = self.usable(shorter)
        return end

    def _longest_without(
        self, end: int, has: Callable[[int, int], bool], known: list[int]
    ) -> int | None:
        """The longest prefix that can do without the first block that one of `end` blocks lacks; None if it lacks
        none. Lowers `known`.
        """
        for group, (it, ratio) in enumerate(zip(self.groups, self.ratios, strict=True)):
            if it.keeps_all:
                continue
            needed = self.needed(group, end)
            unknown = range(needed.start, min(needed.stop, known[group]))
            known[group] = needed.start
            for index in unknown:
                if not has(group, index):
                    return index * ratio
        return None
