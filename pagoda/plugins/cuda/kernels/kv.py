# SPDX-License-Identifier: Apache-2.0
"""Queries, keys and values made ready: norms of heads, rotary positions, and the way into blocks of the cache.

A token's slot is its block's number times the block size, plus its place in the block; -1 for none.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pagoda.plugins.cuda.kernels.numbers import (
    UNFUSED,
    as_stored,
    blocks,
    narrowed,
    power_of_two,
    rounded,
)
from pagoda.plugins.cuda.kernels.rows import sum_of_squares

_ELEMENTS = 4096
"""Elements that a program has at once, of as many heads as fit."""


@triton.jit
def _rotated(x, other, columns, cosines_ptr, sines_ptr, token, there, half: tl.constexpr):
    """Heads x [rows, block] with the pairs (i, i + half) rotated; `other` has the partner of each element."""
    turned = there & (columns < 2 * half)[None, :]
    places = token[:, None] * half + (columns % half)[None, :]
    crossed = other * tl.load(sines_ptr + places, turned, 0.0)
    crossed = tl.where((columns < half)[None, :], -crossed, crossed)
    return x * tl.load(cosines_ptr + places, turned, 1.0) + tl.where(turned, crossed, 0.0)


@triton.jit
def _scales_of(highest, broken):
    """Scales [rows] of int8 that make 127 of the highest magnitudes, and numbers to divide by."""
    scales = tl.where(
        broken > 0, float("nan"), tl.div_rn(highest, tl.full(highest.shape, 127.0, tl.float32))
    )
    return scales, tl.where(scales > 0.0, scales, 1.0)


@triton.jit
def _rotate_and_cache(
    qkv_ptr, slots_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, out_ptr,
    cosines_ptr, sines_ptr, query_norm_ptr, key_norm_ptr, squares_ptr, eps, num_rows,
    key_block_stride, key_head_stride, value_block_stride, value_head_stride,
    scale_block_stride, scale_head_stride, block_size,
    heads: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, half: tl.constexpr,
    normed: tl.constexpr, all_heads: tl.constexpr, quantized: tl.constexpr,
    rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    every: tl.constexpr = heads + 2 * kv_heads
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    columns = tl.arange(0, block)
    token, head = row // every, row % every
    is_query, is_value = head < heads, head >= heads + kv_heads
    is_key = ~is_query & ~is_value
    there = (row < num_rows)[:, None] & (columns < dim)[None, :]
    x = tl.load(qkv_ptr + row[:, None] * dim + columns[None, :], there, 0.0)
    values = x
    if normed:
        if all_heads:
            squares = tl.load(squares_ptr + token * 2 + is_key.to(tl.int64), row < num_rows, 0.0)
            means = squares / tl.where(is_query, heads * dim, kv_heads * dim).to(tl.float32)
        else:
            means = tl.sum(x * x, 1) / dim
        factors = tl.rsqrt(means + eps)[:, None]
        firsts = tl.where(is_query, head, head - heads) * dim if all_heads else head * 0
        of_queries, of_keys = there & is_query[:, None], there & is_key[:, None]
        norms = firsts[:, None] + columns[None, :]
        x = (
            x
            * factors
            * (
                tl.load(query_norm_ptr + norms, of_queries, 0.0)
                + tl.load(key_norm_ptr + norms, of_keys, 0.0)
            )
        )
    if half > 0:
        others = tl.where(columns < half, columns + half, columns - half)
        paired = there & (columns < 2 * half)[None, :]
        other = tl.load(qkv_ptr + row[:, None] * dim + others[None, :], paired, 0.0)
        if normed:
            norms = firsts[:, None] + others[None, :]
            other = (
                other
                * factors
                * (
                    tl.load(query_norm_ptr + norms, paired & of_queries, 0.0)
                    + tl.load(key_norm_ptr + norms, paired & of_keys, 0.0)
                )
            )
        x = _rotated(x, other, columns, cosines_ptr, sines_ptr, token, there, half)
    place = (token * heads + head)[:, None] * dim + columns[None, :]
    tl.store(out_ptr + place, x, there & is_query[:, None])

    slot = tl.load(slots_ptr + token, (row < num_rows) & ~is_query, -1)
    cache_block, offset = slot // block_size, slot % block_size
    key_head, value_head = head - heads, head - heads - kv_heads
    key_place = cache_block * key_block_stride + key_head * key_head_stride + offset * dim
    value_place = cache_block * value_block_stride + value_head * value_head_stride + offset * dim
    key_there, value_there = is_key & (slot >= 0), is_value & (slot >= 0)
    x = tl.where(is_value[:, None], values, x)
    if quantized:
        scales, divisors = _scales_of(tl.max(tl.abs(x), 1), tl.sum((x != x).to(tl.int32), 1))
        scale_place = cache_block * scale_block_stride + offset
        tl.store(key_scales_ptr + scale_place + key_head * scale_head_stride, scales, key_there)
        tl.store(
            value_scales_ptr + scale_place + value_head * scale_head_stride, scales, value_there
        )
        x = rounded(tl.div_rn(x, tl.broadcast_to(divisors[:, None], x.shape)))
    key_places = key_place[:, None] + columns[None, :]
    value_places = value_place[:, None] + columns[None, :]
    tl.store(
        keys_ptr + key_places, narrowed(x, keys_ptr.dtype.element_ty), there & key_there[:, None]
    )
    tl.store(
        values_ptr + value_places,
        narrowed(x, values_ptr.dtype.element_ty),
        there & value_there[:, None],
    )


@triton.jit
def _rotate_queries(
    queries_ptr, out_ptr, cosines_ptr, sines_ptr, num_rows,
    heads: tl.constexpr, dim: tl.constexpr, half: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    columns = tl.arange(0, block)
    there = (row < num_rows)[:, None] & (columns < dim)[None, :]
    places = row[:, None] * dim
    x = tl.load(queries_ptr + places + columns[None, :], there, 0.0)
    if half > 0:
        others = tl.where(columns < half, columns + half, columns - half)
        other = tl.load(queries_ptr + places + others[None, :], there, 0.0)
        x = _rotated(x, other, columns, cosines_ptr, sines_ptr, row // heads, there, half)
    tl.store(out_ptr + places + columns[None, :], x, there)


@triton.jit
def _cache_latents(
    latents_ptr, slots_ptr, cache_ptr, scales_ptr, norm_ptr, cosines_ptr, sines_ptr, eps, num_rows,
    cache_block_stride, scale_block_stride, block_size,
    rank: tl.constexpr, rope: tl.constexpr, half: tl.constexpr, quantized: tl.constexpr,
    rows: tl.constexpr, block: tl.constexpr, rope_block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    columns, turned = tl.arange(0, block), tl.arange(0, rope_block)
    there = (row < num_rows)[:, None] & (columns < rank)[None, :]
    key_there = (row < num_rows)[:, None] & (turned < rope)[None, :]
    places = row[:, None] * (rank + rope)
    x = tl.load(latents_ptr + places + columns[None, :], there, 0.0)
    factors = tl.rsqrt(tl.sum(x * x, 1) / rank + eps)[:, None]
    x = x * factors * tl.load(norm_ptr + columns, columns < rank, 0.0)[None, :]
    key = tl.load(latents_ptr + places + rank + turned[None, :], key_there, 0.0)
    if half > 0:
        others = tl.where(turned < half, turned + half, turned - half)
        other = tl.load(latents_ptr + places + rank + others[None, :], key_there, 0.0)
        key = _rotated(key, other, turned, cosines_ptr, sines_ptr, row, key_there, half)
    slot = tl.load(slots_ptr + row, row < num_rows, -1)
    cache_block, offset = slot // block_size, slot % block_size
    if quantized:
        highest = tl.maximum(tl.max(tl.abs(x), 1), tl.max(tl.abs(key), 1))
        broken = tl.sum((x != x).to(tl.int32), 1) + tl.sum((key != key).to(tl.int32), 1)
        scales, divisors = _scales_of(highest, broken)
        tl.store(scales_ptr + cache_block * scale_block_stride + offset, scales, slot >= 0)
        x = rounded(tl.div_rn(x, tl.broadcast_to(divisors[:, None], x.shape)))
        key = rounded(tl.div_rn(key, tl.broadcast_to(divisors[:, None], key.shape)))
    place = (cache_block * cache_block_stride + offset * (rank + rope))[:, None]
    tl.store(
        cache_ptr + place + columns[None, :],
        narrowed(x, cache_ptr.dtype.element_ty),
        there & (slot >= 0)[:, None],
    )
    place += rank + turned[None, :]
    tl.store(
        cache_ptr + place,
        narrowed(key, cache_ptr.dtype.element_ty),
        key_there & (slot >= 0)[:, None],
    )


def rotate_and_cache(
    qkv: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    *,
    cosines: Tensor | None = None,
    sines: Tensor | None = None,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
    squares: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """Norms and rotates queries and keys of qkv [n, (heads + 2 kv_heads) d]; see `GraphBuilder.rotate_and_cache`.

    Queries go to `out` [n, heads d], keys and values to slots [n] int64 of a cache [num_blocks, kv_heads,
    block_size, d]; with scales [num_blocks, kv_heads, block_size] the cache is int8. The table is [n, r / 2].
    Norms are of every head, or with scratch for `squares` [n, 2] of all heads of a token together.
    """
    if not len(qkv):
        return
    keys, values = as_stored(keys), as_stored(values)
    _, kv_heads, block_size, dim = keys.shape
    heads = qkv.shape[1] // dim - 2 * kv_heads
    if squares is not None:
        sum_of_squares(qkv, squares, queries=heads * dim, keys=kv_heads * dim)
    block = power_of_two(16, dim)
    rows, num_rows = max(1, _ELEMENTS // block), len(qkv) * (heads + 2 * kv_heads)
    _rotate_and_cache[(blocks(num_rows, rows),)](
        qkv, slots, keys, values, key_scales, value_scales, out,
        cosines, sines, query_norm, key_norm, squares, eps, num_rows,
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        0 if key_scales is None else key_scales.stride(0),
        0 if key_scales is None else key_scales.stride(1), block_size,
        heads=heads, kv_heads=kv_heads, dim=dim, half=0 if cosines is None else cosines.shape[1],
        normed=query_norm is not None, all_heads=squares is not None, quantized=key_scales is not None,
        rows=rows, block=block, **UNFUSED,
    )  # fmt: skip


def rotate_and_cache_latents(
    queries: Tensor,
    latents: Tensor,
    slots: Tensor,
    cache: Tensor,
    norm: Tensor,
    out: Tensor,
    *,
    eps: float,
    cosines: Tensor | None = None,
    sines: Tensor | None = None,
    scales: Tensor | None = None,
) -> None:
    """Rotates queries [n, heads rope_dim] into `out`, and caches latents [n, rank + rope_dim].

    The cache is [num_blocks, 1, block_size, rank + rope_dim], the norm [rank]; with scales [num_blocks, 1,
    block_size] the cache is int8. See `latent_layers.rotate_and_cache_latents`.
    """
    if not len(latents):
        return
    cache = as_stored(cache)
    rank, block_size = len(norm), cache.shape[2]
    rope = latents.shape[1] - rank
    heads = queries.shape[1] // rope
    half = 0 if cosines is None else cosines.shape[1]
    rope_block, block = power_of_two(16, rope), power_of_two(16, rank)
    rows, num_rows = max(1, _ELEMENTS // rope_block), len(latents) * heads
    _rotate_queries[(blocks(num_rows, rows),)](
        queries, out, cosines, sines, num_rows,
        heads=heads, dim=rope, half=half, rows=rows, block=rope_block, **UNFUSED,
    )  # fmt: skip
    rows = max(1, _ELEMENTS // block)
    _cache_latents[(blocks(len(latents), rows),)](
        latents, slots, cache, scales, norm, cosines, sines, eps, len(latents),
        cache.stride(0), 0 if scales is None else scales.stride(0), block_size,
        rank=rank, rope=rope, half=half, quantized=scales is not None,
        rows=rows, block=block, rope_block=rope_block, **UNFUSED,
    )  # fmt: skip
