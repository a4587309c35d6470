"""Products with dense weights and 8-bit floats, in tiles of one shape.

A row's bits do not depend on how many rows there are.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagoda.backend.cuda.kernels.numbers import UNFUSED, as_stored, blocks, triton_dtype, widened

ROWS, OUTPUTS, INPUTS = 64, 64, 64
"""Sizes of a tile of a product, and inputs that are added up at once."""
_BLOCK = 1024


@triton.jit
def add_product(
    total, x, weight, scales_ptr, outputs, held, start,
    inputs: tl.constexpr, size: tl.constexpr, products: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Adds inputs [r, i] from `start` on times weights [i, o] to sums [r, o]; bytes are E4M3.

    With a `size` that is not 0, so many inputs share a scale of each output, [outputs, groups].
    """
    weight = widened(weight, products)
    if size == 0:
        total = tl.dot(x, weight, total, input_precision=precision)
    else:
        groups: tl.constexpr = (inputs + size - 1) // size
        own = outputs.to(tl.int64) * groups + start // size
        scales = tl.load(scales_ptr + own, held, 0.0)
        total += tl.dot(x, weight, input_precision=precision) * scales[None, :]
    return total


@triton.jit
def product(
    x_ptr, firsts, there, weight_ptr, scales_ptr, outputs, num_outputs, inputs: tl.constexpr,
    size: tl.constexpr, products: tl.constexpr, precision: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    """Rows from x_ptr + firsts [r] on times outputs [o] of a weight [num_outputs, inputs]: [r, o] float32.

    See `add_product` for weights with scales.
    """
    total = tl.zeros([firsts.shape[0], outputs.shape[0]], tl.float32)
    held = outputs < num_outputs
    for start in range(0, inputs, step):
        places = start + tl.arange(0, step)
        known = places < inputs
        x = tl.load(x_ptr + firsts[:, None] + places[None, :], there[:, None] & known[None, :], 0.0)
        own = outputs.to(tl.int64)[None, :] * inputs + places[:, None]
        weight = tl.load(weight_ptr + own, held[None, :] & known[:, None], 0.0)
        total = add_product(
            total, x.to(products), weight, scales_ptr, outputs, held, start, inputs, size, products, precision
        )  # fmt: skip
    return total


@triton.jit
def store_tile(
    out, bias_ptr, out_ptr, row, there, outputs, held, out_stride, has_bias: tl.constexpr
):
    """Stores outputs [r, o] of rows, with their bias if there is one."""
    if has_bias:
        out += tl.load(bias_ptr + outputs, held, 0.0)[None, :]
    places = row[:, None] * out_stride + outputs[None, :]
    tl.store(out_ptr + places, out, there[:, None] & held[None, :])


@triton.jit
def _linear(
    x_ptr, weight_ptr, scales_ptr, bias_ptr, out_ptr, num_rows, num_outputs, has_bias: tl.constexpr,
    inputs: tl.constexpr, size: tl.constexpr, products: tl.constexpr, precision: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * rows + tl.arange(0, rows)
    outputs = tl.program_id(0) * columns + tl.arange(0, columns)
    there = row < num_rows
    out = product(
        x_ptr,
        row * inputs,
        there,
        weight_ptr,
        scales_ptr,
        outputs,
        num_outputs,
        inputs,
        size,
        products,
        precision,
        step,
    )
    held = outputs < num_outputs
    store_tile(out, bias_ptr, out_ptr, row, there, outputs, held, num_outputs, has_bias)


@triton.jit
def _fp8_embedding(
    ids_ptr, values_ptr, scales_ptr, out_ptr, count, first_id, outputs, width,
    size: tl.constexpr, groups: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    own, column = tl.load(ids_ptr + places // width, places < count, 0) - first_id, places % width
    there = (places < count) & (own >= 0) & (own < outputs)
    values = widened(tl.load(values_ptr + own * width + column, there, 0), tl.float32)
    scales = tl.load(scales_ptr + own * groups + column // size, there, 0.0)
    tl.store(out_ptr + places, values * scales, places < count)


@triton.jit
def _head_linear(
    x_ptr, addresses_ptr, out_ptr, num_rows, num_outputs, heads,
    inputs: tl.constexpr, dtype: tl.constexpr, products: tl.constexpr, precision: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * rows + tl.arange(0, rows)
    outputs = tl.program_id(0) * columns + tl.arange(0, columns)
    head = tl.program_id(2)
    there = row < num_rows
    weight_ptr = tl.load(addresses_ptr + head).to(tl.pointer_type(dtype))
    firsts = (row * heads + head) * inputs
    out = product(
        x_ptr, firsts, there, weight_ptr, None, outputs, num_outputs, inputs, 0, products, precision, step
    )  # fmt: skip
    places = (row * heads + head)[:, None] * num_outputs + outputs[None, :]
    tl.store(out_ptr + places, out, there[:, None] & (outputs < num_outputs)[None, :])


def numbers_of(dtype: torch.dtype) -> dict[str, Any]:
    """Numbers that products with weights of a dtype are made of, as kernels take them.

    Inputs have more range than float16: its weights are widened, and inputs cut to as many digits (TF32).
    """
    if dtype == torch.bfloat16:
        return {"products": tl.bfloat16, "precision": "ieee", "step": INPUTS}
    precision = "tf32" if dtype == torch.float16 and torch.version.hip is None else "ieee"
    return {"products": tl.float32, "precision": precision, "step": INPUTS // 2}


def numbers_of_fp8(dtype: torch.dtype, sizes: Sequence[int]) -> dict[str, Any]:
    """The same of 8-bit floats in a model of a dtype, with scales of so many inputs: a tile has inputs of one."""
    numbers = numbers_of(dtype)
    steps = [size & -size for size in sizes]
    return {**numbers, "step": min(numbers["step"], *steps), **UNFUSED}


def linear(x: Tensor, weight: Tensor, out: Tensor, *, bias: Tensor | None = None) -> None:
    """x [n, in] times a weight [out, in] of float32, float16 or bfloat16, plus a bias [out] float32: [n, out].

    Inputs are rounded to bfloat16 for a weight of it.
    """
    if len(x):
        _launch(x, weight, None, bias, out, size=0, **numbers_of(weight.dtype))


def fp8_linear(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    out: Tensor,
    *,
    size: int,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> None:
    """x [n, in] times 8-bit floats [out, in] with scales [out, groups] float32 of `size` inputs each: [n, out].

    Inputs are rounded as for a dense weight of `dtype`. See `Fp8Weight`.
    """
    if len(x):
        numbers = numbers_of_fp8(dtype, [size])
        _launch(x, as_stored(values), scales, bias, out, size=size, **numbers)


def _launch(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    **numbers: Any,
) -> None:
    outputs, inputs = weight.shape
    _linear[(blocks(outputs, OUTPUTS), blocks(len(x), ROWS))](
        x, weight, scales, bias, out, len(x), outputs,
        has_bias=bias is not None, inputs=inputs, rows=ROWS, columns=OUTPUTS, **numbers,
    )  # fmt: skip


def fp8_embedding(
    token_ids: Tensor, values: Tensor, scales: Tensor, out: Tensor, *, first_id: int, size: int
) -> None:
    """Rows of an `Fp8Weight` by ids [n] int64 from `first_id` on, as float32; zeros for other ids."""
    if out.numel():
        count, (outputs, width) = out.numel(), values.shape
        _fp8_embedding[(blocks(count, _BLOCK),)](
            token_ids, as_stored(values), scales, out, count, first_id, outputs, width,
            size=size, groups=scales.shape[1], block=_BLOCK,
        )  # fmt: skip


def head_linear(x: Tensor, addresses: Tensor, out: Tensor, *, dtype: torch.dtype) -> None:
    """Every head's own map of x [n, heads in]: [n, heads out]; `addresses` [heads] int64 are those of weights
    [out, in] of `dtype`, one behind the other in their rows."""
    heads = len(addresses)
    if len(x):
        inputs, outputs = x.shape[1] // heads, out.shape[1] // heads
        _head_linear[(blocks(outputs, OUTPUTS), blocks(len(x), ROWS), heads)](
            x, addresses, out, len(x), outputs, heads,
            inputs=inputs, dtype=triton_dtype(dtype), rows=ROWS, columns=OUTPUTS, **numbers_of(dtype),
        )  # fmt: skip
