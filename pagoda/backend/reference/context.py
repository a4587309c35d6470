# SPDX-License-Identifier: Apache-2.0
"""Attention over contexts whose segments lie on several ranks, in plain PyTorch (context parallelism).

All ranks have the queries of all tokens of a step. Each attends with them to the segments that it holds, and ranks
exchange what they found, round by round: one segment of each rank and sequence, which follow each other. They are
merged in the order of segments, so that no bit depends on the number of ranks. Block tables have -1 - *r* for
blocks of rank *r*.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagoda.backend.base import KVCache
from pagoda.backend.reference.attention import (
    KEYS,
    LEAST_COLUMNS,
    TILES_PER_PASS,
    AttentionMetadata,
    Softmax,
    Tiles,
    attend_keys,
    kv_rows,
    query_tiles,
    slopes_of_rows,
)
from pagoda.backend.reference.scores import Scores
from pagoda.parallel.collectives import Collectives


class _Pass(NamedTuple):
    """Some query tiles, those with the most key tiles in their segments first."""

    tiles: Tensor
    """[tiles] int64, their numbers."""
    positions: Tensor
    """[tiles, rows], as in `Tiles`."""
    firsts: Tensor
    """[tiles], positions of the segments' first tokens."""
    last_positions: Tensor
    """[tiles], of the last tokens in the segments that some query of a tile sees."""
    num_active: list[int]
    """Number of query tiles that reach each key tile of a segment."""
    kv_rows: Tensor
    """[tiles, key_tiles, kv_heads, blocks], as `kv_rows` gives them."""


def context_attention(
    queries: Tensor,
    metadata: AttentionMetadata,
    cache: KVCache,
    ranks: Collectives,
    sinks: Tensor | None = None,
    *,
    head_dim: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    chunk: int | None,
    causal: bool,  # noqa: ARG001 - encoders have no context
    slopes: Tensor | None = None,
) -> Tensor:
    tiles, num_tokens, segment_tokens = metadata.tiles, len(queries), metadata.segment
    packed = query_tiles(queries, metadata, cache.keys.shape[1], head_dim, scale)
    of_scores = Scores(softcap)
    if slopes is not None:
        of_scores = Scores(softcap, slopes_of_rows(slopes, packed, metadata))
    # A block of another rank is -1 less its number; the first segment's rank is that of the first block.
    first_ranks = torch.where(metadata.first_blocks < 0, -1 - metadata.first_blocks, ranks.rank)
    num_segments = -(-max(metadata.context_lens, default=0) // segment_tokens)
    num_heads = queries.shape[1] // head_dim
    whole = Softmax.empty(num_tokens, num_heads, head_dim)
    order = (first_ranks + torch.arange(ranks.size)[:, None]) % ranks.size
    for number in range(-(-num_segments // ranks.size)):
        turns = number * ranks.size + (ranks.rank - first_ranks) % ranks.size
        found = torch.zeros((*packed.shape[:3], head_dim + 2))
        found[..., 0] = -torch.inf
        starts = turns[tiles.first_tokens] * segment_tokens
        for part in _plan_round(tiles, starts, segment_tokens, cache):
            own_scores = of_scores.of_tiles(part.tiles)
            found[part.tiles] = _attend(
                packed[part.tiles], cache, part, (window, chunk), own_scores
            )
        own = found.view(-1, head_dim + 2).index_select(0, metadata.rows)
        shares = ranks.all_gather(own.view(num_tokens, -1, head_dim + 2))
        for rank in order:
            share = shares[rank, torch.arange(num_tokens)]
            whole.merge(slice(None), Softmax(share[..., :1], share[..., 1:2], share[..., 2:]))
    highest, total, out = whole
    if sinks is not None:
        total = total + torch.exp(sinks[:, None] - highest.clamp(min=-3e38))
    return (out / total.clamp(min=1)).flatten(1)


def _plan_round(tiles: Tiles, starts: Tensor, segment_tokens: int, cache: KVCache) -> list[_Pass]:
    """Passes over a segment for each query tile, which begins at `starts` [tiles]; tiles before it have none."""
    _, num_kv_heads, block_size, _ = cache.keys.shape
    last_positions = tiles.last_positions.minimum(starts + segment_tokens - 1)
    lengths, by_length = (last_positions - starts).sort(descending=True, stable=True)
    active = by_length[: int((lengths >= 0).sum())]
    passes: list[_Pass] = []
    for first in range(0, len(active), TILES_PER_PASS):
        own = active[first : first + TILES_PER_PASS]
        key_tiles = (last_positions[own] - starts[own]) // KEYS + 1
        columns = starts[own, None] // block_size + torch.arange(segment_tokens // block_size)
        tables = tiles.tables[own].gather(1, columns.clamp(max=tiles.tables.shape[1] - 1))
        reached = key_tiles[:, None] > torch.arange(int(key_tiles[0]))
        passes.append(
            _Pass(
                own,
                tiles.positions[own],
                starts[own],
                last_positions[own],
                reached.sum(0).tolist(),
                # Blocks behind a context are any.
                kv_rows(tables.clamp(min=0), num_kv_heads, block_size),
            )
        )
    return passes


def _attend(
    queries: Tensor,
    cache: KVCache,
    part: _Pass,
    reach: tuple[int | None, int | None],
    of_scores: Scores,
) -> Tensor:
    """Softmax of query tiles [tiles, kv_heads, rows, d] over their segments: [tiles, kv_heads, rows, 2 + d]."""
    num_tiles, num_heads, num_rows, head_dim = queries.shape
    matrices = queries.flatten(0, 1)
    found = Softmax.empty(len(matrices), num_rows, max(LEAST_COLUMNS, head_dim))
    for index, active in enumerate(part.num_active):
        going_on = part.num_active[index + 1] if index + 1 < len(part.num_active) else 0
        attend_keys(
            matrices[: active * num_heads],
            cache,
            part.kv_rows[:active, index].flatten(),
            part.firsts[:active, None] + torch.arange(index * KEYS, (index + 1) * KEYS),
            part.positions[:active],
            torch.zeros(active, dtype=torch.int64),
            part.last_positions[going_on:active],
            reach,
            of_scores,
            found,
        )
    both = torch.cat((found.highest, found.total, found.out[..., :head_dim]), dim=-1)
    return both.view(num_tiles, num_heads, num_rows, -1)


OPERATIONS: Mapping[str, Callable[..., Any]] = {"context_attention": context_attention}
"""Operations by name."""
