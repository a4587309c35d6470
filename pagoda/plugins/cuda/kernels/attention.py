# SPDX-License-Identifier: Apache-2.0
"""Attention over paged keys and values, for prompts and for single tokens in one kernel.

A context is cut into splits of `SPLIT` tokens at fixed places. Each has a softmax of its own, carried on from tile
to tile of keys (FlashAttention, Dao et al. 2022). Splits are merged in their order within segments, and then
segments, whoever computed them: one program goes through all of them, or several write what they found and another
launch merges it (Flash-Decoding, Dao et al. 2023). So bits do not depend on how a sequence is cut or on what else
is in the step.

A tile multiplies what some of its rows do not see by weights of 0, and 0 times NaN is NaN. A tile with such
tokens is computed once more, with care, if sums are not finite: NaN reaches only rows that see it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagoda.messages.segments import SEGMENT
from pagoda.plugins.cuda.kernels.numbers import (
    UNFUSED,
    as_stored,
    blocks,
    hyperbolic_tangent,
    is_finite,
    power_of_two,
    triton_dtype,
    widened,
)

SPLIT = 256
"""Tokens of a context that have a softmax of their own."""
ROWS = 64
"""Queries of a tile, of some tokens and of the heads that share a key."""
_LARGEST_TILE = 16384
"""Bytes of a tile of keys: two tiles of keys and two of values fit into the 64 KiB that AMD's GPUs have."""
_WIDEST_ROW = 512
"""Bytes of a key above which tiles are not loaded ahead: GPUs as Ada's have 99 KiB of shared memory."""
_LOG2_E = 1.4426950408889634
_LOG2E = tl.constexpr(_LOG2_E)


@dataclass(frozen=True)
class Steps:
    """Places of a step's tokens; tensors lie on the device."""

    positions: Tensor
    """[n] int32, -1 in rows of padding."""
    tiles: Tensor
    """[t, 3] int32: sequence, first row and number of rows of each tile; see `plan_tiles`. A tile of sequence -1
    computes nothing."""
    context_lens: Tensor
    """[s] int32."""
    block_tables: Tensor
    """[s, b] int32."""


@dataclass(frozen=True)
class Partials:
    """Scratch of contexts that several programs share; one serves all layers in turn."""

    accumulated: Tensor
    """[splits, rows, heads, value_dim] float32."""
    statistics: Tensor
    """[splits, rows, heads, 2] float32: the highest score of a split, and the sum of weights against it."""

    @classmethod
    def new(
        cls, rows: int, heads: int, value_dim: int, max_context: int, device: torch.device
    ) -> Partials:
        """Scratch of steps of up to `rows` tokens whose contexts are at most `max_context`."""
        shape = (blocks(max_context, SPLIT), rows, heads)
        return cls(
            torch.empty((*shape, value_dim), dtype=torch.float32, device=device),
            torch.empty((*shape, 2), dtype=torch.float32, device=device),
        )


def tokens_per_tile(queries_per_key: int) -> int:
    """Tokens of one tile at most, of heads of which so many share a key."""
    return max(1, ROWS // queries_per_key)


def keys_per_tile(width: int, itemsize: int) -> int:
    """Cached tokens of a tile, of keys of so many elements; a power of two that divides `SPLIT`."""
    return max(16, min(64, _LARGEST_TILE // (width * itemsize)))


def stages_of(width: int, itemsize: int) -> int:
    """Tiles of keys of so many elements that are loaded ahead, with queries beside them in shared memory."""
    return 2 if width * itemsize <= _WIDEST_ROW else 1


def plan_tiles(query_lens: Tensor, per_tile: int) -> Tensor:
    """Tiles [t, 3] int32 of sequences with `query_lens` [s] tokens each, in host memory."""
    counts = (query_lens + per_tile - 1) // per_tile
    sequences = torch.repeat_interleave(counts)
    places = torch.arange(len(sequences)) - (counts.cumsum(0) - counts)[sequences]
    firsts = (query_lens.cumsum(0) - query_lens)[sequences]
    rest = query_lens[sequences] - places * per_tile
    columns = (sequences, firsts + places * per_tile, rest.clamp(max=per_tile))
    return torch.stack(columns, dim=1).int()


@triton.jit
def first_seen(positions, window: tl.constexpr, chunk: tl.constexpr):
    """First cached tokens that queries at these positions see; 0 stands for no window and no chunk."""
    first = positions * 0
    if window > 0:
        first = tl.maximum(first, positions - (window - 1))
    if chunk > 0:
        first = tl.maximum(first, positions // chunk * chunk)
    return first


@triton.jit
def merged(highest, total, out, other_highest, other_total, other_out):
    """Softmax [r] and sums [r, d] of two parts of a context, of which the other one is behind the first."""
    new = tl.maximum(highest, other_highest)
    base = tl.where(new == float("-inf"), 0.0, new)
    own, others = tl.exp2(highest - base), tl.exp2(other_highest - base)
    total = total * own + other_total * others
    out = out * own[:, None] + other_out * others[:, None]
    return new, total, out


@triton.jit
def nothing_found(rows: tl.constexpr, width: tl.constexpr):
    """Softmax [r] and sums [r, d] of no tokens; merging them changes no bit."""
    highest = tl.full([rows], float("-inf"), tl.float32)
    return highest, tl.zeros([rows], tl.float32), tl.zeros([rows, width], tl.float32)


@triton.jit
def finished(highest, total, out, sinks):
    """Attention [r, d] of sums and softmax; sinks [r], in powers of two, are one more score."""
    total += tl.exp2(sinks - tl.maximum(highest, -3.0e38))
    # The highest score adds exactly 1 to the total, so only rows without a query have less.
    return out / tl.where(total < 1.0, 1.0, total)[:, None]


@triton.jit
def not_finite(x):
    """True if a number of x [r, d] is not finite."""
    return tl.max(tl.where(is_finite(x), 0, 1)) > 0


@triton.jit
def careful_sums(weights, visible, value, out, keys: tl.constexpr):
    """Sums out [r, d], and weights [r, k] times values [k, d] of which a row gets what is visible [r, k] to it.

    Where all values are finite, they are what the product has, in every bit.
    """
    out = tl.dot(weights, tl.where(is_finite(value), value, 0.0), out, input_precision="ieee")
    place = tl.arange(0, keys)
    for key in range(keys):
        weight = tl.sum(tl.where(place[None, :] == key, weights.to(tl.float32), 0.0), 1)
        own = tl.sum(tl.where(place[:, None] == key, value.to(tl.float32), 0.0), 0)
        sees = tl.sum(tl.where((place[None, :] == key) & visible, 1, 0), 1) > 0
        more = out + weight[:, None] * own[None, :]
        out = tl.where(sees[:, None] & (is_finite(own) == 0)[None, :], more, out)
    return out


@triton.jit
def _add_keys(
    highest, total, out, key_start, queries, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, table_ptr,
    kv_head, tile_first, tile_last, first, last,
    key_block_stride, value_block_stride, scale_block_stride, scale_head_stride, cap,
    dim: tl.constexpr, block_size: tl.constexpr, capped: tl.constexpr, quantized: tl.constexpr,
    products: tl.constexpr, width: tl.constexpr, keys: tl.constexpr, hides: tl.constexpr, careful: tl.constexpr,
):  # fmt: skip
    """Adds a tile of keys to a softmax [r] and sums [r, d]; unless it `hides` some, each row sees all of them."""
    columns = tl.arange(0, width)
    at = key_start + tl.arange(0, keys)
    key_there = (columns < dim)[:, None]
    value_there = (columns < dim)[None, :]
    if hides:
        # What is not seen may be anything, and zero times NaN is NaN.
        seen = (at >= tile_first) & (at <= tile_last)
        cache_block = tl.load(table_ptr + at // block_size, seen, 0).to(tl.int64)
        key_there &= seen[None, :]
        value_there &= seen[:, None]
    else:
        cache_block = tl.load(table_ptr + at // block_size).to(tl.int64)
    offset = at % block_size
    key_places = (cache_block * key_block_stride + offset * dim)[None, :] + columns[:, None]
    value_places = (cache_block * value_block_stride + offset * dim)[:, None] + columns[None, :]
    if hides or dim != width:
        key = tl.load(keys_ptr + key_places, key_there, 0.0)
        value = tl.load(values_ptr + value_places, value_there, 0.0)
    else:
        key = tl.load(keys_ptr + key_places)
        value = tl.load(values_ptr + value_places)
    scores = tl.dot(queries, widened(key, products), input_precision="ieee")
    if quantized:
        scale_places = cache_block * scale_block_stride + kv_head * scale_head_stride + offset
        scales = tl.load(value_scales_ptr + scale_places, at <= tile_last, 0.0)
        scores *= tl.load(key_scales_ptr + scale_places, at <= tile_last, 0.0)[None, :]
    if capped:
        scores = cap * hyperbolic_tangent(scores / cap) * _LOG2E
    visible = (at[None, :] <= last[:, None]) & (at[None, :] >= first[:, None])
    if hides:
        scores = tl.where(visible, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(highest - base)
    total = total * decay + tl.sum(weights, 1)
    if quantized:
        weights *= scales[None, :]
        if hides:
            weights = tl.where(visible, weights, 0.0)
    weights, value = weights.to(products), widened(value, products)
    out = out * decay[:, None]
    if careful:
        out = careful_sums(weights, visible, value, out, keys)
    else:
        out = tl.dot(weights, value, out, input_precision="ieee")
    return new_highest, total, out


@triton.jit
def _split(
    queries, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, table_ptr, kv_head,
    begin, clear, end, tile_first, tile_last, first, last,
    key_block_stride, value_block_stride, scale_block_stride, scale_head_stride, cap,
    dim: tl.constexpr, block_size: tl.constexpr, capped: tl.constexpr, quantized: tl.constexpr,
    products: tl.constexpr, width: tl.constexpr, rows: tl.constexpr, keys: tl.constexpr, careful: tl.constexpr,
):  # fmt: skip
    """Softmax [r] and sums [r, d] of the cached tokens from `begin` to `end`, which are of one split.

    All rows see those in front of `clear`.
    """
    highest, total, out = nothing_found(rows, width)
    if not careful:
        for start in range(begin, clear, keys):
            highest, total, out = _add_keys(
                highest, total, out, start, queries, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr,
                table_ptr, kv_head, tile_first, tile_last, first, last,
                key_block_stride, value_block_stride, scale_block_stride, scale_head_stride, cap,
                dim, block_size, capped, quantized, products, width, keys, hides=False, careful=False,
            )  # fmt: skip
    for start in tl.range(clear, end, keys, num_stages=1 if careful else None):
        highest, total, out = _add_keys(
            highest, total, out, start, queries, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, table_ptr,
            kv_head, tile_first, tile_last, first, last,
            key_block_stride, value_block_stride, scale_block_stride, scale_head_stride, cap,
            dim, block_size, capped, quantized, products, width, keys, hides=True, careful=careful,
        )  # fmt: skip
    return highest, total, out


@triton.jit
def _tile(
    queries_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, sinks_ptr, out_ptr,
    accumulated_ptr, statistics_ptr, positions_ptr, tiles_ptr, lens_ptr, table_ptr,
    num_rows, table_stride, key_block_stride, key_head_stride, value_block_stride, value_head_stride,
    scale_block_stride, scale_head_stride, factor, cap,
    heads: tl.constexpr, per_key: tl.constexpr, dim: tl.constexpr, block_size: tl.constexpr,
    window: tl.constexpr, chunk: tl.constexpr, capped: tl.constexpr, causal: tl.constexpr,
    quantized: tl.constexpr, has_sinks: tl.constexpr, partial: tl.constexpr, products: tl.constexpr,
    width: tl.constexpr, rows: tl.constexpr, keys: tl.constexpr, split: tl.constexpr, segment: tl.constexpr,
    careful: tl.constexpr,
):  # fmt: skip
    """Computes a tile. Returns True if it may have numbers that rows got of tokens which they do not see."""
    tile, head_group = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tiles_ptr + tile * 3).to(tl.int64)
    spoilt = sequence < -1  # false: -1 is the number of padding
    if sequence >= 0:
        groups: tl.constexpr = (per_key + rows - 1) // rows
        in_tile: tl.constexpr = per_key if per_key < rows else rows
        kv_head = (head_group // groups).to(tl.int64)
        row, columns = tl.arange(0, rows), tl.arange(0, width)
        token, own_head = row // in_tile, head_group % groups * rows + row % in_tile
        there = (token < tl.load(tiles_ptr + tile * 3 + 2)) & (own_head < per_key)
        token = tl.load(tiles_ptr + tile * 3 + 1).to(tl.int64) + token
        head = kv_head * per_key + own_head
        places = (token * heads + head)[:, None] * dim + columns[None, :]
        loaded = there[:, None] & (columns < dim)[None, :]
        queries = (tl.load(queries_ptr + places, loaded, 0.0) * factor).to(products)

        positions = tl.load(positions_ptr + token, there, 0)
        last = positions
        if not causal:
            last = positions * 0 + tl.load(lens_ptr + sequence) - 1
            if window > 0:
                last = tl.minimum(last, positions + (window - 1))
        last = tl.where(there, last, -1)
        first = first_seen(positions, window, chunk)
        tile_last = tl.max(last)
        tile_first = tl.min(tl.where(there, first, tile_last))
        table_ptr += sequence * table_stride
        keys_ptr += kv_head * key_head_stride
        values_ptr += kv_head * value_head_stride

        whole_highest, whole_total, whole_out = nothing_found(rows, width)
        highest, total, out = nothing_found(rows, width)
        start = tile_first // split + tl.program_id(2)
        seen_by_all = tl.min(tl.where(there, last, tile_last))
        hidden_from_some = tl.max(tl.where(there, first, tile_first))
        for part in range(start, tile_last // split + 1, tl.num_programs(2)):
            begin = tl.maximum(part * split, tile_first // keys * keys)
            end = tl.minimum(part * split + split, tile_last + 1)
            clear = begin
            if not (careful or window > 0 or chunk > 0):
                clear = tl.maximum(begin, tl.minimum(end, (seen_by_all + 1) // keys * keys))
            own_highest, own_total, own_out = _split(
                queries, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, table_ptr, kv_head,
                begin, clear, end, tile_first, tile_last, first, last,
                key_block_stride, value_block_stride, scale_block_stride, scale_head_stride, cap,
                dim, block_size, capped, quantized, products, width, rows, keys, careful,
            )  # fmt: skip
            # Numbers of int8 are finite, and their scales are left out with the weights.
            if not (careful or quantized):  # noqa: SIM102 - the second condition is of the device
                if (seen_by_all < end - 1) | (hidden_from_some > tl.maximum(begin, tile_first)):
                    spoilt |= not_finite(own_out)
            if partial:
                place = (part * num_rows + token) * heads + head
                tl.store(statistics_ptr + place * 2, own_highest, there)
                tl.store(statistics_ptr + place * 2 + 1, own_total, there)
                tl.store(accumulated_ptr + place[:, None] * dim + columns[None, :], own_out, loaded)
            else:
                highest, total, out = merged(highest, total, out, own_highest, own_total, own_out)
                if (part + 1) % (segment // split) == 0:
                    whole_highest, whole_total, whole_out = merged(
                        whole_highest, whole_total, whole_out, highest, total, out
                    )
                    highest, total, out = nothing_found(rows, width)
        if not partial:
            highest, total, out = merged(whole_highest, whole_total, whole_out, highest, total, out)
            sinks = tl.full([rows], float("-inf"), tl.float32)
            if has_sinks:
                sinks = tl.load(sinks_ptr + head, there, 0.0) * _LOG2E
            tl.store(out_ptr + places, finished(highest, total, out, sinks), loaded)
    return spoilt


@triton.jit
def _attend(
    queries_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, sinks_ptr, out_ptr,
    accumulated_ptr, statistics_ptr, positions_ptr, tiles_ptr, lens_ptr, table_ptr,
    num_rows, table_stride, key_block_stride, key_head_stride, value_block_stride, value_head_stride,
    scale_block_stride, scale_head_stride, factor, cap,
    heads: tl.constexpr, per_key: tl.constexpr, dim: tl.constexpr, block_size: tl.constexpr,
    window: tl.constexpr, chunk: tl.constexpr, capped: tl.constexpr, causal: tl.constexpr,
    quantized: tl.constexpr, has_sinks: tl.constexpr, partial: tl.constexpr, products: tl.constexpr,
    width: tl.constexpr, rows: tl.constexpr, keys: tl.constexpr, split: tl.constexpr, segment: tl.constexpr,
):  # fmt: skip
    """Attention of one tile of queries over one KV head, or what a program finds in some splits of the context."""
    if _tile(
        queries_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, sinks_ptr, out_ptr,
        accumulated_ptr, statistics_ptr, positions_ptr, tiles_ptr, lens_ptr, table_ptr, num_rows, table_stride,
        key_block_stride, key_head_stride, value_block_stride, value_head_stride, scale_block_stride,
        scale_head_stride, factor, cap, heads, per_key, dim, block_size, window, chunk, capped, causal,
        quantized, has_sinks, partial, products, width, rows, keys, split, segment, careful=False,
    ):  # fmt: skip
        _tile(
            queries_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, sinks_ptr, out_ptr,
            accumulated_ptr, statistics_ptr, positions_ptr, tiles_ptr, lens_ptr, table_ptr, num_rows,
            table_stride, key_block_stride, key_head_stride, value_block_stride, value_head_stride,
            scale_block_stride, scale_head_stride, factor, cap, heads, per_key, dim, block_size, window, chunk,
            capped, causal, quantized, has_sinks, partial, products, width, rows, keys, split, segment,
            careful=True,
        )  # fmt: skip


@triton.jit
def _combine(
    accumulated_ptr, statistics_ptr, sinks_ptr, out_ptr, positions_ptr, num_rows,
    heads: tl.constexpr, dim: tl.constexpr, window: tl.constexpr, chunk: tl.constexpr,
    has_sinks: tl.constexpr, width: tl.constexpr, rows: tl.constexpr, split: tl.constexpr, segment: tl.constexpr,
):  # fmt: skip
    """Merges what programs found in the splits of contexts, for some heads of tokens."""
    row, columns = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows), tl.arange(0, width)
    position = tl.load(positions_ptr + row // heads, row < num_rows * heads, -1)
    there = position >= 0
    first = first_seen(position, window, chunk) // split
    loaded = there[:, None] & (columns < dim)[None, :]
    last = tl.max(position)
    if last >= 0:
        whole_highest, whole_total, whole_out = nothing_found(rows, width)
        highest, total, out = nothing_found(rows, width)
        for part in range(tl.min(tl.where(there, first, last)), last // split + 1):
            # Rows without this split get nothing, whose merging changes no bit.
            written = there & (first <= part) & (position // split >= part)
            place = (row * 0 + part) * num_rows * heads + row
            own_highest = tl.load(statistics_ptr + place * 2, written, float("-inf"))
            own_total = tl.load(statistics_ptr + place * 2 + 1, written, 0.0)
            found = loaded & written[:, None]
            own = tl.load(accumulated_ptr + place[:, None] * dim + columns[None, :], found, 0.0)
            highest, total, out = merged(highest, total, out, own_highest, own_total, own)
            if (part + 1) % (segment // split) == 0:
                whole_highest, whole_total, whole_out = merged(
                    whole_highest, whole_total, whole_out, highest, total, out
                )
                highest, total, out = nothing_found(rows, width)
        highest, total, out = merged(whole_highest, whole_total, whole_out, highest, total, out)
        sinks = tl.full([rows], float("-inf"), tl.float32)
        if has_sinks:
            sinks = tl.load(sinks_ptr + row % heads) * _LOG2E
        places = row[:, None] * dim + columns[None, :]
        tl.store(out_ptr + places, finished(highest, total, out, sinks), loaded)


def merge_partials(
    partials: Partials,
    steps: Steps,
    out: Tensor,
    *,
    heads: int,
    sinks: Tensor | None = None,
    window: int = 0,
    chunk: int = 0,
    segment: int = SEGMENT,
) -> None:
    """Merges the splits of all tokens: `out` [n, heads value_dim]."""
    count, dim = len(out) * heads, partials.accumulated.shape[-1]
    # Bits do not depend on how many rows a program has: few are quicker, many are fewer programs.
    rows = 4 if count <= 4096 else 32
    _combine[(blocks(count, rows),)](
        partials.accumulated, partials.statistics, sinks, out, steps.positions, len(out),
        heads=heads, dim=dim, window=window, chunk=chunk, has_sinks=sinks is not None,
        width=power_of_two(16, dim), rows=rows, split=SPLIT, segment=segment,
        num_warps=2 if rows == 4 else 4, **UNFUSED,
    )  # fmt: skip


def attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    steps: Steps,
    out: Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    causal: bool = True,
    sinks: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    products: torch.dtype = torch.bfloat16,
    partials: Partials | None = None,
    split_programs: int = 16,
    segment: int = SEGMENT,
) -> None:
    """Attention of queries [n, heads d] over a cache [num_blocks, kv_heads, block_size, d]: `out` [n, heads d].

    Tiles of `steps` are of `tokens_per_tile(heads // kv_heads)` tokens. Products are of numbers of one dtype. With
    `partials`, up to `split_programs` share a tile's context, of causal attention. A segment is a multiple of
    `SPLIT`. See `GraphBuilder.attention`.
    """
    if not len(queries) or not len(steps.tiles):
        return
    keys, values = as_stored(keys), as_stored(values)
    _, kv_heads, block_size, dim = keys.shape
    heads = queries.shape[1] // dim
    per_key, width = heads // kv_heads, power_of_two(16, dim)
    scratch = (None, None) if partials is None else (partials.accumulated, partials.statistics)
    programs = 1 if partials is None else min(split_programs, len(partials.statistics))
    grid = (len(steps.tiles), kv_heads * blocks(per_key, ROWS), programs)
    _attend[grid](
        queries, keys, values, key_scales, value_scales, sinks, out, *scratch,
        steps.positions, steps.tiles, steps.context_lens, steps.block_tables,
        len(queries), steps.block_tables.stride(0),
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        0 if key_scales is None else key_scales.stride(0),
        0 if key_scales is None else key_scales.stride(1),
        scale * (1.0 if softcap else _LOG2_E), softcap or 1.0,
        heads=heads, per_key=per_key, dim=dim, block_size=block_size, window=window or 0, chunk=chunk or 0,
        capped=softcap is not None, causal=causal, quantized=key_scales is not None,
        has_sinks=sinks is not None, partial=partials is not None, products=triton_dtype(products),
        width=width, rows=ROWS, keys=keys_per_tile(width, max(keys.itemsize, products.itemsize)),
        split=SPLIT, segment=segment, num_warps=4 if dim <= 128 else 8,
        num_stages=stages_of(width, max(keys.itemsize, products.itemsize)), **UNFUSED,
    )  # fmt: skip
    if partials is not None:
        merge_partials(
            partials,
            steps,
            out,
            heads=heads,
            sinks=sinks,
            window=window or 0,
            chunk=chunk or 0,
            segment=segment,
        )
