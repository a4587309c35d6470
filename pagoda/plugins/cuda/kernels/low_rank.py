# SPDX-License-Identifier: Apache-2.0
"""Adapters of linear layers: products of two narrow matrices, each row with those of its own adapter."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagoda.plugins.cuda.kernels.linear import INPUTS, OUTPUTS, ROWS, numbers_of, product
from pagoda.plugins.cuda.kernels.numbers import blocks, power_of_two, triton_dtype

DOWN, UP, RANK, SCALE, COLUMNS = range(5)
"""Columns of a table of adapters: addresses of matrices, their rank (0 for none), and bits of the scale."""
_COLUMNS = tl.constexpr(COLUMNS)


@triton.jit
def _narrow(
    x_ptr, adapters_ptr, table_ptr, narrow_ptr, num_rows, slots, parts,
    inputs: tl.constexpr, dtype: tl.constexpr, products: tl.constexpr, precision: tl.constexpr,
    rows: tl.constexpr, width: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows), tl.program_id(1)
    columns = tl.arange(0, width)
    own = tl.load(adapters_ptr + row, row < num_rows, -1)
    for slot in range(0, slots):
        match = own == slot
        entry = table_ptr + (slot * parts + part) * _COLUMNS
        rank = tl.load(entry + 2).to(tl.int32)
        if (rank > 0) & (tl.sum(match.to(tl.int32)) > 0):
            down_ptr = tl.load(entry).to(tl.pointer_type(dtype))
            scale = tl.load(entry + 3).to(tl.int32).to(tl.float32, bitcast=True)
            made = product(
                x_ptr,
                row * inputs,
                match,
                down_ptr,
                None,
                columns,
                rank,
                inputs,
                0,
                products,
                precision,
                step,
            )
            places = (row * parts + part)[:, None] * width + columns[None, :]
            tl.store(narrow_ptr + places, made * scale, match[:, None])


@triton.jit
def _widen(
    out_ptr, adapters_ptr, table_ptr, narrow_ptr, num_rows, slots, parts, part, first, num_outputs, out_width,
    dtype: tl.constexpr, products: tl.constexpr, precision: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, width: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * rows + tl.arange(0, rows)
    outputs = tl.program_id(0) * columns + tl.arange(0, columns)
    own = tl.load(adapters_ptr + row, row < num_rows, -1)
    for slot in range(0, slots):
        match = own == slot
        entry = table_ptr + (slot * parts + part) * _COLUMNS
        rank = tl.load(entry + 2).to(tl.int32)
        if (rank > 0) & (tl.sum(match.to(tl.int32)) > 0):
            up_ptr = tl.load(entry + 1).to(tl.pointer_type(dtype))
            held = outputs < num_outputs
            added = tl.zeros([rows, columns], tl.float32)
            for start in range(0, rank, step):
                narrow = start + tl.arange(0, step)
                x = tl.load(
                    narrow_ptr + (row * parts + part)[:, None] * width + narrow[None, :],
                    match[:, None],
                    0.0,
                )
                weight = tl.load(
                    up_ptr + outputs.to(tl.int64)[None, :] * rank + narrow[:, None],
                    held[None, :] & (narrow < rank)[:, None], 0.0,
                )  # fmt: skip
                added = tl.dot(
                    x.to(products), weight.to(products), added, input_precision=precision
                )
            places = out_ptr + row[:, None] * out_width + first + outputs[None, :]
            there = match[:, None] & held[None, :]
            tl.store(places, tl.load(places, there, 0.0) + added, there)


def narrow_width(max_rank: int) -> int:
    """Elements of scratch that a row needs for each part of a layer, of adapters of ranks up to `max_rank`."""
    return power_of_two(16, max_rank)


def add_low_rank(
    out: Tensor,
    x: Tensor,
    adapters: Tensor,
    table: Tensor,
    narrow: Tensor,
    *,
    outputs: Sequence[int],
    dtype: torch.dtype,
) -> None:
    """Adds to `out` [n, sum(outputs)] what each row's adapter makes of x [n, in].

    Rows have numbers `adapters` [n] int64, those outside the table nothing. `table` [slots, parts, `COLUMNS`]
    int64 has contiguous matrices [rank, in] and [outputs, rank] of `dtype`; `narrow` [n, parts, `narrow_width`]
    float32 is scratch.
    """
    if not len(x) or not len(table):
        return
    slots, parts, _ = table.shape
    width = narrow.shape[-1]
    kinds = {"dtype": triton_dtype(dtype), "width": width, "rows": ROWS, **numbers_of(dtype)}
    tiles = blocks(len(x), ROWS)
    _narrow[(tiles, parts)](
        x, adapters, table, narrow, len(x), slots, parts, inputs=x.shape[1], **kinds
    )
    kinds["step"] = min(width, INPUTS // 2)
    first = 0
    for part, count in enumerate(outputs):
        _widen[(blocks(count, OUTPUTS), tiles)](
            out, adapters, table, narrow, len(x), slots, parts, part, first, count, out.shape[1],
            columns=OUTPUTS, **kinds,
        )  # fmt: skip
        first += count
