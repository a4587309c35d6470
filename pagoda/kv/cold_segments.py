# SPDX-License-Identifier: Apache-2.0
"""Cold segments: leading parts of running requests that lie in a storey below the device.

A request whose KV does not fit the device gives its oldest full segments to the next storey and goes on computing.
Steps read cold segments where they lie. A segment is of `segment_tokens` tokens, and its borders are multiples of
these, so that where it lies cannot change an answer. All groups that keep everything have the same cold segments.
What a step in flight may read is held until the step has ended.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pagoda.kv.capacity import segment_blocks
from pagoda.kv.connector import CachedBlock
from pagoda.kv.storeys import Hold, Storey
from pagoda.messages.transfers import HostSlots, TierBlocks, num_places, tier_name
from pagoda.messages.worker import LostSegments

if TYPE_CHECKING:
    from pagoda.kv.block_table import BlockTable
    from pagoda.kv.manager import KVManager

Segment = Sequence[Hold]
"""A segment of one request: its blocks by group, of those that keep all."""


def num_blocks(segment: Segment) -> int:
    """Blocks of a segment in all groups."""
    return sum(num_places(hold.place) for hold in segment)


class ColdSegments:
    """Moves segments of requests to storeys, nearest first, and finds those that are there."""

    def __init__(self, kv: KVManager, storeys: Sequence[Storey]) -> None:
        self._kv = kv
        self._storeys = storeys
        self._groups = [number for number, group in enumerate(kv.groups) if group.keeps_all]
        tokens = kv.segment_tokens
        self._sizes = [tokens // kv.groups[number].block_size for number in self._groups]
        """Blocks of a segment by group."""
        self._segment_blocks = segment_blocks(kv.groups, tokens)
        self._leaving: deque[tuple[int, Hold]] = deque()
        """Holds that nobody needs once a step has ended, by step."""
        self._last_done = -1

    # ---- segments that are found in a storey

    def num_found(self, table: BlockTable, token_ids: Sequence[int], most: int) -> int:
        """Leading segments, of at most `most`, each of which is in one storey as a whole."""
        kv = self._kv
        if most > 0:
            kv.block_key(table, token_ids, most * kv.segment_tokens // kv.block_size - 1)
        for index in range(most):
            if self._storey_of(table, index) is None:
                return index
        return max(0, most)

    def num_shared(self, table: BlockTable, token_ids: Sequence[int], most: int) -> int:
        """Leading segments, of at most `most`, that other requests hold."""
        count = min(most, max(0, len(token_ids) - 1) // self._kv.segment_tokens)
        count = self.num_found(table, token_ids, count)
        for index in range(count):
            storey = self._storey_of(table, index)
            if storey is None or not storey.is_held(self._keys(table, index)[0][0]):
                return index
        return count

    def adopt(self, table: BlockTable, count: int) -> None:
        """Starts an empty table with segments that were found."""
        for index in range(count):
            storey = self._storey_of(table, index)
            if storey is None:
                raise ValueError(f"Segment {index} is not there any more.")
            table.cold.append([storey.hold_found(keys) for keys in self._keys(table, index)])

    def _storey_of(self, table: BlockTable, index: int) -> Storey | None:
        """The nearest storey that has a segment, whose keys the table has."""
        keys = self._keys(table, index)
        for storey in self._storeys:
            if all(storey.has(key) for some in keys for key in some):
                return storey
        return None

    def _keys(self, table: BlockTable, index: int) -> list[list[bytes]]:
        """Keys of a segment's blocks by group; the table has those of the tokens."""
        return [
            [
                self._kv.known_key(table, group, block)
                for block in range(index * size, (index + 1) * size)
            ]
            for group, size in zip(self._groups, self._sizes, strict=True)
        ]

    # ---- segments that leave the device

    def may_cool(self, table: BlockTable) -> bool:
        """True if the oldest segment on the device is full, and computed."""
        end = (len(table.cold) + 1) * self._kv.segment_tokens
        return table.cooling is None and table.num_published * self._kv.block_size >= end

    def cool(self, table: BlockTable, token_ids: Sequence[int]) -> bool:
        """Begins to copy the oldest segment on the device to the nearest storey that takes it; False if none does
        now."""
        blocks = [
            self._oldest(table, token_ids, group, size)
            for group, size in zip(self._groups, self._sizes, strict=True)
        ]
        storey = next((it for it in self._storeys if self._num_free_in(it)), None)
        if storey is None:
            return False
        holds: list[Hold] = []
        for some in blocks:
            hold = storey.hold(some)
            if hold is None:  # there is room, but not yet
                for other in holds:
                    other.release()
                return False
            holds.append(hold)
        table.cooling = holds
        return True

    def _oldest(
        self, table: BlockTable, token_ids: Sequence[int], group: int, count: int
    ) -> list[CachedBlock]:
        """The first blocks that a table holds of a group, which are computed."""
        kv, held, size = self._kv, table.groups[group], self._kv.groups[group].block_size
        blocks: list[CachedBlock] = []
        for index, block in enumerate(held.blocks[:count], held.first):
            parent = kv.known_key(table, group, index - 1) if index else None
            tokens = token_ids[index * size : (index + 1) * size]
            key = kv.known_key(table, group, index)
            blocks.append(CachedBlock(block, key, parent, tokens, group, is_needed=True))
        return blocks

    def take_cooled(self, table: BlockTable, last_step: int) -> Segment | None:
        """The segment whose copies have ended, which is cold from now on; None if there is none. Its blocks on the
        device are given back; steps up to `last_step` may still use them."""
        segment = table.cooling
        if segment is None:
            return None
        if any(hold.error for hold in segment):
            table.cooling = None
            for hold in segment:
                hold.release()
            return None
        if not all(hold.is_there for hold in segment):
            return None
        table.cooling = None
        table.cold.append(segment)
        for group, size in zip(self._groups, self._sizes, strict=True):
            held = table.groups[group]
            dropped = held.blocks[:size]
            del held.blocks[:size]
            held.first += size
            for block in dropped:
                block.used_by = max(block.used_by, last_step)
            self._kv.pool.release(dropped, likely=False)
        return segment

    # ---- what is held

    def has_room_for(self, num_segments: int) -> bool:
        """True if so many further segments could be held."""
        return num_segments <= sum(map(self._num_free_in, self._storeys))

    def _num_free_in(self, storey: Storey) -> int:
        """Further segments that a storey could hold."""
        return max(0, storey.num_holdable - storey.num_held) // self._segment_blocks

    @property
    def num_held(self) -> int:
        """Blocks that are held, in all storeys."""
        return sum(storey.num_held for storey in self._storeys)

    @property
    def trouble(self) -> str:
        """Clause that says why a storey takes nothing at present; empty if all do."""
        return next(filter(None, (storey.trouble for storey in self._storeys)), "")

    @property
    def is_back_soon(self) -> bool:
        """True while a storey rests because a step waited for it in vain."""
        return any(storey.is_back_soon for storey in self._storeys)

    def may_give(self, table: BlockTable) -> bool:
        """True if the request holds anything in a storey that could take something in its place."""
        open_storeys = {storey.tier for storey in self._storeys if not storey.trouble}
        segments = [*table.cold, table.cooling or ()]
        return any(tier_name(hold.place) in open_storeys for it in segments for hold in it)

    def places(self, segment: Segment) -> Iterator[tuple[int, HostSlots | TierBlocks]]:
        """The place of a segment's blocks of each group."""
        return zip(self._groups, (hold.place for hold in segment), strict=True)

    def lose(self, table: BlockTable, lost: LostSegments) -> None:
        """A step could not read a cold segment of this request. Its storey loses that one and all blocks behind
        it, which are seldom better: a directory has gone, or the request would find them next."""
        if lost.first >= len(table.cold):
            return
        tier = tier_name(table.cold[lost.first][0].place)
        (storey,) = (it for it in self._storeys if it.tier == tier)
        for group, size in zip(self._groups, self._sizes, strict=True):
            end = (len(table.keys) - 1) // self._kv.layout.ratios[group]
            behind = range(lost.first * size, end)
            keys = [self._kv.known_key(table, group, index) for index in behind]
            storey.lose(keys, hangs=lost.hangs)

    def release(self, table: BlockTable, last_step: int) -> None:
        """The request holds nothing any more; steps up to `last_step` may still read its cold segments."""
        for hold in table.cooling or ():
            hold.release()
        for segment in table.cold:
            for hold in segment:
                if last_step <= self._last_done:
                    hold.release()
                else:
                    self._leaving.append((last_step, hold))
        table.cold, table.cooling = [], None

    def step_done(self, step: int) -> None:
        """No step up to this one reads anything any more."""
        self._last_done = step
        self._let_go(step)

    def _let_go(self, step: int) -> None:
        while self._leaving and self._leaving[0][0] <= step:
            self._leaving.popleft()[1].release()

    def workers_lost(self) -> None:
        """No step is in flight any more."""
        self._let_go(sys.maxsize)

    @property
    def is_idle(self) -> bool:
        return not self._leaving
