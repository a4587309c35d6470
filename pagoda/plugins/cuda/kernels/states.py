# SPDX-License-Identifier: Apache-2.0
"""Layers that keep one state of all tokens so far: short convolutions, and the gated delta rule.

A block holds the state behind its last computed token: the first half of the units lies where the block's keys
would be, the others where its values would. States are written behind each token that fills a block, and behind
the last one of the context; what a step computes behind that are drafts. Sums are of a token's own terms, or
carried on token by token, so that bits do not depend on how a sequence is cut or on what else is in the step.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pagoda.plugins.cuda.kernels.attention import Steps
from pagoda.plugins.cuda.kernels.numbers import (
    UNFUSED,
    blocks,
    power_of_two,
    sigmoid,
    silu,
    softplus,
)

MAX_CONV_WIDTH = 16
"""Tokens under a convolution, at most."""
_TOKENS = 16
"""Tokens of a convolution that a program has at once."""
_CHANNELS = 128
"""Channels of a convolution that a program has."""
_PROGRAMS = 4096
"""Programs that share the tokens of a step under a convolution, about; at least one for each sequence and tile."""
_STATE_ELEMENTS = 2048
"""Elements of a head's state that a program has in registers, of as many columns as fit."""


@triton.jit
def _before(table_ptr, begin, block_size):
    """Block that has the state before position `begin`; 0 where there is none."""
    return tl.load(table_ptr + (begin - 1) // block_size, begin > 0, 0).to(tl.int64)


# ---- short convolutions


@triton.jit
def _inputs(
    x_ptr, state_ptr, row, begin, place, channel, unit, there,
    units: tl.constexpr, kept: tl.constexpr, gated: tl.constexpr,
):  # fmt: skip
    """Inputs of channels at places behind a row of the step, whose position is `begin`.

    Those at places below 0 are in the state, or zeros before the first token.
    """
    of_step = there & (place >= 0)
    width: tl.constexpr = 3 * units if gated else units
    at = (row + place) * width + channel
    x = tl.load(x_ptr + at, of_step, 0.0)
    if gated:
        x = x * tl.load(x_ptr + at + 2 * units, of_step, 0.0)
    of_state = there & (place < 0) & (begin + place >= 0)
    return tl.where(of_step, x, tl.load(state_ptr + unit * kept + (kept + place), of_state, 0.0))


@triton.jit
def _short_conv(
    x_ptr, weight_ptr, bias_ptr, first_ptr, second_ptr, out_ptr, positions_ptr, tiles_ptr, contexts_ptr, table_ptr,
    table_stride, block_stride, block_size,
    units: tl.constexpr, kept: tl.constexpr, taps: tl.constexpr, gated: tl.constexpr, biased: tl.constexpr,
    activated: tl.constexpr, convolves: tl.constexpr, keeps: tl.constexpr,
    tokens: tl.constexpr, channels: tl.constexpr,
):  # fmt: skip
    tile, part = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tiles_ptr + tile * 3).to(tl.int64)
    if sequence >= 0:
        of_first: tl.constexpr = (units + 1) // 2
        parts: tl.constexpr = (of_first + channels - 1) // channels
        is_second = part >= parts
        memory_ptr = first_ptr
        if is_second:
            memory_ptr = second_ptr
        unit = tl.where(is_second, part - parts, part) * channels + tl.arange(0, channels)
        there = unit < tl.where(is_second, units - of_first, of_first)
        channel = tl.where(is_second, unit + of_first, unit)

        row = tl.load(tiles_ptr + tile * 3 + 1).to(tl.int64)
        count = tl.load(tiles_ptr + tile * 3 + 2)
        begin = tl.load(positions_ptr + row)
        table_ptr += sequence * table_stride
        state_ptr = memory_ptr + _before(table_ptr, begin, block_size) * block_stride
        if convolves:
            own = there[None, :]
            for start in range(tl.program_id(2) * tokens, count, tl.num_programs(2) * tokens):
                place = (start + tl.arange(0, tokens))[:, None]
                total = tl.zeros([tokens, channels], tl.float32)
                for tap in tl.static_range(0, kept + 1):
                    inputs = _inputs(
                        x_ptr, state_ptr, row, begin, place - kept + tap, channel[None, :], unit[None, :],
                        own & (place < count), units, kept, gated,
                    )  # fmt: skip
                    weight = tl.load(weight_ptr + tap * units + channel, there, 0.0)
                    total += inputs * weight[None, :]
                if biased:
                    total += tl.load(bias_ptr + channel, there, 0.0)[None, :]
                if activated:
                    total = silu(total)
                written = own & (place < count)
                if gated:
                    factors = x_ptr + (row + place) * (3 * units) + units + channel[None, :]
                    total = tl.load(factors, written, 0.0) * total
                tl.store(out_ptr + (row + place) * units + channel[None, :], total, written)
        if keeps:
            tap = tl.arange(0, taps)[None, :]
            own = there[:, None] & (tap < kept)
            last = tl.load(contexts_ptr + sequence) - 1
            newest = last // block_size
            for back in range(0, newest - begin // block_size + 1):
                number = (
                    newest - back
                )  # the state that all are made of may lie in the first block: it comes last
                place = tl.minimum(number * block_size + block_size - 1, last) - begin
                inputs = _inputs(
                    x_ptr, state_ptr, row, begin, place + 1 - kept + tap, channel[:, None], unit[:, None],
                    own, units, kept, gated,
                )  # fmt: skip
                tl.debug_barrier()  # the state that is read may lie where this one is written
                block = tl.load(table_ptr + number).to(tl.int64) * block_stride
                tl.store(memory_ptr + block + unit[:, None] * kept + tap, inputs, own)


def short_conv(
    x: Tensor,
    weight: Tensor,
    halves: tuple[Tensor, Tensor],
    steps: Steps,
    out: Tensor,
    *,
    block_size: int,
    bias: Tensor | None = None,
    gated: bool = False,
    activated: bool = False,
) -> None:
    """Causal convolution of each channel of x [n, channels], or gated of x [n, 3 channels]: `out` [n, channels].

    The weight is [width, channels] float32, of at most `MAX_CONV_WIDTH` tokens, and the bias [channels]; with
    `activated` the SiLU is taken. `halves` [num_blocks, floats] float32, of one stride, begin with the states of
    each half of the channels; blocks have at least 16 tokens. Tiles of `steps` are whole sequences. Every token is
    computed by itself; where a sequence has several, a second launch writes states. See `state_layers.short_conv`.
    """
    if not len(x) or not len(steps.tiles):
        return
    (first, second), kept, units = halves, len(weight) - 1, out.shape[1]
    parts = sum(blocks(count, _CHANNELS) for count in ((units + 1) // 2, units // 2))
    tiles, tokens = len(steps.tiles), 1
    launches = [(True, True, 1)]
    if len(x) > tiles:
        tokens = _TOKENS
        shared = min(blocks(len(x), tokens), max(1, _PROGRAMS // (tiles * parts)))
        launches = [(True, False, shared), (False, True, 1)]
    for convolves, keeps, programs in launches:
        _short_conv[(tiles, parts, programs)](
            x, weight, bias, first, second, out, steps.positions, steps.tiles, steps.context_lens,
            steps.block_tables, steps.block_tables.stride(0), first.stride(0), block_size,
            units=units, kept=kept, taps=power_of_two(1, kept), gated=gated, biased=bias is not None,
            activated=activated, convolves=convolves, keeps=keeps, tokens=tokens, channels=_CHANNELS, **UNFUSED,
        )  # fmt: skip


# ---- the gated delta rule


@triton.jit
def _unit_length(x):
    """x [d] over the root of its sum of squares plus a little."""
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def _gated_delta(
    qkv_ptr, gates_ptr, decay_ptr, dt_bias_ptr, first_ptr, second_ptr, out_ptr,
    positions_ptr, tiles_ptr, contexts_ptr, table_ptr, table_stride, block_stride, block_size, factor,
    heads: tl.constexpr, key_heads: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """Some columns of the state of one head, over the tokens of one sequence."""
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tiles_ptr + tile * 3).to(tl.int64)
    if sequence >= 0:
        of_first: tl.constexpr = (heads + 1) // 2
        keys: tl.constexpr = key_heads * key_dim
        width: tl.constexpr = 2 * keys + heads * value_dim
        memory_ptr = first_ptr
        if head >= of_first:
            memory_ptr = second_ptr
        element = tl.arange(0, rows)
        column = tl.program_id(2) * columns + tl.arange(0, columns)
        of_key, of_value = element < key_dim, column < value_dim
        there = of_key[:, None] & of_value[None, :]
        places = head % of_first * key_dim * value_dim
        places += element[:, None] * value_dim + column[None, :]

        row = tl.load(tiles_ptr + tile * 3 + 1).to(tl.int64)
        begin = tl.load(positions_ptr + row)
        end = begin + tl.load(tiles_ptr + tile * 3 + 2)
        kept_end = tl.load(contexts_ptr + sequence)
        table_ptr += sequence * table_stride
        decay, dt_bias = tl.load(decay_ptr + head), tl.load(dt_bias_ptr + head)
        state = tl.zeros([rows, columns], tl.float32)
        if begin > 0:
            before = memory_ptr + _before(table_ptr, begin, block_size) * block_stride
            state = tl.load(before + places, there, 0.0)
        key_head = head // (heads // key_heads) * key_dim
        for position in range(begin, end):
            token = row + (position - begin)
            own = qkv_ptr + token * width
            query = tl.load(own + key_head + element, of_key, 0.0)
            key = tl.load(own + keys + key_head + element, of_key, 0.0)
            value = tl.load(own + 2 * keys + head * value_dim + column, of_value, 0.0)
            b = tl.load(gates_ptr + token * 2 * heads + head)
            a = tl.load(gates_ptr + token * 2 * heads + heads + head)
            query, key = _unit_length(query), _unit_length(key)[:, None]
            state *= tl.exp(decay * softplus(a + dt_bias))
            delta = (value - tl.sum(state * key, 0)) * sigmoid(b)
            state += key * delta[None, :]
            found = tl.sum(state * query[:, None], 0) * factor
            place = (token * heads + head) * value_dim + column
            tl.store(out_ptr + place, found, of_value)
            done = position + 1
            if (done == kept_end) | ((done < kept_end) & (done % block_size == 0)):
                block = tl.load(table_ptr + position // block_size).to(tl.int64) * block_stride
                tl.store(memory_ptr + block + places, state, there)


def gated_delta(
    qkv: Tensor,
    gates: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    halves: tuple[Tensor, Tensor],
    steps: Steps,
    out: Tensor,
    *,
    block_size: int,
    key_heads: int,
    key_dim: int,
) -> None:
    """Gated delta rule, token by token, of rows of queries, keys and values: `out` [n, heads value_dim].

    Gates are [n, 2 heads]: b of all heads, then a; `decay` and `dt_bias` [heads]. `halves` [num_blocks, floats]
    float32, of one stride, begin with the states [key_dim, value_dim] of each half of the heads. Tiles of `steps`
    are whole sequences: a program carries some columns of a head's state through all tokens of one, in time that
    is proportional to their number (Yang et al. 2024, arXiv 2412.06464). See `state_layers.gated_delta`.
    """
    if not len(qkv) or not len(steps.tiles):
        return
    (first, second), heads = halves, len(decay)
    value_dim = out.shape[1] // heads
    rows = power_of_two(1, key_dim)
    columns = min(power_of_two(1, value_dim), max(1, _STATE_ELEMENTS // rows))
    _gated_delta[(len(steps.tiles), heads, blocks(value_dim, columns))](
        qkv, gates, decay, dt_bias, first, second, out,
        steps.positions, steps.tiles, steps.context_lens, steps.block_tables, steps.block_tables.stride(0),
        first.stride(0), block_size, key_dim**-0.5,
        heads=heads, key_heads=key_heads, key_dim=key_dim, value_dim=value_dim,
        rows=rows, columns=columns, num_warps=1, **UNFUSED,
    )  # fmt: skip
