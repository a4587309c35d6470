# SPDX-License-Identifier: Apache-2.0
"""Products with dense weights and 8-bit floats.

A row's bits do not depend on how many rows there are: tiles have one shape, or their shapes are among those that
add the same products in the same order. On NVIDIA's Hopper these are all tiles with a side of 64 or more, as one
instruction multiplies them (`wgmma`), 16 inputs after another.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pagoda.plugins.cuda.kernels.numbers import (
    UNFUSED,
    as_stored,
    blocks,
    power_of_two,
    triton_dtype,
    widened,
)

ROWS, OUTPUTS, INPUTS = 64, 64, 64
"""Sizes of a tile of a product, and inputs that are added up at once."""
_BLOCK = 1024


@dataclass(frozen=True)
class _Tile:
    """A tile of products on Hopper; sizes were chosen by measurement, on an H100."""

    kernel: Any
    rows: int
    columns: int
    step: int
    """Inputs that are added up at once."""
    warps: int
    stages: int
    """Tiles of inputs and weights that are loaded ahead, and the one that is multiplied."""


_INPUTS_MULTIPLE = 128
"""Inputs of which Hopper's tiles want a multiple: then none has to be left out."""
_FEW_ROWS = 64
"""Rows up to which weights are the longer side of all tiles, so that there may be few of the others."""
_SOME_ROWS = 512
"""Rows beyond which tiles are large, and the GPU's unit for copies (TMA) loads them."""
_NEIGHBOURS = 8
"""Tiles of rows that are computed side by side, so that they find a tile of weights in the cache."""


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
def _few_rows(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, num_outputs, has_bias: tl.constexpr,
    inputs: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    """Products whose tiles lie on their side, as outputs [o, r]; `inputs` are a multiple of `step`."""
    outputs = tl.program_id(0).to(tl.int64) * columns + tl.arange(0, columns)
    row = tl.program_id(1).to(tl.int64) * rows + tl.arange(0, rows)
    held, there = outputs < num_outputs, row < num_rows
    total = tl.zeros([columns, rows], tl.float32)
    for start in range(0, inputs, step):
        places = start + tl.arange(0, step)
        own = outputs[:, None] * inputs + places[None, :]
        weight = tl.load(weight_ptr + own, held[:, None], 0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + row[None, :] * inputs + places[:, None], there[None, :], 0.0)
        total = tl.dot(weight, x.to(weight.dtype), total, input_precision="ieee")
    if has_bias:
        total += tl.load(bias_ptr + outputs, held, 0.0)[:, None]
    places = row[None, :] * num_outputs + outputs[:, None]
    tl.store(out_ptr + places, total, held[:, None] & there[None, :])


@triton.jit
def _place_of_tile(
    num_rows, num_outputs, rows: tl.constexpr, columns: tl.constexpr, neighbours: tl.constexpr
):
    """Row and output where this program's tile begins; neighbours share weights."""
    across, down = tl.cdiv(num_outputs, columns), tl.cdiv(num_rows, rows)
    band = tl.program_id(0) // (neighbours * across) * neighbours
    place, height = tl.program_id(0) % (neighbours * across), tl.minimum(down - band, neighbours)
    return (band + place % height) * rows, (place // height) * columns


@triton.jit
def _many_rows(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, num_outputs, has_bias: tl.constexpr,
    inputs: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, step: tl.constexpr, neighbours: tl.constexpr,
):  # fmt: skip
    """Products of `inputs`, a multiple of `step`."""
    first_row, first_output = _place_of_tile(num_rows, num_outputs, rows, columns, neighbours)
    row, outputs = (
        first_row.to(tl.int64) + tl.arange(0, rows),
        first_output.to(tl.int64) + tl.arange(0, columns),
    )
    held, there = outputs < num_outputs, row < num_rows
    total = tl.zeros([rows, columns], tl.float32)
    for start in range(0, inputs, step):
        places = start + tl.arange(0, step)
        x = tl.load(x_ptr + row[:, None] * inputs + places[None, :], there[:, None], 0.0)
        own = outputs[None, :] * inputs + places[:, None]
        weight = tl.load(weight_ptr + own, held[None, :], 0.0)
        total = tl.dot(x.to(weight.dtype), weight, total, input_precision="ieee")
    store_tile(total, bias_ptr, out_ptr, row, there, outputs, held, num_outputs, has_bias)


@triton.jit
def _copied_rows(
    x, weight, bias_ptr, out_ptr, num_rows, num_outputs, has_bias: tl.constexpr,
    inputs: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, step: tl.constexpr, neighbours: tl.constexpr,
):  # fmt: skip
    """The same of described tensors, whose tiles the GPU copies by itself; what lies outside is 0."""
    first_row, first_output = _place_of_tile(num_rows, num_outputs, rows, columns, neighbours)
    total = tl.zeros([rows, columns], tl.float32)
    for start in range(0, inputs, step):
        own, others = x.load([first_row, start]), weight.load([first_output, start])
        total = tl.dot(own, others.T, total, input_precision="ieee")
    row, outputs = (
        first_row.to(tl.int64) + tl.arange(0, rows),
        first_output.to(tl.int64) + tl.arange(0, columns),
    )
    held, there = outputs < num_outputs, row < num_rows
    store_tile(total, bias_ptr, out_ptr, row, there, outputs, held, num_outputs, has_bias)


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


def linear(
    x: Tensor, weight: Tensor, out: Tensor, *, bias: Tensor | None = None, on_hopper: bool = False
) -> None:
    """x [n, in] times a weight [out, in] of float32, float16 or bfloat16, plus a bias [out] float32: [n, out].

    Inputs are float32, or bfloat16 for a weight of it, to which they are rounded. `on_hopper` allows for tiles
    that are quicker on GPUs of compute capability 9.0, and have the same bits there.
    """
    if not len(x):
        return
    if on_hopper and weight.dtype == torch.bfloat16 and weight.shape[1] % _INPUTS_MULTIPLE == 0:
        hopper_linear(x, weight, out, bias=bias)
    else:
        _launch(x, weight, None, bias, out, size=0, **numbers_of(weight.dtype))


def hopper_linear(x: Tensor, weight: Tensor, out: Tensor, *, bias: Tensor | None = None) -> None:
    """`linear` in tiles for GPUs of compute capability 9.0, with a multiple of `_INPUTS_MULTIPLE` inputs."""
    outputs, inputs = weight.shape
    tile = _hopper_tile(x, weight)
    across, down = blocks(outputs, tile.columns), blocks(len(x), tile.rows)
    read = (x, weight)
    if tile.kernel is _copied_rows:
        read = (
            TensorDescriptor.from_tensor(x, [tile.rows, tile.step]),
            TensorDescriptor.from_tensor(weight, [tile.columns, tile.step]),
        )
    on_their_side = tile.kernel is _few_rows
    tile.kernel[(across, down) if on_their_side else (across * down,)](
        *read, bias, out, len(x), outputs, has_bias=bias is not None, inputs=inputs, rows=tile.rows,
        columns=tile.columns, step=tile.step, num_warps=tile.warps, num_stages=tile.stages,
        **({} if on_their_side else {"neighbours": _NEIGHBOURS}),
    )  # fmt: skip


def _hopper_tile(x: Tensor, weight: Tensor) -> _Tile:
    """The tile of x [n, in] times a weight [out, in].

    Inputs that are not rounded yet take twice the memory, and go over registers. Few tiles would leave most of the
    GPU idle, so where weights are small they are narrow.
    """
    count, is_rounded = len(x), x.dtype == weight.dtype
    if count <= _FEW_ROWS:
        rows = power_of_two(16, count)
        return _Tile(_few_rows, rows, 64, 128, 4, 6 if is_rounded or rows == 16 else 4)
    if not is_rounded:
        return _Tile(_many_rows, 128, 128, 64, 8, 3)
    if count > _SOME_ROWS:
        return _Tile(_copied_rows, 128, 256, 64, 8, 3)
    if len(weight) <= (8192 if count <= 128 else 4096):
        return _Tile(_few_rows, 128, 64, 128, 4, 4)
    return _Tile(_many_rows, 128, 128, 64, 8, 4)


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
