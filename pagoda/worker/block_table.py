# SPDX-License-Identifier: Apache-2.0
"""Block tables (page tables) of all slots of one KV group. Each step gets a copy of the rows that it uses."""

from __future__ import annotations

import torch
from torch import Tensor

_FEW_ROWS = 4
"""Rows that are sooner copied one by one than all together."""


class SlotBlockTables:
    """Ids of blocks by slot, in a table that is allocated once.

    Steps are given copies, which take turns and stay where they are. What a step has in common with the last one
    of the same turn is not copied again.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, num_turns: int
    ) -> None:
        self.block_size = block_size
        max_blocks = -(-max_model_len // block_size)
        self._ids = torch.zeros((max_num_seqs, max_blocks), dtype=torch.int64)
        self.room = [0] * max_num_seqs
        """Tokens for which each slot has blocks."""
        self._copies = [_Copy(self._ids) for _ in range(num_turns)]

    def clear(self, slot: int) -> None:
        self.room[slot] = 0

    def append(self, slot: int, block_ids: list[int]) -> bool:
        """Appends blocks to a slot's table; False if there are too many."""
        begin = self.room[slot] // self.block_size
        end = begin + len(block_ids)
        if end > self._ids.shape[1]:
            return False
        self._ids[slot, begin:end] = torch.tensor(block_ids, dtype=torch.int64)
        self.room[slot] = end * self.block_size
        for copy in self._copies:
            copy.stale.add(slot)
        return True

    def of(self, turn: int, slots: list[int], longest: int) -> Tensor:
        """The tables [s, b] int64 of `slots`, for contexts of `longest` tokens at most.

        They are valid until the next step of the same turn.
        """
        return self._copies[turn].update(slots, -(-longest // self.block_size))


class _Copy:
    def __init__(self, ids: Tensor) -> None:
        self._ids = ids
        self._memory = torch.empty(ids.numel(), dtype=torch.int64)
        self._slots: list[int] = []
        self._rows = self._memory[:0].view(0, 0)
        self.stale: set[int] = set()
        """Slots whose tables have changed since they were copied."""

    def update(self, slots: list[int], num_blocks: int) -> Tensor:
        ids, width = self._ids, self._rows.shape[1]
        if slots == self._slots and num_blocks <= width and len(self.stale) <= _FEW_ROWS:
            if not self.stale:
                return self._rows
            for slot in self.stale.intersection(slots):
                self._rows[slots.index(slot)] = ids[slot, :width]
        else:
            while width < num_blocks:
                width = min(2 * width or 1, ids.shape[1])
            self._slots = list(slots)
            self._rows = self._memory[: len(slots) * width].view(len(slots), width)
            torch.index_select(
                ids[:, :width], 0, torch.tensor(slots, dtype=torch.int64), out=self._rows
            )
        self.stale.clear()
        return self._rows
