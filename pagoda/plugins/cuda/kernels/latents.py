# SPDX-License-Identifier: Apache-2.0
"""Attention over latents: all heads attend to one key of each token, whose beginning is its value (DeepSeek-V2).

As in `attention`, contexts are cut at fixed places. A tile of latents is loaded once, for scores and for sums.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagoda.messages.segments import SEGMENT
from pagoda.plugins.cuda.kernels.attention import (
    SPLIT,
    Partials,
    Steps,
    careful_sums,
    finished,
    keys_per_tile,
    merge_partials,
    merged,
    not_finite,
    nothing_found,
)
from pagoda.plugins.cuda.kernels.numbers import (
    UNFUSED,
    as_stored,
    blocks,
    power_of_two,
    triton_dtype,
    widened,
)

_TILE_BYTES = 64
"""Bytes of the numbers of one column of a tile's queries: of 512 columns they take 32 KiB of shared memory."""
_LOG2_E = 1.4426950408889634


def rows_per_tile(products: torch.dtype) -> int:
    """Queries of a tile: heads of one token, or of several where they are few."""
    return _TILE_BYTES // products.itemsize


def tokens_per_tile(heads: int, products: torch.dtype) -> int:
    """Tokens of one tile at most, of so many heads, whose products are of this dtype."""
    return max(1, rows_per_tile(products) // heads)


@triton.jit
def _split(
    latent, rotary, cache_ptr, scales_ptr, table_ptr, begin, end, tile_last, last, block_stride, scale_stride,
    rank: tl.constexpr, rope: tl.constexpr, block_size: tl.constexpr, quantized: tl.constexpr,
    products: tl.constexpr, width: tl.constexpr, rope_width: tl.constexpr, rows: tl.constexpr,
    keys: tl.constexpr, careful: tl.constexpr,
):  # fmt: skip
    """Softmax [r] and sums [r, rank] of the cached tokens from `begin` to `end`, which are of one split."""
    columns, turned = tl.arange(0, width), tl.arange(0, rope_width)
    of_rank, of_rope = columns < rank, turned < rope
    highest = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    out = tl.zeros([rows, width], tl.float32)
    for start in tl.range(begin, end, keys, num_stages=1 if careful else None):
        at = start + tl.arange(0, keys)
        seen = at <= tile_last
        cache_block = tl.load(table_ptr + at // block_size, seen, 0).to(tl.int64)
        own = cache_ptr + (cache_block * block_stride + at % block_size * (rank + rope))[:, None]
        key = tl.load(own + columns[None, :], seen[:, None] & of_rank[None, :], 0.0)
        turn = tl.load(own + rank + turned[None, :], seen[:, None] & of_rope[None, :], 0.0)
        key, turn = widened(key, products), widened(turn, products)
        scores = tl.dot(latent, tl.trans(key), input_precision="ieee")
        scores = tl.dot(rotary, tl.trans(turn), scores, input_precision="ieee")
        if quantized:
            scales = tl.load(scales_ptr + cache_block * scale_stride + at % block_size, seen, 0.0)
            scores *= scales[None, :]
        visible = at[None, :] <= last[:, None]
        scores = tl.where(visible, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(highest - base)
        highest = new_highest
        total = total * decay + tl.sum(weights, 1)
        if quantized:
            weights = tl.where(visible, weights * scales[None, :], 0.0)
        weights, out = weights.to(products), out * decay[:, None]
        if careful:
            out = careful_sums(weights, visible, key, out, keys)
        else:
            out = tl.dot(weights, key, out, input_precision="ieee")
    return highest, total, out


@triton.jit
def _tile(
    latent_ptr, rotary_ptr, cache_ptr, scales_ptr, out_ptr, accumulated_ptr, statistics_ptr,
    positions_ptr, tiles_ptr, table_ptr, num_rows, table_stride, block_stride, scale_stride, factor,
    heads: tl.constexpr, rank: tl.constexpr, rope: tl.constexpr, block_size: tl.constexpr,
    quantized: tl.constexpr, partial: tl.constexpr, products: tl.constexpr,
    width: tl.constexpr, rope_width: tl.constexpr, rows: tl.constexpr, keys: tl.constexpr, split: tl.constexpr,
    segment: tl.constexpr, careful: tl.constexpr,
):  # fmt: skip
    """Computes a tile, as that of `attention` does."""
    tile = tl.program_id(0)
    sequence = tl.load(tiles_ptr + tile * 3).to(tl.int64)
    spoilt = sequence < -1  # false: -1 is the number of padding
    if sequence >= 0:
        in_tile: tl.constexpr = heads if heads < rows else rows
        row, columns, turned = tl.arange(0, rows), tl.arange(0, width), tl.arange(0, rope_width)
        token, head = row // in_tile, tl.program_id(1) * rows + row % in_tile
        there = (token < tl.load(tiles_ptr + tile * 3 + 2)) & (head < heads)
        token = tl.load(tiles_ptr + tile * 3 + 1).to(tl.int64) + token
        of_rank, of_rope = columns < rank, turned < rope
        places = (token * heads + head)[:, None] * rank + columns[None, :]
        loaded = there[:, None] & of_rank[None, :]
        latent = (tl.load(latent_ptr + places, loaded, 0.0) * factor).to(products)
        rotary_places = (token * heads + head)[:, None] * rope + turned[None, :]
        rotary = tl.load(rotary_ptr + rotary_places, there[:, None] & of_rope[None, :], 0.0)
        rotary = (rotary * factor).to(products)
        last = tl.load(positions_ptr + token, there, -1)
        tile_last = tl.max(last)
        seen_by_all = tl.min(tl.where(there, last, tile_last))
        table_ptr += sequence * table_stride

        whole_highest, whole_total, whole_out = nothing_found(rows, width)
        highest, total, out = nothing_found(rows, width)
        for part in range(tl.program_id(2), tile_last // split + 1, tl.num_programs(2)):
            begin, end = part * split, tl.minimum(part * split + split, tile_last + 1)
            own_highest, own_total, own_out = _split(
                latent, rotary, cache_ptr, scales_ptr, table_ptr, begin, end, tile_last, last,
                block_stride, scale_stride, rank, rope, block_size, quantized, products,
                width, rope_width, rows, keys, careful,
            )  # fmt: skip
            if not (careful or quantized):  # noqa: SIM102 - the second condition is of the device
                if seen_by_all < end - 1:
                    spoilt |= not_finite(own_out)
            if partial:
                place = (part * num_rows + token) * heads + head
                tl.store(statistics_ptr + place * 2, own_highest, there)
                tl.store(statistics_ptr + place * 2 + 1, own_total, there)
                tl.store(
                    accumulated_ptr + place[:, None] * rank + columns[None, :], own_out, loaded
                )
            else:
                highest, total, out = merged(highest, total, out, own_highest, own_total, own_out)
                if (part + 1) % (segment // split) == 0:
                    whole_highest, whole_total, whole_out = merged(
                        whole_highest, whole_total, whole_out, highest, total, out
                    )
                    highest, total, out = nothing_found(rows, width)
        if not partial:
            highest, total, out = merged(whole_highest, whole_total, whole_out, highest, total, out)
            nothing = tl.full([rows], float("-inf"), tl.float32)
            tl.store(out_ptr + places, finished(highest, total, out, nothing), loaded)
    return spoilt


@triton.jit
def _attend_latents(
    latent_ptr, rotary_ptr, cache_ptr, scales_ptr, out_ptr, accumulated_ptr, statistics_ptr,
    positions_ptr, tiles_ptr, table_ptr, num_rows, table_stride, block_stride, scale_stride, factor,
    heads: tl.constexpr, rank: tl.constexpr, rope: tl.constexpr, block_size: tl.constexpr,
    quantized: tl.constexpr, partial: tl.constexpr, products: tl.constexpr,
    width: tl.constexpr, rope_width: tl.constexpr, rows: tl.constexpr, keys: tl.constexpr, split: tl.constexpr,
    segment: tl.constexpr,
):  # fmt: skip
    if _tile(
        latent_ptr, rotary_ptr, cache_ptr, scales_ptr, out_ptr, accumulated_ptr, statistics_ptr, positions_ptr,
        tiles_ptr, table_ptr, num_rows, table_stride, block_stride, scale_stride, factor, heads, rank, rope,
        block_size, quantized, partial, products, width, rope_width, rows, keys, split, segment, careful=False,
    ):  # fmt: skip
        _tile(
            latent_ptr, rotary_ptr, cache_ptr, scales_ptr, out_ptr, accumulated_ptr, statistics_ptr,
            positions_ptr, tiles_ptr, table_ptr, num_rows, table_stride, block_stride, scale_stride, factor,
            heads, rank, rope, block_size, quantized, partial, products, width, rope_width, rows, keys, split,
            segment, careful=True,
        )  # fmt: skip


def latent_attention(
    latent_queries: Tensor,
    rotary_queries: Tensor,
    cache: Tensor,
    steps: Steps,
    out: Tensor,
    *,
    rank: int,
    scale: float,
    scales: Tensor | None = None,
    products: torch.dtype = torch.bfloat16,
    partials: Partials | None = None,
    split_programs: int = 16,
    segment: int = SEGMENT,
) -> None:
    """Causal attention of queries [n, heads rank] and [n, heads rope_dim] over latents: `out` [n, heads rank].

    The cache is [num_blocks, 1, block_size, rank + rope_dim], int8 with scales [num_blocks, 1, block_size]. Tiles
    are of this module's `tokens_per_tile(heads, products)`, `partials` of value_dim `rank`. See
    `attention.attention` and `latent_layers.latent_attention`.
    """
    if not len(out) or not len(steps.tiles):
        return
    cache = as_stored(cache)
    heads, rope, block_size = out.shape[1] // rank, cache.shape[3] - rank, cache.shape[2]
    width, rows = power_of_two(16, rank), rows_per_tile(products)
    scratch = (None, None) if partials is None else (partials.accumulated, partials.statistics)
    programs = 1 if partials is None else min(split_programs, len(partials.statistics))
    _attend_latents[(len(steps.tiles), blocks(heads, rows), programs)](
        latent_queries, rotary_queries, cache, scales, out, *scratch,
        steps.positions, steps.tiles, steps.block_tables, len(out), steps.block_tables.stride(0),
        cache.stride(0), 0 if scales is None else scales.stride(0), scale * _LOG2_E,
        heads=heads, rank=rank, rope=rope, block_size=block_size, quantized=scales is not None,
        partial=partials is not None, products=triton_dtype(products), width=width,
        rope_width=power_of_two(16, rope), rows=rows,
        keys=keys_per_tile(width, max(cache.itemsize, products.itemsize)), split=SPLIT, segment=segment,
        num_warps=4 if width <= 128 else 8, num_stages=2, **UNFUSED,
    )  # fmt: skip
    if partials is not None:
        merge_partials(partials, steps, out, heads=heads, segment=segment)
