# SPDX-License-Identifier: Apache-2.0
"""Attention metadata: slot mapping, positions and block tables of a step, packed in host memory.

A step of one token of each sequence is filled up to one of some sizes, with rows that write nothing and attend to
nothing, and the longest context to a power of two: so few graphs serve all such steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagoda.backend.base import TokenBatch
from pagoda.plugins.cuda.kernels.attention import Steps, plan_tiles
from pagoda.plugins.cuda.staging import Parcel, Pinned, PinnedPool

MOST_CAPTURED = 512
"""Rows of the largest step that is captured."""
_LEAST_CONTEXT = 1024
"""Tokens of the shortest context that is captured."""
FEW_TILES = 32
"""Tiles of a step so small that several programs share the context of one."""


def padded_size(rows: int) -> int:
    """Rows of the captured step that one of so many becomes a part of: at most an eighth more, from 64 on."""
    if rows <= 8:
        return 1 << (rows - 1).bit_length()
    step = max(8, 1 << (rows - 1).bit_length() - 4)
    return -(-rows // step) * step


def captured_context(longest: int) -> int:
    """Tokens of the contexts that a captured step has room for, of which the longest has so many."""
    return max(_LEAST_CONTEXT, 1 << (longest - 1).bit_length())


@dataclass(frozen=True)
class Layout:
    """Shape of a step's places, padding included; steps of one layout may share a captured graph."""

    tokens: int
    tiles: int
    sequences: int
    blocks: int
    """Columns of the block tables."""
    context: int
    """Tokens of the longest context, at most."""
    is_padded: bool
    """Each sequence has one token, and the step is filled up."""

    def captured(self, size: int) -> Layout:
        """The layout of a captured step of `size` sequences, with contexts as long as this one's."""
        context = captured_context(self.context)
        blocks = -(-self.blocks * context // self.context)
        return Layout(size, size, size, blocks, context, is_padded=True)

    @property
    def shares_contexts(self) -> bool:
        """Several programs share the context of a tile."""
        return self.tiles <= FEW_TILES

    @property
    def parcel(self) -> Parcel:
        """Slots, positions, tiles, context lengths and block tables."""
        return Parcel(
            [
                ((self.tokens,), torch.int64),
                ((self.tokens,), torch.int32),
                ((self.tiles, 3), torch.int32),
                ((self.sequences,), torch.int32),
                ((self.sequences, self.blocks), torch.int32),
            ]
        )


@dataclass(frozen=True)
class SlotMapping:
    """Places of a step's tokens in one KV group."""

    num_tokens: int
    """Tokens without padding."""
    layout: Layout
    packed: Pinned
    """The tensors of `Layout.parcel`."""


@dataclass(frozen=True)
class DeviceSlotMapping:
    """The same as kernels take it."""

    slots: Tensor
    """[n] int64: block id times block size plus offset, -1 for padding."""
    steps: Steps

    @classmethod
    def of(cls, layout: Layout, memory: Tensor) -> DeviceSlotMapping:
        """Views of the packed tensors in memory of the device."""
        slots, positions, tiles, contexts, tables = layout.parcel.views(memory)
        return cls(slots, Steps(positions, tiles, contexts, tables))


def plan_slot_mapping(
    batch: TokenBatch, group: int, block_size: int, per_tile: int, pool: PinnedPool
) -> SlotMapping:
    """Places of a step, in tiles of `per_tile` tokens at most, written to pinned memory."""
    table, num_tokens = batch.block_tables[group], len(batch.positions)
    num_sequences, width = table.shape
    longest = int(batch.context_lens.max())
    if num_sequences == num_tokens and num_tokens <= MOST_CAPTURED:
        size, context = padded_size(num_tokens), captured_context(longest)
        layout = Layout(size, size, size, -(-context // block_size), context, is_padded=True)
        tiles = torch.ones(num_tokens, 3, dtype=torch.int32)
        tiles[:, 0] = tiles[:, 1] = torch.arange(num_tokens, dtype=torch.int32)
    else:
        tiles = plan_tiles(batch.query_lens, per_tile)
        blocks = -(-longest // block_size)
        layout = Layout(num_tokens, len(tiles), num_sequences, blocks, longest, is_padded=False)
    parcel = layout.parcel
    packed = pool.take(parcel.num_bytes)
    slots, positions, own_tiles, contexts, tables = parcel.views(packed.memory)
    of_tokens = table[batch.sequence_ids, batch.positions // block_size]
    slots[:num_tokens] = of_tokens * block_size + batch.positions % block_size
    positions[:num_tokens] = batch.positions
    own_tiles[: len(tiles)] = tiles
    contexts[:num_sequences] = batch.context_lens
    shared = min(width, layout.blocks)
    tables[:num_sequences, :shared] = table[:, :shared]
    if layout.is_padded:
        slots[num_tokens:], positions[num_tokens:], own_tiles[num_tokens:, 0] = -1, -1, -1
        own_tiles[num_tokens:, 1:], contexts[num_tokens:] = 0, 0
        tables[:num_sequences, shared:], tables[num_sequences:] = 0, 0
    return SlotMapping(num_tokens, layout, packed)
