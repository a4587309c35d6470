# SPDX-License-Identifier: Apache-2.0
"""Products with weights of small integers, whose inputs are rounded to integers too.

Sums of integers are exact in any order, and scales are multiplied and added as the reference does, one operation
at a time: results have its bits (`pagoda.backend.reference.quantized`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagoda.plugins.cuda.kernels.linear import store_tile
from pagoda.plugins.cuda.kernels.numbers import UNFUSED, blocks, is_finite, power_of_two, rounded

_ROWS, _OUTPUTS, INPUTS = 64, 64, 64
_LANES = 32
_ELEMENTS = 4096
_BLOCK = 1024


@dataclass(frozen=True)
class RoundedRows:
    """Integers of rows of inputs which share one scale, `128 high + low`."""

    low: Tensor
    """[n, in] int8, from -64 to 63."""
    high: Tensor
    """[n, in] int8."""
    scales: Tensor
    """[n] float32; NaN for rows that are not finite."""
    sums: Tensor
    """[n] int32, of a row's integers."""

    @classmethod
    def new(cls, rows: int, inputs: int, device: torch.device) -> RoundedRows:
        """Room for `rows` of them."""
        low, high = (torch.empty((rows, inputs), dtype=torch.int8, device=device) for _ in range(2))
        scales = torch.empty(rows, dtype=torch.float32, device=device)
        return cls(low, high, scales, torch.empty(rows, dtype=torch.int32, device=device))


@dataclass(frozen=True)
class RoundedGroups:
    """Integers of rows of inputs, with a scale for each group of neighbours."""

    values: Tensor
    """[n, in] int8, from -127 to 127."""
    scales: Tensor
    """[n, groups] float32; NaN for groups that are not finite."""
    sums: Tensor
    """[n, groups] float32, of a group's integers times its scale."""
    group_size: int

    @classmethod
    def new(cls, rows: int, inputs: int, group_size: int, device: torch.device) -> RoundedGroups:
        """Room for `rows` of them."""
        values = torch.empty((rows, inputs), dtype=torch.int8, device=device)
        shape = (rows, inputs // group_size)
        scales, sums = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
        return cls(values, scales, sums, group_size)


@triton.jit
def _round_rows(
    x_ptr, low_ptr, high_ptr, scales_ptr, sums_ptr,
    inputs: tl.constexpr, depth: tl.constexpr, block: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, lanes)
    places = tl.arange(0, block)[:, None] * lanes + lane[None, :]
    there = places < inputs
    x = tl.load(x_ptr + row * inputs + places, there, 0.0)
    broken = tl.sum(tl.sum((~is_finite(x)).to(tl.int32), 1), 0) > 0
    highest = tl.max(tl.abs(x), 0)
    folded = highest * (depth / 8388608.0)
    folded = tl.sum(tl.reshape(folded, [2, 16]), 0)
    folded = tl.sum(tl.reshape(folded, [2, 8]), 0)
    folded = tl.sum(tl.reshape(folded, [2, 4]), 0)
    folded = tl.sum(tl.reshape(folded, [2, 2]), 0)
    least = tl.sum(folded, 0)
    # The lane of rank 4 from below, of equal ones in their order.
    before = (highest[None, :] < highest[:, None]) | (
        (highest[None, :] == highest[:, None]) & (lane[None, :] < lane[:, None])
    )
    typical = tl.sum(tl.where(tl.sum(before.to(tl.int32), 1) == 4, highest, 0.0), 0)
    top = tl.max(highest, 0)
    scale = tl.maximum(
        tl.div_rn(tl.minimum(1.75 * typical, top), top * 0.0 + 127.0),
        tl.div_rn(top, top * 0.0 + 16256.0),
    )
    scale = tl.maximum(scale, least)
    inverse = tl.div_rn(scale * 0.0 + 1.0, scale)
    vanishes = inverse == float("inf")
    whole = rounded(x * tl.where(vanishes | broken, 0.0, inverse))
    integers = tl.where(broken, 0.0, whole).to(tl.int32)
    high = (integers + 64) >> 7
    tl.store(high_ptr + row * inputs + places, high.to(tl.int8), there)
    tl.store(low_ptr + row * inputs + places, (integers - high * 128).to(tl.int8), there)
    tl.store(sums_ptr + row, tl.sum(tl.sum(integers, 1), 0))
    tl.store(scales_ptr + row, tl.where(broken, float("nan"), tl.where(vanishes, 0.0, scale)))


@triton.jit
def _round_groups(
    x_ptr, order_ptr, values_ptr, scales_ptr, sums_ptr, num_groups, inputs,
    ordered: tl.constexpr, size: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    there = (group < num_groups)[:, None] & (tl.arange(0, size) < size)[None, :]
    places = group[:, None] * size + tl.arange(0, size)[None, :]
    taken = places
    if ordered:
        row = places // inputs
        taken = row * inputs + tl.load(order_ptr + places % inputs, there, 0)
    x = tl.load(x_ptr + taken, there, 0.0)
    broken = tl.sum((~is_finite(x)).to(tl.int32), 1) > 0
    highest = tl.max(tl.abs(x), 1)
    scales = tl.div_rn(highest, tl.full(highest.shape, 127.0, tl.float32))
    divisors = tl.where(scales == 0.0, float("inf"), scales)
    steps = tl.div_rn(x, tl.broadcast_to(divisors[:, None], x.shape))
    whole = tl.where(broken[:, None], 0.0, rounded(tl.where(broken[:, None], 0.0, steps)))
    whole = tl.minimum(tl.maximum(whole, -127.0), 127.0)
    scales = tl.where(broken, float("nan"), scales)
    tl.store(values_ptr + places, whole.to(tl.int8), there)
    tl.store(scales_ptr + group, scales, group < num_groups)
    tl.store(sums_ptr + group, tl.sum(whole, 1) * scales, group < num_groups)


@triton.jit
def int8_product(
    low_ptr, high_ptr, row_scales_ptr, sums_ptr, row, there,
    values_ptr, scales_ptr, zeros_ptr, outputs, held,
    has_zeros: tl.constexpr, inputs: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    """Rounded rows [r] times outputs [o] of an `Int8Weight`: [r, o] float32."""
    of_low = tl.zeros([row.shape[0], outputs.shape[0]], tl.int32)
    of_high = tl.zeros([row.shape[0], outputs.shape[0]], tl.int32)
    for start in range(0, inputs, step):
        places = start + tl.arange(0, step)
        known = places < inputs
        own, taken = row[:, None] * inputs + places[None, :], there[:, None] & known[None, :]
        weight = tl.load(
            values_ptr + outputs.to(tl.int64)[None, :] * inputs + places[:, None],
            held[None, :] & known[:, None], 0,
        )  # fmt: skip
        of_low = tl.dot(tl.load(low_ptr + own, taken, 0), weight, of_low, out_dtype=tl.int32)
        of_high = tl.dot(tl.load(high_ptr + own, taken, 0), weight, of_high, out_dtype=tl.int32)
    total = of_low + of_high * 128
    if has_zeros:
        sums, zeros = tl.load(sums_ptr + row, there, 0), tl.load(zeros_ptr + outputs, held, 0)
        total -= sums[:, None] * zeros[None, :]
    row_scales = tl.load(row_scales_ptr + row, there, 0.0)
    scales = tl.load(scales_ptr + outputs, held, 0.0)
    return total.to(tl.float32) * (row_scales[:, None] * scales[None, :])


@triton.jit
def _int8_linear(
    low_ptr, high_ptr, row_scales_ptr, sums_ptr, values_ptr, scales_ptr, zeros_ptr, bias_ptr, out_ptr,
    num_rows, num_outputs, out_stride,
    has_zeros: tl.constexpr, has_bias: tl.constexpr, inputs: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * rows + tl.arange(0, rows)
    outputs = tl.program_id(0) * columns + tl.arange(0, columns)
    there, held = row < num_rows, outputs < num_outputs
    out = int8_product(
        low_ptr, high_ptr, row_scales_ptr, sums_ptr, row, there,
        values_ptr, scales_ptr, zeros_ptr, outputs, held, has_zeros, inputs, step,
    )  # fmt: skip
    store_tile(out, bias_ptr, out_ptr, row, there, outputs, held, out_stride, has_bias)


@triton.jit
def _integers_of(codes_ptr, outputs, held, start, inputs, bits: tl.constexpr, size: tl.constexpr):
    """A group's codes [outputs, size] of a weight as int8, less the code of zero."""
    row = outputs.to(tl.int64)[:, None]
    if bits == 4:
        places = start // 2 + tl.arange(0, size // 2)
        pairs = tl.load(codes_ptr + row * (inputs // 2) + places[None, :], held[:, None], 136).to(
            tl.int32
        )
        both = tl.join((pairs & 15) - 8, (pairs >> 4) - 8)
        codes = tl.reshape(both, [outputs.shape[0], size])
    else:
        places = start + tl.arange(0, size)
        codes = (
            tl.load(codes_ptr + row * inputs + places[None, :], held[:, None], 128).to(tl.int32)
            - 128
        )
    return codes.to(tl.int8)


@triton.jit
def grouped_product(
    values_ptr, row_scales_ptr, sums_ptr, row, there,
    codes_ptr, scales_ptr, offsets_ptr, outputs, held,
    has_offsets: tl.constexpr, inputs: tl.constexpr, bits: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """Rounded groups of rows [r] times outputs [o] of a `GroupedWeight`: [r, o] float32."""
    groups: tl.constexpr = inputs // size
    total = tl.zeros([row.shape[0], outputs.shape[0]], tl.float32)
    for group in range(0, groups):
        places = group * size + tl.arange(0, size)
        x = tl.load(values_ptr + row[:, None] * inputs + places[None, :], there[:, None], 0)
        weight = _integers_of(codes_ptr, outputs, held, group * size, inputs, bits, size)
        products = tl.dot(x, tl.trans(weight), out_dtype=tl.int32).to(tl.float32)
        row_scales = tl.load(row_scales_ptr + row * groups + group, there, 0.0)
        own = outputs.to(tl.int64) * groups + group
        scales = tl.load(scales_ptr + own, held, 0.0).to(tl.float32)
        total += products * (row_scales[:, None] * scales[None, :])
        if has_offsets:
            sums = tl.load(sums_ptr + row * groups + group, there, 0.0)
            offsets = tl.load(offsets_ptr + own, held, 0.0).to(tl.float32)
            total += sums[:, None] * offsets[None, :]
    return total


@triton.jit
def _grouped_linear(
    values_ptr, row_scales_ptr, sums_ptr, codes_ptr, scales_ptr, offsets_ptr, bias_ptr, out_ptr,
    num_rows, num_outputs, out_stride,
    has_offsets: tl.constexpr, has_bias: tl.constexpr, inputs: tl.constexpr, bits: tl.constexpr,
    size: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * rows + tl.arange(0, rows)
    outputs = tl.program_id(0) * columns + tl.arange(0, columns)
    there, held = row < num_rows, outputs < num_outputs
    total = grouped_product(
        values_ptr, row_scales_ptr, sums_ptr, row, there,
        codes_ptr, scales_ptr, offsets_ptr, outputs, held, has_offsets, inputs, bits, size,
    )  # fmt: skip
    store_tile(total, bias_ptr, out_ptr, row, there, outputs, held, out_stride, has_bias)


@triton.jit
def _int8_embedding(
    ids_ptr, values_ptr, scales_ptr, zeros_ptr, out_ptr, count, first_id, outputs, width,
    has_zeros: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    own = tl.load(ids_ptr + places // width, places < count, 0) - first_id
    there = (places < count) & (own >= 0) & (own < outputs)
    x = tl.load(values_ptr + own * width + places % width, there, 0).to(tl.float32)
    if has_zeros:
        x -= tl.load(zeros_ptr + own, there, 0).to(tl.float32)
    tl.store(out_ptr + places, x * tl.load(scales_ptr + own, there, 0.0), places < count)


@triton.jit
def _grouped_embedding(
    ids_ptr, codes_ptr, scales_ptr, offsets_ptr, out_ptr, count, first_id, outputs, width,
    has_offsets: tl.constexpr, bits: tl.constexpr, size: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    column = places % width
    own = tl.load(ids_ptr + places // width, places < count, 0) - first_id
    there = (places < count) & (own >= 0) & (own < outputs)
    if bits == 4:
        pairs = tl.load(codes_ptr + own * (width // 2) + column // 2, there, 136).to(tl.int32)
        x = (tl.where(column % 2 == 1, pairs >> 4, pairs & 15) - 8).to(tl.float32)
    else:
        x = (tl.load(codes_ptr + own * width + column, there, 128).to(tl.int32) - 128).to(
            tl.float32
        )
    group = own * (width // size) + column // size
    x = x * tl.load(scales_ptr + group, there, 0.0).to(tl.float32)
    if has_offsets:
        x += tl.load(offsets_ptr + group, there, 0.0).to(tl.float32)
    tl.store(out_ptr + places, x, places < count)


def round_rows(x: Tensor, into: RoundedRows) -> None:
    """Integers of rows x [n, in], one scale for each; see `reference.quantized.rounded_rows`."""
    if len(x):
        inputs = x.shape[1]
        depth = blocks(inputs, _LANES)
        block = power_of_two(2, depth)
        _round_rows[(len(x),)](
            x, into.low, into.high, into.scales, into.sums,
            inputs=inputs, depth=depth, block=block, lanes=_LANES,
            num_warps=4 if block <= 128 else 8, **UNFUSED,
        )  # fmt: skip


def round_groups(x: Tensor, into: RoundedGroups, *, order: Tensor | None = None) -> None:
    """Integers of rows x [n, in], whose elements are taken in an `order` [in] int64 if there is one."""
    if len(x):
        size, rows = into.group_size, max(1, _ELEMENTS // into.group_size)
        _round_groups[(blocks(into.scales[: len(x)].numel(), rows),)](
            x, order, into.values, into.scales, into.sums, into.scales[: len(x)].numel(), x.shape[1],
            ordered=order is not None, size=size, rows=rows, **UNFUSED,
        )  # fmt: skip


def int8_linear(
    x: RoundedRows,
    values: Tensor,
    scales: Tensor,
    out: Tensor,
    *,
    zero_points: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:
    """Rounded rows times an `Int8Weight` [out, in], plus a bias: `out` [n, out] float32, which may be columns of
    wider rows."""
    outputs, inputs = values.shape
    if len(out):
        _int8_linear[(blocks(outputs, _OUTPUTS), blocks(len(out), _ROWS))](
            x.low, x.high, x.scales, x.sums, values, scales, zero_points, bias, out,
            len(out), outputs, out.stride(0), has_zeros=zero_points is not None, has_bias=bias is not None,
            inputs=inputs, rows=_ROWS, columns=_OUTPUTS, step=INPUTS, **UNFUSED,
        )  # fmt: skip


def grouped_linear(
    x: RoundedGroups,
    codes: Tensor,
    scales: Tensor,
    out: Tensor,
    *,
    bits: int,
    offsets: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:
    """Rounded groups times a `GroupedWeight`, plus a bias: `out` [n, out] float32, maybe columns of wider rows.

    Codes are [out, in] uint8, or of 4 bits [out, in / 2], the odd input in the high half.
    """
    outputs, groups = scales.shape
    if len(out):
        _grouped_linear[(blocks(outputs, _OUTPUTS), blocks(len(out), _ROWS))](
            x.values, x.scales, x.sums, codes, scales, offsets, bias, out,
            len(out), outputs, out.stride(0), has_offsets=offsets is not None, has_bias=bias is not None,
            inputs=groups * x.group_size, bits=bits, size=x.group_size,
            rows=_ROWS, columns=_OUTPUTS, **UNFUSED,
        )  # fmt: skip


def int8_embedding(
    token_ids: Tensor,
    values: Tensor,
    scales: Tensor,
    out: Tensor,
    *,
    first_id: int,
    zero_points: Tensor | None = None,
) -> None:
    """Rows of an `Int8Weight` by ids [n] int64 from `first_id` on, as float32; zeros for other ids."""
    if out.numel():
        outputs, width = values.shape
        _int8_embedding[(blocks(out.numel(), _BLOCK),)](
            token_ids, values, scales, zero_points, out, out.numel(), first_id, outputs, width,
            has_zeros=zero_points is not None, block=_BLOCK, **UNFUSED,
        )  # fmt: skip


def grouped_embedding(
    token_ids: Tensor,
    codes: Tensor,
    scales: Tensor,
    out: Tensor,
    *,
    first_id: int,
    bits: int,
    offsets: Tensor | None = None,
) -> None:
    """Rows of a `GroupedWeight` by ids [n] int64 from `first_id` on, as float32; zeros for other ids."""
    if out.numel():
        outputs, width = len(codes), out.shape[1]
        _grouped_embedding[(blocks(out.numel(), _BLOCK),)](
            token_ids, codes, scales, offsets, out, out.numel(), first_id, outputs, width,
            has_offsets=offsets is not None, bits=bits, size=width // scales.shape[1], block=_BLOCK, **UNFUSED,
        )  # fmt: skip
