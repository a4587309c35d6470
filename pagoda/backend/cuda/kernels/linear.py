"""Products with dense weights, in tiles of one shape: a row's bits do not depend on how many rows there are."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagoda.backend.cuda.kernels.numbers import blocks, triton_dtype

ROWS, OUTPUTS, INPUTS = 64, 64, 64
"""Sizes of a tile of a product, and inputs that are added up at once."""


@triton.jit
def product(
    x_ptr, firsts, there, weight_ptr, outputs, num_outputs,
    inputs: tl.constexpr, products: tl.constexpr, precision: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    """Rows from x_ptr + firsts [r] on times outputs [o] of a weight [num_outputs, inputs]: [r, o] float32."""
    total = tl.zeros([firsts.shape[0], outputs.shape[0]], tl.float32)
    held = outputs < num_outputs
    for start in range(0, inputs, step):
        places = start + tl.arange(0, step)
        known = places < inputs
        x = tl.load(x_ptr + firsts[:, None] + places[None, :], there[:, None] & known[None, :], 0.0)
        own = outputs.to(tl.int64)[None, :] * inputs + places[:, None]
        weight = tl.load(weight_ptr + own, held[None, :] & known[:, None], 0.0)
        total = tl.dot(x.to(products), weight.to(products), total, input_precision=precision)
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
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, num_outputs,
    has_bias: tl.constexpr, inputs: tl.constexpr, products: tl.constexpr, precision: tl.constexpr,
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
        outputs,
        num_outputs,
        inputs,
        products,
        precision,
        step,
    )
    held = outputs < num_outputs
    store_tile(out, bias_ptr, out_ptr, row, there, outputs, held, num_outputs, has_bias)


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
        x_ptr, firsts, there, weight_ptr, outputs, num_outputs, inputs, products, precision, step
    )
    places = (row * heads + head)[:, None] * num_outputs + outputs[None, :]
    tl.store(out_ptr + places, out, there[:, None] & (outputs < num_outputs)[None, :])


def numbers_of(dtype: torch.dtype) -> dict[str, object]:
    """Numbers that products with weights of a dtype are made of, as kernels take them.

    Inputs have more range than float16: its weights are widened, and inputs cut to as many digits (TF32).
    """
    if dtype == torch.bfloat16:
        return {"products": tl.bfloat16, "precision": "ieee", "step": INPUTS}
    precision = "tf32" if dtype == torch.float16 and torch.version.hip is None else "ieee"
    return {"products": tl.float32, "precision": precision, "step": INPUTS // 2}


def linear(x: Tensor, weight: Tensor, out: Tensor, *, bias: Tensor | None = None) -> None:
    """x [n, in] times a weight [out, in] of float32, float16 or bfloat16, plus a bias [out] float32: [n, out].

    Inputs are rounded to bfloat16 for a weight of it.
    """
    outputs, inputs = weight.shape
    if len(x):
        _linear[(blocks(outputs, OUTPUTS), blocks(len(x), ROWS))](
            x, weight, bias, out, len(x), outputs,
            has_bias=bias is not None, inputs=inputs, rows=ROWS, columns=OUTPUTS, **numbers_of(weight.dtype),
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
