# SPDX-License-Identifier: Apache-2.0
"""Routed experts of weights of small integers: inputs are rounded before each map, as in linear layers.

Rows lie in tiles of one expert, as `experts` sorts them. One kernel multiplies the tiles of any map.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from pagoda.backend.base import ExpertActivation
from pagoda.backend.weights import BLOCK_INPUT_GROUP
from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.plugins.cuda.kernels import rows as row_kernels
from pagoda.plugins.cuda.kernels.block_weights import block_product, whole_rows_product
from pagoda.plugins.cuda.kernels.experts import Workspace, add_up, route, sort_rows
from pagoda.plugins.cuda.kernels.linear import OUTPUTS, ROWS
from pagoda.plugins.cuda.kernels.numbers import UNFUSED, blocks
from pagoda.plugins.cuda.kernels.quantized import (
    INPUTS,
    RoundedGroups,
    RoundedRows,
    grouped_product,
    int8_product,
    round_groups,
    round_rows,
)

_BLOCK = 1024
COLUMNS = 8
"""Addresses of an expert's map: its integers, or the lower plane of their bits; scales; zero points, offsets or
minima; bias; and of blocks the upper plane, the codebook, and the scales and minima of blocks."""


@dataclass(frozen=True)
class Form:
    """Constants of a format, for which the kernel is compiled; see `block_weights.constants_of`."""

    kind: Literal["rows", "groups", "blocks", "whole rows"]
    """Kind of weight: an `Int8Weight`, a `GroupedWeight`, or a `BlockWeight` without or with whole rows."""
    has_minima: bool
    """True if there are zero points, offsets or minima."""
    size: int = 0
    """Inputs that share a scale; 0 of an `Int8Weight`."""
    low: int = 8
    """Bits of a code, or those of its lower plane."""
    high: int = 0
    has_codebook: bool = False
    zero: int = 0
    has_blocks: bool = False
    per_block: int = 1

    @property
    def rounds(self) -> int:
        """Neighbouring inputs that are rounded by one scale; 0 where a row is."""
        sizes = {"groups": self.size, "blocks": BLOCK_INPUT_GROUP}
        return sizes.get(self.kind, 0)


@dataclass(frozen=True)
class QuantizedMap:
    """One map of each expert that is held, all of one format and shape."""

    addresses: Tensor
    """[e, `COLUMNS`] int64; 0 for what there is not."""
    outputs: int
    inputs: int
    form: Form
    has_bias: bool


@dataclass(frozen=True)
class QuantizedExperts:
    """The experts `first` to `first + e - 1`; gates and the maps beside them are of one format."""

    gate: QuantizedMap
    up: QuantizedMap
    down: QuantizedMap
    first: int

    @property
    def held(self) -> int:
        return len(self.gate.addresses)


@dataclass(frozen=True)
class Rounded:
    """Scratch for inputs of a step, beside `Workspace`."""

    inputs: RoundedRows | RoundedGroups
    """Room for the rows of a step, or one for each of their experts where `weighed` is there."""
    inner: RoundedRows | RoundedGroups
    """Room for a row for each token and each of its experts."""
    gate_up: Tensor
    """[n experts_per_token, 2 inner] float32."""
    weighed: Tensor | None
    """[n experts_per_token, hidden] float32, where inputs are weighed."""


@triton.jit
def _weigh(x_ptr, factors_ptr, out_ptr, count, width, per_token: tl.constexpr, block: tl.constexpr):
    """Each row once for each of its experts, times the weight of that."""
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    pair = places // width
    x = tl.load(x_ptr + pair // per_token * width + places % width, places < count, 0.0)
    tl.store(out_ptr + places, x * tl.load(factors_ptr + pair, places < count, 0.0), places < count)


@triton.jit
def _product_of_tiles(
    integers_ptr, high_integers_ptr, row_scales_ptr, sums_ptr, addresses_ptr, factors_ptr, tiles_ptr,
    order_ptr, out_ptr, num_outputs, out_stride, column_stride, num_columns,
    per_row: tl.constexpr, has_bias: tl.constexpr, has_factors: tl.constexpr, inputs: tl.constexpr,
    kind: tl.constexpr, has_minima: tl.constexpr, size: tl.constexpr, low: tl.constexpr, high: tl.constexpr,
    has_codebook: tl.constexpr, zero: tl.constexpr, has_blocks: tl.constexpr, per_block: tl.constexpr,
    part_size: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    expert = tl.load(tiles_ptr + tile)
    if expert >= 0:
        pair = tl.load(order_ptr + tile * rows + tl.arange(0, rows)).to(tl.int64)
        outputs = tl.program_id(0).to(tl.int64) * columns + tl.arange(0, columns)
        there, held, row = pair >= 0, outputs < num_outputs, pair // per_row
        own = addresses_ptr + expert * num_columns
        codes, scales, minima = tl.load(own), tl.load(own + 1), tl.load(own + 2)
        if kind == "rows":
            out = int8_product(
                integers_ptr, high_integers_ptr, row_scales_ptr, sums_ptr, row, there,
                codes.to(tl.pointer_type(tl.int8)), scales.to(tl.pointer_type(tl.float32)),
                minima.to(tl.pointer_type(tl.int32)), outputs, held, has_minima, inputs, step,
            )  # fmt: skip
        elif kind == "groups":
            out = grouped_product(
                integers_ptr, row_scales_ptr, sums_ptr, row, there,
                codes.to(tl.pointer_type(tl.uint8)), scales.to(tl.pointer_type(tl.float16)),
                minima.to(tl.pointer_type(tl.float16)), outputs, held, has_minima, inputs, low, size,
            )  # fmt: skip
        else:
            low_ptr = codes.to(tl.pointer_type(tl.uint8))
            high_ptr = tl.load(own + 4).to(tl.pointer_type(tl.uint8))
            codebook_ptr = tl.load(own + 5).to(tl.pointer_type(tl.int8))
            block_scales_ptr = tl.load(own + 6).to(tl.pointer_type(tl.float16))
            block_minima_ptr = tl.load(own + 7).to(tl.pointer_type(tl.float16))
            of_groups: tl.constexpr = tl.int8 if has_blocks else tl.float16
            scales_ptr = scales.to(tl.pointer_type(of_groups))
            minima_ptr = minima.to(tl.pointer_type(of_groups))
            if kind == "whole rows":
                out = whole_rows_product(
                    integers_ptr, high_integers_ptr, row_scales_ptr, row, there,
                    low_ptr, high_ptr, codebook_ptr, scales_ptr, minima_ptr, block_scales_ptr,
                    block_minima_ptr, outputs, held, low, high, has_codebook, zero, has_minima,
                    has_blocks, per_block, inputs, size,
                )  # fmt: skip
            else:
                out = block_product(
                    integers_ptr, row_scales_ptr, sums_ptr, row, there,
                    low_ptr, high_ptr, codebook_ptr, scales_ptr, minima_ptr, block_scales_ptr,
                    block_minima_ptr, outputs, held, low, high, has_codebook, zero, has_minima,
                    has_blocks, per_block, inputs, size, part_size,
                )  # fmt: skip
        if has_bias:
            bias_ptr = tl.load(own + 3).to(tl.pointer_type(tl.float32))
            out += tl.load(bias_ptr + outputs, held, 0.0)[None, :]
        if has_factors:
            out = out * tl.load(factors_ptr + pair, there, 0.0)[:, None]
        places = pair[:, None] * out_stride + outputs[None, :] * column_stride
        tl.store(out_ptr + places, out, there[:, None] & held[None, :])


def _round(x: Tensor, into: RoundedRows | RoundedGroups) -> None:
    if isinstance(into, RoundedRows):
        round_rows(x, into)
    else:
        round_groups(x, into)


def _multiply(
    x: RoundedRows | RoundedGroups,
    weights: QuantizedMap,
    workspace: Workspace,
    out: Tensor,
    *,
    num_tiles: int,
    per_row: int = 1,
    column_stride: int = 1,
    weighs: bool = False,
) -> None:
    """Rounded rows, each of `per_row` pairs, times the maps of their experts: rows of `out` by pair."""
    integers = (x.low, x.high) if isinstance(x, RoundedRows) else (x.values, None)
    _product_of_tiles[(blocks(weights.outputs, OUTPUTS), num_tiles)](
        *integers, x.scales, x.sums, weights.addresses, workspace.weights, workspace.tiles, workspace.order,
        out, weights.outputs, out.stride(0), column_stride, COLUMNS,
        per_row=per_row, has_bias=weights.has_bias, has_factors=weighs, inputs=weights.inputs,
        **asdict(weights.form), part_size=BLOCK_INPUT_GROUP, rows=ROWS, columns=OUTPUTS, step=INPUTS, **UNFUSED,
    )  # fmt: skip


def quantized_experts(
    x: Tensor,
    logits: Tensor,
    out: Tensor,
    weights: QuantizedExperts,
    workspace: Workspace,
    rounded: Rounded,
    *,
    routing: ExpertRouting,
    activation: ExpertActivation,
    counts: Tensor,
    correction: Tensor | None = None,
    valid: Tensor | None = None,
) -> None:
    """Sends rows of x [n, hidden] through their experts, as `experts` does."""
    if not len(x):
        return
    per_token, per_row = routing.experts_per_token, routing.experts_per_token
    route(logits, workspace, routing=routing, correction=correction, valid=valid)
    num_tiles = sort_rows(
        workspace,
        counts,
        num_rows=len(x),
        per_token=per_token,
        first=weights.first,
        held=weights.held,
    )
    given = x
    if rounded.weighed is not None:
        given, per_row = rounded.weighed, 1
        _weigh[(blocks(given.numel(), _BLOCK),)](
            x, workspace.weights, given, given.numel(), x.shape[1], per_token=per_token, block=_BLOCK
        )  # fmt: skip
    _round(given, rounded.inputs)
    inner, pairs = weights.gate.outputs, activation.kind == "swiglu_oai"
    for number, part in enumerate((weights.gate, weights.up)):
        _multiply(
            rounded.inputs,
            part,
            workspace,
            rounded.gate_up[:, number if pairs else number * inner :],
            num_tiles=num_tiles,
            per_row=per_row,
            column_stride=2 if pairs else 1,
        )
    if pairs:
        limits = {"alpha": activation.alpha, "limit": activation.limit}
        row_kernels.swiglu_oai(rounded.gate_up, workspace.inner, **limits)
    else:
        row_kernels.silu_and_mul(rounded.gate_up, workspace.inner)
    _round(workspace.inner, rounded.inner)
    _multiply(
        rounded.inner,
        weights.down,
        workspace,
        workspace.outputs,
        num_tiles=num_tiles,
        weighs=rounded.weighed is None,
    )
    add_up(workspace, out, per_token=per_token, first=weights.first, held=weights.held)
