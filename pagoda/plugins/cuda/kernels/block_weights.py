# SPDX-License-Identifier: Apache-2.0
"""Products with weights in blocks of GGUF, and embeddings of them, which are decoded where they are multiplied.

One decoding serves all formats: codes lie in one or two planes of bits, and stand for themselves less the code of
zero, or for a number of a codebook. Sums of integers are exact in any order, and scales and minima are multiplied
and added as the reference does, one operation at a time: results have its bits
(`pagoda.backend.reference.quantized`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from pagoda.backend.weights import BLOCK_INPUT_GROUP
from pagoda.checkpoints.weight_formats import BlockFormat
from pagoda.plugins.cuda.kernels.linear import store_tile
from pagoda.plugins.cuda.kernels.numbers import UNFUSED, blocks
from pagoda.plugins.cuda.kernels.quantized import RoundedGroups, RoundedRows

_ROWS, _OUTPUTS = 64, 64
_BLOCK = 1024


@dataclass(frozen=True)
class Blocks:
    """A `BlockWeight` on the device."""

    stored_format: BlockFormat
    inputs: int
    planes: tuple[Tensor, ...]
    """Bits of the codes, [out, bytes] uint8 each, as `reference.quantized.PackedBlocks` has them."""
    widths: tuple[int, ...]
    """Bits that each plane has of a code."""
    codebook: Tensor | None
    """[2 ** bits] int8."""
    scales: Tensor
    minima: Tensor | None
    block_scales: Tensor | None
    block_minima: Tensor | None

    @property
    def outputs(self) -> int:
        return len(self.scales)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Tensors in the order in which kernels take them."""
        low, high = (*self.planes, None)[:2]
        of_groups = (self.scales, self.minima, self.block_scales, self.block_minima)
        return low, high, self.codebook, *of_groups

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors if tensor is not None)


@triton.jit
def _plane(plane_ptr, places, there, width: tl.constexpr):
    """Bits of codes that a plane has `width` of each of: int32 of the shape of `places`."""
    packed: tl.constexpr = 8 // width
    own = tl.load(plane_ptr + places // packed, there, 0).to(tl.int32)
    return (own >> (places % packed * width).to(tl.int32)) & ((1 << width) - 1)


@triton.jit
def _numbers(
    low_ptr, high_ptr, codebook_ptr, places, there,
    low: tl.constexpr, high: tl.constexpr, has_codebook: tl.constexpr, zero: tl.constexpr,
):  # fmt: skip
    """Numbers that the codes at places of a weight stand for: int32."""
    codes = _plane(low_ptr, places, there, low)
    if high > 0:
        codes += _plane(high_ptr, places, there, high) << low
    if has_codebook:
        codes = tl.load(codebook_ptr + codes, there, 0).to(tl.int32)
    return codes - zero


@triton.jit
def _of_groups(
    numbers_ptr, blocks_ptr, group, there, has_blocks: tl.constexpr, per_block: tl.constexpr
):
    """Scales or minima, float32, of groups by their places in a weight."""
    numbers = tl.load(numbers_ptr + group, there, 0).to(tl.float32)
    if has_blocks:
        numbers = tl.load(blocks_ptr + group // per_block, there, 0.0).to(tl.float32) * numbers
    return numbers


@triton.jit
def _with_group(
    total, products, sums, scales_ptr, minima_ptr, block_scales_ptr, block_minima_ptr, group, there,
    has_minima: tl.constexpr, has_blocks: tl.constexpr, per_block: tl.constexpr,
):  # fmt: skip
    """The total [r, o] with one more group, of which there are products [r, o] and sums of inputs [r]."""
    scales = _of_groups(scales_ptr, block_scales_ptr, group, there, has_blocks, per_block)
    total += products * scales[None, :]
    if has_minima:
        minima = _of_groups(minima_ptr, block_minima_ptr, group, there, has_blocks, per_block)
        total += sums[:, None] * minima[None, :]
    return total


@triton.jit
def block_product(
    values_ptr, row_scales_ptr, sums_ptr, row, there,
    low_ptr, high_ptr, codebook_ptr, scales_ptr, minima_ptr, block_scales_ptr, block_minima_ptr,
    outputs, held,
    low: tl.constexpr, high: tl.constexpr, has_codebook: tl.constexpr, zero: tl.constexpr,
    has_minima: tl.constexpr, has_blocks: tl.constexpr, per_block: tl.constexpr,
    inputs: tl.constexpr, size: tl.constexpr, part_size: tl.constexpr,
):  # fmt: skip
    """Rows [r], rounded in groups of `part_size`, times outputs [o] int64 of a weight: [r, o] float32."""
    groups: tl.constexpr = inputs // size
    parts: tl.constexpr = size // part_size
    total = tl.zeros([row.shape[0], outputs.shape[0]], tl.float32)
    for group in range(0, groups):
        products = tl.zeros([row.shape[0], outputs.shape[0]], tl.float32)
        row_sums = tl.zeros([row.shape[0]], tl.float32)
        for part in tl.static_range(0, parts):
            places = group * size + part * part_size + tl.arange(0, part_size)
            x = tl.load(values_ptr + row[:, None] * inputs + places[None, :], there[:, None], 0)
            weight = _numbers(
                low_ptr, high_ptr, codebook_ptr, outputs[None, :] * inputs + places[:, None],
                held[None, :], low, high, has_codebook, zero,
            )  # fmt: skip
            own = row * (groups * parts) + group * parts + part
            row_scales = tl.load(row_scales_ptr + own, there, 0.0)
            # Integers of few bits, and sums of 16 of their products, are exact in these numbers.
            found = tl.dot(x.to(tl.float16), weight.to(tl.float16))
            products += found * row_scales[:, None]
            if has_minima:
                row_sums += tl.load(sums_ptr + own, there, 0.0)
        total = _with_group(
            total, products, row_sums, scales_ptr, minima_ptr, block_scales_ptr, block_minima_ptr,
            outputs * groups + group, held, has_minima, has_blocks, per_block,
        )  # fmt: skip
    return total


@triton.jit
def whole_rows_product(
    low_integers_ptr, high_integers_ptr, row_scales_ptr, row, there,
    low_ptr, high_ptr, codebook_ptr, scales_ptr, minima_ptr, block_scales_ptr, block_minima_ptr,
    outputs, held,
    low: tl.constexpr, high: tl.constexpr, has_codebook: tl.constexpr, zero: tl.constexpr,
    has_minima: tl.constexpr, has_blocks: tl.constexpr, per_block: tl.constexpr,
    inputs: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """Rows [r], each rounded by one scale, times outputs [o] int64 of a weight: [r, o] float32."""
    groups: tl.constexpr = inputs // size
    # Codes of 8 bits as bytes with a sign.
    middle: tl.constexpr = 128 if low == 8 else 0
    total = tl.zeros([row.shape[0], outputs.shape[0]], tl.float32)
    for group in range(0, groups):
        places = group * size + tl.arange(0, size)
        own = row[:, None] * inputs + places[None, :]
        low_integers = tl.load(low_integers_ptr + own, there[:, None], 0)
        high_integers = tl.load(high_integers_ptr + own, there[:, None], 0)
        numbers = _numbers(
            low_ptr, high_ptr, codebook_ptr, outputs[None, :] * inputs + places[:, None],
            held[None, :], low, high, has_codebook, zero,
        )  # fmt: skip
        weight = (numbers - middle).to(tl.int8)
        products = tl.dot(low_integers, weight, out_dtype=tl.int32)
        products += tl.dot(high_integers, weight, out_dtype=tl.int32) * 128
        sums = tl.sum(low_integers.to(tl.int32) + high_integers.to(tl.int32) * 128, 1)
        products += sums[:, None] * middle
        total = _with_group(
            total, products.to(tl.float32), sums.to(tl.float32),
            scales_ptr, minima_ptr, block_scales_ptr, block_minima_ptr,
            outputs * groups + group, held, has_minima, has_blocks, per_block,
        )  # fmt: skip
    return total * tl.load(row_scales_ptr + row, there, 0.0)[:, None]


@triton.jit
def _block_linear(
    values_ptr, high_integers_ptr, row_scales_ptr, sums_ptr,
    low_ptr, high_ptr, codebook_ptr, scales_ptr, minima_ptr, block_scales_ptr, block_minima_ptr,
    bias_ptr, out_ptr, num_rows, num_outputs, out_stride,
    low: tl.constexpr, high: tl.constexpr, has_codebook: tl.constexpr, zero: tl.constexpr,
    has_minima: tl.constexpr, has_blocks: tl.constexpr, per_block: tl.constexpr,
    inputs: tl.constexpr, size: tl.constexpr, whole_rows: tl.constexpr, part_size: tl.constexpr,
    has_bias: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * rows + tl.arange(0, rows)
    outputs = tl.program_id(0).to(tl.int64) * columns + tl.arange(0, columns)
    there, held = row < num_rows, outputs < num_outputs
    if whole_rows:
        out = whole_rows_product(
            values_ptr, high_integers_ptr, row_scales_ptr, row, there,
            low_ptr, high_ptr, codebook_ptr, scales_ptr, minima_ptr, block_scales_ptr, block_minima_ptr,
            outputs, held, low, high, has_codebook, zero, has_minima, has_blocks, per_block, inputs, size,
        )  # fmt: skip
    else:
        out = block_product(
            values_ptr, row_scales_ptr, sums_ptr, row, there,
            low_ptr, high_ptr, codebook_ptr, scales_ptr, minima_ptr, block_scales_ptr, block_minima_ptr,
            outputs, held, low, high, has_codebook, zero, has_minima, has_blocks, per_block, inputs, size,
            part_size,
        )  # fmt: skip
    store_tile(out, bias_ptr, out_ptr, row, there, outputs, held, out_stride, has_bias)


@triton.jit
def _block_embedding(
    ids_ptr,
    low_ptr, high_ptr, codebook_ptr, scales_ptr, minima_ptr, block_scales_ptr, block_minima_ptr,
    out_ptr, count, first_id, outputs,
    low: tl.constexpr, high: tl.constexpr, has_codebook: tl.constexpr, zero: tl.constexpr,
    has_minima: tl.constexpr, has_blocks: tl.constexpr, per_block: tl.constexpr,
    inputs: tl.constexpr, size: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    own = tl.load(ids_ptr + places // inputs, places < count, 0) - first_id
    there = (places < count) & (own >= 0) & (own < outputs)
    taken = own * inputs + places % inputs
    numbers = _numbers(low_ptr, high_ptr, codebook_ptr, taken, there, low, high, has_codebook, zero)
    x = numbers.to(tl.float32) * _of_groups(
        scales_ptr, block_scales_ptr, taken // size, there, has_blocks, per_block
    )
    if has_minima:
        x += _of_groups(minima_ptr, block_minima_ptr, taken // size, there, has_blocks, per_block)
    tl.store(out_ptr + places, tl.where(there, x, 0.0), places < count)


def constants_of(weight: Blocks) -> dict[str, Any]:
    """Constants of a format, for which kernels are compiled."""
    stored_format = weight.stored_format
    low, high = (*weight.widths, 0)[:2]
    return {
        "low": low,
        "high": high,
        "has_codebook": weight.codebook is not None,
        "zero": stored_format.zero,
        "has_minima": stored_format.minima,
        "has_blocks": stored_format.integer_scales,
        "per_block": stored_format.block_size // stored_format.group_size,
        "inputs": weight.inputs,
        "size": stored_format.group_size,
    }


def block_linear(
    x: RoundedGroups | RoundedRows, weight: Blocks, out: Tensor, *, bias: Tensor | None = None
) -> None:
    """Rounded inputs times a weight, plus a bias: `out` [n, out] float32, maybe columns of wider rows.

    Inputs are rounded in groups of 16, or as rows for blocks of whole rows.
    """
    if len(out):
        integers = (x.low, x.high) if isinstance(x, RoundedRows) else (x.values, None)
        _block_linear[(blocks(weight.outputs, _OUTPUTS), blocks(len(out), _ROWS))](
            *integers, x.scales, x.sums, *weight.tensors, bias, out, len(out), weight.outputs, out.stride(0),
            whole_rows=weight.stored_format.whole_rows, part_size=BLOCK_INPUT_GROUP, has_bias=bias is not None,
            rows=_ROWS, columns=_OUTPUTS, **constants_of(weight), **UNFUSED,
        )  # fmt: skip


def block_embedding(token_ids: Tensor, table: Blocks, out: Tensor, *, first_id: int) -> None:
    """Rows of a weight by ids [n] int64 from `first_id` on, as float32; zeros for other ids."""
    if out.numel():
        _block_embedding[(blocks(out.numel(), _BLOCK),)](
            token_ids, *table.tensors, out, out.numel(), first_id, table.outputs,
            block=_BLOCK, **constants_of(table), **UNFUSED,
        )  # fmt: skip
