# SPDX-License-Identifier: Apache-2.0
"""Attention in plain PyTorch: tiles of queries by tiles of cached tokens at fixed absolute positions.

The softmax is carried on from tile to tile of a segment (FlashAttention, Dao et al. 2022), and segments are merged
in order. A step only changes how many tiles there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backend.base import ColdContexts, KVCache, LatentCache, TokenBatch
from pagoda.backend.host import position_scale, rotary_table
from pagoda.backend.reference.kept import write_kv
from pagoda.backend.reference.rows import rms_norm, rotated
from pagoda.backend.reference.scores import Scores
from pagoda.backend.reference.tiles import ROWS

KEYS = 128
"""Cached tokens of one attention tile; every block size is a multiple of it, or divides it."""
TILES_PER_PASS = 8
"""Query tiles whose K and V are gathered at once, so that they stay in the processor's cache."""
LEAST_COLUMNS = 16
"""Columns of a product in which the sums of a row do not depend on its place; with 6 or 10 they do."""


@dataclass(frozen=True)
class _Pass:
    """Some query tiles of a step, those with the most key tiles first."""

    tiles: slice
    positions: Tensor
    """[tiles, rows], of the last token that the query in each row sees; -1 in rows without one."""
    first_positions: Tensor
    """[tiles]."""
    cold_lens: Tensor
    """[tiles], cached tokens that are in cold segments, over which tiles attend before all others."""
    last_positions: Tensor
    """[tiles]."""
    num_active: list[int]
    """Number of query tiles that reach each key tile."""
    kv_rows: list[Tensor]
    """Rows of each key tile's blocks, for the query tiles that reach it; see `kv_rows`."""


class Softmax(NamedTuple):
    """A softmax of query tiles, and what it weighs, which is not finished."""

    highest: Tensor
    """[tiles * kv_heads, rows, 1], scores; -inf where there is none yet."""
    total: Tensor
    """[tiles * kv_heads, rows, 1], of weights."""
    out: Tensor
    """[tiles * kv_heads, rows, d], weighted values."""

    @classmethod
    def empty(cls, num_matrices: int, rows: int, width: int) -> Softmax:
        highest = torch.full((num_matrices, rows, 1), -torch.inf)
        return cls(highest, torch.zeros_like(highest), torch.zeros((num_matrices, rows, width)))

    def of(self, matrices: slice | Tensor) -> Softmax:
        return Softmax(*(part[matrices] for part in self))

    def merge(self, matrices: slice | Tensor, later: Softmax) -> None:
        """Takes what some rows have found in the next segment into what they have."""
        own = self.of(matrices)
        highest = torch.maximum(own.highest, later.highest)
        base = highest.masked_fill(highest == -torch.inf, 0)
        old, new = torch.exp(own.highest - base), torch.exp(later.highest - base)
        self.highest[matrices] = highest
        self.total[matrices] = own.total * old + later.total * new
        self.out[matrices] = own.out * old + later.out * new


class Tiles(NamedTuple):
    """The query tiles of a step."""

    positions: Tensor
    """[tiles, rows], of the last token that the query in each row sees; -1 in rows without one."""
    last_positions: Tensor
    """[tiles]."""
    tables: Tensor
    """[tiles, b], block tables."""
    first_tokens: Tensor
    """[tiles], the first token of each tile's sequence in the step."""


@dataclass(frozen=True)
class _Cold:
    """Cold segments of a step, and the query tiles that attend over them."""

    contexts: ColdContexts
    tiles: list[Tensor]
    """Query tiles of each sequence."""

    def segments(self) -> Iterator[tuple[int, int, Tensor]]:
        """Number, number in its sequence, and query tiles of each segment."""
        counts = self.contexts.counts
        own = ((i, number) for i, count in enumerate(counts) for number in range(count))
        return ((index, number, self.tiles[i]) for index, (i, number) in enumerate(own))


@dataclass(frozen=True)
class AttentionMetadata:
    block_ids: Tensor
    """[n], the cache block of each token."""
    offsets: Tensor
    """[n], the place of each token in its block."""
    rows: Tensor
    """[n * heads], the row of each token's head in the flattened query tiles [tiles, kv_heads, rows]."""
    num_tiles: int
    rows_per_tile: int
    passes: list[_Pass]
    segment: int
    """Tokens of a segment; a multiple of `KEYS`."""
    cold: _Cold | None
    tiles: Tiles
    first_blocks: Tensor
    """[n], the first cache block of each token's sequence."""
    block_table: Tensor
    """[s, b]."""
    query_lens: list[int]
    """Tokens of each sequence in the step, `context_lens` those with the ones before."""
    context_lens: list[int]
    both_ways: Callable[[int | None], AttentionMetadata]
    """The step as attention sees it that is not causal, with a window or without."""


def plan_attention(
    batch: TokenBatch,
    num_heads: int,
    cache: KVCache,
    group: int = 0,
    *,
    causal: bool = True,
    window: int | None = None,
) -> AttentionMetadata:
    """Cuts every sequence's new tokens into tiles: the queries of a few tokens that share one K/V head.

    `window` is that of attention which is not causal: tokens see positions that may lie behind their sequences.
    """
    _, num_kv_heads, block_size, _ = cache.keys.shape
    queries_per_key = num_heads // num_kv_heads
    block_table = batch.block_tables[group]
    rows_per_tile = -(-queries_per_key // ROWS) * ROWS
    tokens_per_tile = rows_per_tile // queries_per_key

    tiles_of = (batch.query_lens + tokens_per_tile - 1) // tokens_per_tile
    num_tiles = int(tiles_of.sum())
    sequence_of_tile = torch.repeat_interleave(tiles_of)
    first_tile = tiles_of.cumsum(0) - tiles_of
    chunk_start = batch.context_lens - batch.query_lens
    order_in_sequence = torch.arange(num_tiles) - first_tile[sequence_of_tile]
    ends = batch.context_lens[sequence_of_tile]
    seen_to = batch.context_lens[batch.sequence_ids] - 1
    if window is not None:
        seen_to = batch.positions + window - 1
    if causal:
        seen_to = batch.positions
        ends = ends.minimum(
            chunk_start[sequence_of_tile] + (order_in_sequence + 1) * tokens_per_tile
        )
    last_positions = ends - 1

    # Tiles with long contexts come first, so that those which reach a key tile are always the first few.
    last_positions, by_length = last_positions.sort(descending=True, stable=True)
    place_of_tile = torch.empty_like(by_length)
    place_of_tile[by_length] = torch.arange(num_tiles)

    index_in_chunk = batch.positions - chunk_start[batch.sequence_ids]
    tile = place_of_tile[first_tile[batch.sequence_ids] + index_in_chunk // tokens_per_tile]
    row = (index_in_chunk % tokens_per_tile)[:, None] * queries_per_key + torch.arange(
        queries_per_key
    )
    positions = torch.full((num_tiles, rows_per_tile), -1)
    positions[tile[:, None], row] = seen_to[:, None].expand_as(row)
    kv_head = torch.arange(num_kv_heads)[:, None]
    rows = (tile[:, None, None] * num_kv_heads + kv_head) * rows_per_tile + row[:, None, :]

    sequence_of_tile = sequence_of_tile[by_length]
    cold = batch.cold.get(group)
    cold_lens = torch.zeros(num_tiles, dtype=torch.int64)
    cold_tiles = None
    if cold is not None:
        _check_cold(cold.counts, batch)
        cold_lens = torch.tensor(cold.counts)[sequence_of_tile] * batch.segment
        sequences = range(len(cold.counts))
        cold_tiles = _Cold(cold, [(sequence_of_tile == i).nonzero()[:, 0] for i in sequences])
    tables = block_table[sequence_of_tile]
    rows_of_tables = kv_rows(tables, num_kv_heads, block_size)
    block_index = batch.positions // block_size
    return AttentionMetadata(
        block_ids=block_table[batch.sequence_ids, block_index],
        offsets=batch.positions % block_size,
        rows=rows.flatten(),
        num_tiles=num_tiles,
        rows_per_tile=rows_per_tile,
        passes=[
            _plan_pass(
                slice(start, start + TILES_PER_PASS),
                positions,
                cold_lens,
                last_positions,
                rows_of_tables,
            )
            for start in range(0, num_tiles, TILES_PER_PASS)
        ],
        segment=batch.segment,
        cold=cold_tiles,
        tiles=Tiles(
            positions,
            last_positions,
            tables,
            (batch.query_lens.cumsum(0) - batch.query_lens)[sequence_of_tile],
        ),
        first_blocks=block_table[batch.sequence_ids, 0],
        block_table=block_table,
        query_lens=batch.query_lens.tolist(),
        context_lens=batch.context_lens.tolist(),
        both_ways=lru_cache(
            lambda window: plan_attention(
                batch, num_heads, cache, group, causal=False, window=window
            )
        ),
    )


def _check_cold(counts: Sequence[int], batch: TokenBatch) -> None:
    """Raises ValueError: queries are among the tokens of cold segments."""
    lens = zip(counts, batch.query_lens.tolist(), batch.context_lens.tolist(), strict=True)
    for count, query_len, context_len in lens:
        if count * batch.segment > context_len - query_len:
            raise ValueError(
                f"{query_len} tokens of a context of {context_len} are in {count} cold segments of "
                f"{batch.segment}."
            )


def rotate_and_cache(
    qkv: Tensor,
    metadata: AttentionMetadata,
    *rest: Any,
    head_dim: int,
    eps: float,
    norms_all_heads: bool,
) -> Tensor:
    split = next(i for i, each in enumerate(rest) if isinstance(each, KVCache))
    table, (cache, *norms) = rest[:split], rest[split:]
    num_kv_heads = cache.keys.shape[1]
    width = num_kv_heads * head_dim
    parts = list(torch.split(qkv, [qkv.shape[1] - 2 * width, width, width], dim=1))
    for place, norm in enumerate(norms):
        size = parts[place].shape[1] if norms_all_heads else head_dim
        heads = parts[place].view(len(qkv), -1, size)
        parts[place] = rms_norm(heads, norm, eps=eps).flatten(1)
    q, k, v = (part.view(len(qkv), -1, head_dim) for part in parts)
    if table:
        q, k = rotated(q, table), rotated(k, table)
    write_kv(cache, k, v, metadata)
    return q.flatten(1)


def attention(
    queries: Tensor,
    metadata: AttentionMetadata,
    cache: KVCache,
    sinks: Tensor | None = None,
    *,
    head_dim: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    chunk: int | None,
    causal: bool,
    slopes: Tensor | None = None,
    distances: Tensor | None = None,
) -> Tensor:
    if not causal:
        metadata = metadata.both_ways(window)
        window = None if window is None else 2 * window - 1
    num_kv_heads = cache.keys.shape[1]
    tiles = query_tiles(queries, metadata, num_kv_heads, head_dim, scale)
    of_rows = torch.full(tiles.shape[:3], -torch.inf)
    if sinks is not None:
        of_rows.view(-1).index_copy_(0, metadata.rows, sinks.repeat(len(queries)))
    of_scores = Scores(softcap)
    if slopes is not None:
        of_scores = Scores(softcap, slopes_of_rows(slopes, tiles, metadata), distances)
    found = None
    if metadata.cold is not None:
        found = _attend_cold(tiles, cache, metadata, metadata.cold, of_scores)
    for part in metadata.passes:
        own = of_rows[part.tiles] if sinks is not None else None
        before = None
        if found is not None:
            first, end = part.tiles.start * num_kv_heads, part.tiles.stop * num_kv_heads
            before = found.of(slice(first, end))
        tiles[part.tiles] = _attend(
            tiles[part.tiles],
            cache,
            part,
            (window, chunk),
            metadata.segment,
            of_scores.of_tiles(part.tiles),
            own,
            before,
        )
    out = tiles.view(-1, head_dim).index_select(0, metadata.rows)
    return out.view_as(queries)


def slopes_of_rows(slopes: Tensor, tiles: Tensor, metadata: AttentionMetadata) -> Tensor:
    """Slopes [heads] in the rows of query tiles: [tiles, kv_heads, rows]."""
    of_rows = torch.zeros(tiles.shape[:3])
    count = len(metadata.rows) // len(slopes)
    of_rows.view(-1).index_copy_(0, metadata.rows, slopes.repeat(count))
    return of_rows


def query_tiles(
    queries: Tensor, metadata: AttentionMetadata, num_kv_heads: int, head_dim: int, scale: float
) -> Tensor:
    """Queries [n, heads d], scaled, in the tiles of a step: [tiles, kv_heads, rows, d] float32."""
    shape = (metadata.num_tiles, num_kv_heads, metadata.rows_per_tile, head_dim)
    tiles = torch.zeros(shape, dtype=torch.float32)
    scaled = queries.reshape(-1, head_dim) * scale
    tiles.view(-1, head_dim).index_copy_(0, metadata.rows, scaled)
    return tiles


def _plan_pass(
    tiles: slice, positions: Tensor, cold_lens: Tensor, last_positions: Tensor, kv_rows: Tensor
) -> _Pass:
    last = last_positions[tiles]
    num_key_tiles = last // KEYS + 1
    reached = num_key_tiles[:, None] > torch.arange(int(num_key_tiles[0]))
    num_active = reached.sum(0).tolist()
    return _Pass(
        tiles=tiles,
        positions=positions[tiles],
        first_positions=positions[tiles, 0],
        cold_lens=cold_lens[tiles],
        last_positions=last,
        num_active=num_active,
        kv_rows=[kv_rows[tiles][:n, i].flatten() for i, n in enumerate(num_active)],
    )


def kv_rows(tables: Tensor, num_kv_heads: int, block_size: int) -> Tensor:
    """Rows of each key tile's blocks in a cache flattened to [num_blocks * kv_heads, ...], or of its tiles.

    Returns [tiles, key_tiles, kv_heads, blocks_per_tile].
    """
    heads = torch.arange(num_kv_heads)[:, None]
    if block_size > KEYS:  # a block is several tiles, which follow one another in each head
        tiles = block_size // KEYS
        rows = (tables[:, :, None, None, None] * num_kv_heads + heads) * tiles
        return (rows + torch.arange(tiles)[:, None, None]).flatten(1, 2)
    per_tile = KEYS // block_size
    tables = F.pad(tables, (0, -tables.shape[1] % per_tile))
    blocks = tables.view(len(tables), tables.shape[1] // per_tile, 1, per_tile)
    return blocks * num_kv_heads + heads


def _attend_cold(
    tiles: Tensor, cache: KVCache, metadata: AttentionMetadata, cold: _Cold, of_scores: Scores
) -> Softmax:
    """Softmax of query tiles [tiles, kv_heads, rows, d] over cold segments, of which they see everything."""
    num_tiles, num_heads, num_rows, head_dim = tiles.shape
    width = max(LEAST_COLUMNS, head_dim)
    whole = Softmax.empty(num_tiles * num_heads, num_rows, width)
    place = cache.values.data_ptr()
    for index, number, own in cold.segments():
        staged = cold.contexts.source.take(place, index)
        table = torch.tensor(staged.block_ids)[None].expand(len(own), -1)
        memory = _in_order(staged.cache)
        rows = kv_rows(table, num_heads, memory.keys.shape[2])
        queries = tiles[own].flatten(0, 1)
        found = Softmax.empty(len(queries), num_rows, width)
        for tile in range(metadata.segment // KEYS):
            keys, values = (
                _gather(held, scales, rows[:, tile].flatten())
                for held, scales in (
                    (memory.keys, memory.key_scales),
                    (memory.values, memory.value_scales),
                )
            )
            first = number * metadata.segment + tile * KEYS
            places = metadata.tiles.positions[own], torch.arange(first, first + KEYS)[None]
            scores = _scores(queries, keys, of_scores.of_tiles(own), *places)
            _add_tile(found, slice(0, len(queries)), scores, values)
        matrices = (own[:, None] * num_heads + torch.arange(num_heads)).flatten()
        whole.merge(matrices, found)
    cold.contexts.source.release(place)
    return whole


def _in_order(cache: KVCache | LatentCache) -> KVCache:
    """The cache with blocks one after the other."""
    if isinstance(cache, LatentCache):
        latents, scales = cache.latents, cache.latent_scales
        cache = KVCache(latents, latents, scales, scales)
    scaled = cache.key_scales, cache.value_scales
    return KVCache(
        cache.keys.contiguous(),
        cache.values.contiguous(),
        *(None if scales is None else scales.contiguous() for scales in scaled),
    )


def _attend(
    queries: Tensor,
    cache: KVCache,
    part: _Pass,
    reach: tuple[int | None, int | None],
    segment: int,
    of_scores: Scores,
    sinks: Tensor | None,
    before: Softmax | None,
) -> Tensor:
    """Attention of query tiles [tiles, kv_heads, rows, d], already scaled, in float32; sinks are of every row.

    `before` is what they have found in cold segments.
    """
    num_heads = queries.shape[1]
    queries = queries.flatten(0, 1)
    head_dim = queries.shape[-1]
    size = (*queries.shape[:2], max(LEAST_COLUMNS, head_dim))
    whole, found = before or Softmax.empty(*size), Softmax.empty(*size)
    tiles = list(enumerate(zip(part.num_active, part.kv_rows, strict=True)))
    first_cold = int(part.cold_lens.min()) // KEYS
    for index, (active, rows) in tiles[first_cold:]:
        going_on = part.num_active[index + 1] if index + 1 < len(part.num_active) else 0
        attend_keys(
            queries[: active * num_heads],
            cache,
            rows,
            torch.arange(index * KEYS, (index + 1) * KEYS)[None],
            part.positions[:active],
            part.cold_lens[:active],
            part.last_positions[going_on:active],
            reach,
            of_scores,
            found,
        )
        if (index + 1) * KEYS % segment == 0 and index + 1 < len(tiles):
            whole.merge(slice(None), found)
            found = Softmax.empty(*size)
    if len(tiles) * KEYS > segment or before is not None:
        whole.merge(slice(None), found)
        found = whole
    total = found.total
    if sinks is not None:
        # A sink far above all scores makes the total infinite, and the result 0.
        total = total + torch.exp(sinks.flatten(0, 1)[..., None] - found.highest.clamp(min=-3e38))
    # The highest score adds exactly 1 to the total, so only rows without a query have less.
    return _by_head(found.out[..., :head_dim] / total.clamp(min=1), num_heads)


def attend_keys(
    queries: Tensor,
    cache: KVCache,
    rows: Tensor,
    key_positions: Tensor,
    positions: Tensor,
    cold_lens: Tensor,
    ended: Tensor,
    reach: tuple[int | None, int | None],
    of_scores: Scores,
    found: Softmax,
) -> None:
    """Takes a key tile of each query tile [tiles * kv_heads, rows, d] into the softmax of the first of them.

    `rows` are those of the key tiles' blocks, `key_positions` [tiles or 1, KEYS] of what they hold, `positions`
    [tiles, rows] of the last that queries see, `cold_lens` [tiles] of the first that is not in cold segments. The
    last query tiles go no further: they end at positions `ended` [m].
    """
    num_tiles, num_heads = len(positions), cache.keys.shape[1]
    key_positions = key_positions.expand(num_tiles, -1)
    keys = _gather(cache.keys, cache.key_scales, rows)
    values = _gather(cache.values, cache.value_scales, rows)
    going_on = num_tiles - len(ended)
    unwritten = key_positions[going_on:] > ended[:, None]
    _by_head(values[going_on * num_heads :], num_heads).masked_fill_(
        unwritten[:, None, :, None], 0
    )  # a weight of zero does not take away what an ended request left there if that is NaN
    if reach != (None, None) or cold_lens.any():
        # Nor what others wrote to blocks that were given back.
        first = _first_seen(positions[:, 0], reach).maximum(cold_lens)
        behind = key_positions < first[:, None]
        _by_head(values, num_heads).masked_fill_(behind[:, None, :, None], 0)
    scores = _scores(queries, keys, of_scores, positions, key_positions)
    hidden = _hidden(key_positions, positions, cold_lens, reach)
    hidden[going_on:] |= unwritten[:, None]
    _by_head(scores, num_heads).masked_fill_(hidden[:, None], -torch.inf)
    _add_tile(found, slice(0, len(queries)), scores, values)


def _scores(
    queries: Tensor, keys: Tensor, how: Scores, positions: Tensor, key_positions: Tensor
) -> Tensor:
    """Scores [tiles * kv_heads, rows, KEYS] of queries and keys, whose positions are [tiles, rows] and
    [tiles or 1, KEYS]."""
    scores = bmm(queries, keys.transpose(1, 2))
    if how.softcap is not None:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    if how.slopes is not None:
        of_rows = how.slopes[: len(positions), ..., None]
        behind = key_positions[:, None, None] - positions[:, None, :, None]
        _by_head(scores, of_rows.shape[1]).add_(how.added(of_rows, behind))
    return scores


def _add_tile(found: Softmax, now: slice, scores: Tensor, values: Tensor) -> None:
    """Takes a tile of keys into a softmax of the first matrices; scores are used up."""
    highest, total, out = found.of(now)
    new_highest = torch.maximum(highest, scores.amax(-1, keepdim=True))
    base = new_highest.masked_fill(new_highest == -torch.inf, 0)
    weights = scores.sub_(base).exp_()
    decay = torch.exp(highest - base)
    spare = out.shape[-1] - values.shape[-1]
    found.highest[now] = new_highest
    found.total[now] = total * decay + weights.sum(-1, keepdim=True)
    found.out[now] = out * decay + bmm(weights, _widened(values, spare))


def _hidden(
    key_positions: Tensor,
    positions: Tensor,
    cold_lens: Tensor,
    reach: tuple[int | None, int | None],
) -> Tensor:
    """[tiles, rows, keys], which keys a query does not see, or has seen in cold segments."""
    positions = positions[:, :, None]
    first = _first_seen(positions, reach).maximum(cold_lens[:, None, None])
    key_positions = key_positions[:, None]
    return (key_positions > positions) | (key_positions < first)


def _first_seen(positions: Tensor, reach: tuple[int | None, int | None]) -> Tensor:
    """The first cached tokens that queries at these positions see, by window and chunk."""
    window, chunk = reach
    first = torch.zeros_like(positions)
    if window is not None:
        first = first.maximum(positions - window + 1)
    return first if chunk is None else first.maximum(positions // chunk * chunk)


def _gather(cached: Tensor, scales: Tensor | None, rows: Tensor) -> Tensor:
    """The blocks at `rows` as float32 keys or values [tiles * kv_heads, KEYS, d]."""
    _, _, block_size, head_dim = cached.shape
    size = min(KEYS, block_size)
    blocks = cached.view(-1, size, head_dim).index_select(0, rows).float()
    if scales is not None:
        blocks *= scales.view(-1, size).index_select(0, rows)[..., None]
    return blocks.view(-1, KEYS, head_dim)


def _by_head(x: Tensor, num_heads: int) -> Tensor:
    return x.view(-1, num_heads, *x.shape[1:])


def _widened(x: Tensor, num_columns: int) -> Tensor:
    """x [..., d] with further columns of zeros."""
    return F.pad(x, (0, num_columns)) if num_columns else x


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """Batched product. With at least one matrix per thread, none is ever shared out between threads."""
    count = a.shape[0]
    missing = torch.get_num_threads() - count
    if missing > 0:
        a, b = (F.pad(x, (0, 0, 0, 0, 0, missing)) for x in (a, b))
    return torch.bmm(a, b)[:count]


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (position_scale, rotary_table, rotate_and_cache, attention)
}
"""Operations by name."""
