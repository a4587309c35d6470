# SPDX-License-Identifier: Apache-2.0
"""Routed experts: the choice of each token's, rows sorted by expert into tiles, and products of tiles.

A tile has rows of one expert only, and rows of a tile do not meet: a token's bits do not depend on others. What
experts give is added up in the order of their numbers.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagoda.backend.base import ExpertActivation
from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.plugins.cuda.kernels.linear import (
    OUTPUTS,
    ROWS,
    add_product,
    numbers_of,
    numbers_of_fp8,
    product,
)
from pagoda.plugins.cuda.kernels.numbers import (
    UNFUSED,
    blocks,
    power_of_two,
    sigmoid,
    silu,
    triton_dtype,
)

_PAIRS = 1024
"""Pairs of a token and one of its experts that are looked at in one go."""
_BLOCK = 1024


@dataclass(frozen=True)
class ExpertScales:
    """Addresses of the scales of 8-bit floats; see `Fp8Weight`."""

    addresses: tuple[Tensor, Tensor, Tensor]
    """[e] int64 each, of scales float32 of gate, up and down."""
    sizes: tuple[int, int]
    """Inputs that share a scale, of gate and up, and of down."""


@dataclass(frozen=True)
class ExpertWeights:
    """Addresses of the weights of the experts `first` to `first + e - 1`, all of one dtype and shape."""

    gate: Tensor
    """[e] int64, addresses of weights [inner, hidden]."""
    up: Tensor
    down: Tensor
    """[e] int64, addresses of weights [hidden, inner]."""
    dtype: torch.dtype
    """float32, float16 or bfloat16."""
    first: int
    inner: int
    gate_bias: Tensor | None = None
    """[e] int64, addresses of biases float32; all three are there, or none."""
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    scales: ExpertScales | None = None
    """Scales of weights of 8-bit floats, which are multiplied as those of `dtype` would be."""


@dataclass(frozen=True)
class Workspace:
    """Scratch for rows of a step, of all layers in turn."""

    chosen: Tensor
    """[n, experts_per_token] int32, numbers of a token's experts, ascending; -1 in rows of padding."""
    weights: Tensor
    """[n, experts_per_token] float32."""
    starts: Tensor
    """[e, 2] int32: first tile and number of rows of each expert that is held."""
    tiles: Tensor
    """[t] int32: the expert of each tile among those held, -1 for none."""
    order: Tensor
    """[t `linear.ROWS`] int32: the pair of each row of a tile, -1 for none."""
    inner: Tensor
    """[n experts_per_token, inner] float32."""
    outputs: Tensor
    """[n experts_per_token, hidden] float32."""

    @classmethod
    def new(
        cls, rows: int, hidden: int, inner: int, per_token: int, held: int, device: torch.device
    ) -> Workspace:
        """Scratch for up to `rows` tokens of `per_token` experts, of which `held` are held here."""
        pairs = rows * per_token
        tiles = blocks(pairs, ROWS) + min(held, pairs)

        def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            chosen=new(rows, per_token),
            weights=new(rows, per_token, dtype=torch.float32),
            starts=new(held, 2),
            tiles=new(tiles),
            order=new(tiles * ROWS),
            inner=new(pairs, inner, dtype=torch.float32),
            outputs=new(pairs, hidden, dtype=torch.float32),
        )


# ---- the choice


@triton.jit
def _first_of_best(x, columns, open_columns, count: tl.constexpr):
    """The first column of the highest of x [r, c] among open ones: [r]."""
    x = tl.where(x == x, x + 0.0, float("inf"))
    bits = x.to(tl.int32, bitcast=True)
    order = tl.where(open_columns, bits ^ ((bits >> 31) & 0x7FFFFFFF), -2147483648)
    best = tl.max(order, 1)
    return tl.min(tl.where(open_columns & (order == best[:, None]), columns[None, :], count), 1)


@triton.jit
def _route(
    logits_ptr, correction_ptr, chosen_ptr, weights_ptr, valid_ptr, num_rows, factor,
    experts: tl.constexpr, per_token: tl.constexpr, groups: tl.constexpr, groups_per_token: tl.constexpr,
    best_two: tl.constexpr, softmax: tl.constexpr, corrected: tl.constexpr, renormalize: tl.constexpr,
    has_valid: tl.constexpr, rows: tl.constexpr, width: tl.constexpr, group_width: tl.constexpr,
):  # fmt: skip
    row, columns = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows), tl.arange(0, width)
    there, known = row < num_rows, columns < experts
    loaded = there[:, None] & known[None, :]
    x = tl.load(logits_ptr + row[:, None] * experts + columns[None, :], loaded, float("-inf"))
    if softmax:
        exponents = tl.exp(x - tl.max(x, 1)[:, None])
        scores = exponents / tl.sum(exponents, 1)[:, None]
    else:
        scores = sigmoid(x)
    values = x
    if corrected:
        values = scores + tl.load(correction_ptr + columns, known, 0.0)[None, :]
    elif groups > 1 and best_two:
        values = scores
    left = loaded
    if groups > 1:
        size: tl.constexpr = experts // groups
        group_columns = tl.arange(0, group_width)
        of_groups = tl.zeros([rows, group_width], tl.float32)
        for group in range(groups):
            own = loaded & ((columns // size) == group)[None, :]
            first = _first_of_best(values, columns, own, experts)
            score = tl.sum(tl.where(columns[None, :] == first[:, None], values, 0.0), 1)
            if best_two:
                own = own & (columns[None, :] != first[:, None])
                second = _first_of_best(values, columns, own, experts)
                score += tl.sum(tl.where(columns[None, :] == second[:, None], values, 0.0), 1)
            of_groups = tl.where((group_columns == group)[None, :], score[:, None], of_groups)
        open_groups = there[:, None] & (group_columns < groups)[None, :]
        left = columns[None, :] + row[:, None] < 0
        for _ in range(groups_per_token):
            picked = _first_of_best(of_groups, group_columns, open_groups, groups)
            open_groups = open_groups & (group_columns[None, :] != picked[:, None])
            left = left | (loaded & ((columns // size)[None, :] == picked[:, None]))
    taken = columns[None, :] + row[:, None] < 0
    for _ in range(per_token):
        best = _first_of_best(values, columns, left & ~taken, experts)
        taken = taken | (columns[None, :] == best[:, None])
    total = tl.sum(tl.where(taken, scores, 0.0), 1) + 1e-20
    counted = there
    if has_valid:
        counted = row < tl.load(valid_ptr)
    for place in range(per_token):
        expert = tl.min(tl.where(taken, columns[None, :], experts), 1)
        taken = taken & (columns[None, :] != expert[:, None])
        weight = tl.sum(tl.where(columns[None, :] == expert[:, None], scores, 0.0), 1)
        if renormalize:
            weight = weight / total
        places = row * per_token + place
        tl.store(chosen_ptr + places, tl.where(counted, expert, -1), there)
        tl.store(weights_ptr + places, weight * factor, there)


# ---- rows sorted by expert


@triton.jit
def _count(chosen_ptr, counts_ptr, starts_ptr, pairs, first, held, block: tl.constexpr):
    """Tokens of one expert: added to the counts, and kept for those that are held."""
    expert = tl.program_id(0)
    total = tl.zeros([block], tl.int32)
    for start in range(0, pairs, block):
        places = start + tl.arange(0, block)
        total += (tl.load(chosen_ptr + places, places < pairs, -1) == expert).to(tl.int32)
    count = tl.sum(total)
    tl.store(counts_ptr + expert, tl.load(counts_ptr + expert) + count)
    own = expert - first
    tl.store(starts_ptr + own * 2 + 1, count, (own >= 0) & (own < held))


@triton.jit
def _first_tiles(
    starts_ptr,
    tiles_ptr,
    held,
    num_tiles,
    rows: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    expert = tl.arange(0, width)
    count = tl.load(starts_ptr + expert * 2 + 1, expert < held, 0)
    taken = (count + rows - 1) // rows
    tl.store(starts_ptr + expert * 2, tl.cumsum(taken, 0) - taken, expert < held)
    for start in range(0, num_tiles, block):
        tile = start + tl.arange(0, block)
        tl.store(tiles_ptr + tile, tl.full([block], -1, tl.int32), tile < num_tiles)


@triton.jit
def _sort(
    chosen_ptr,
    starts_ptr,
    tiles_ptr,
    order_ptr,
    pairs,
    first,
    rows: tl.constexpr,
    block: tl.constexpr,
):
    """Pairs of one expert into its tiles, in their order."""
    own = tl.program_id(0)
    first_tile, count = tl.load(starts_ptr + own * 2), tl.load(starts_ptr + own * 2 + 1)
    done = 0
    for start in range(0, pairs, block):
        places = start + tl.arange(0, block)
        match = (tl.load(chosen_ptr + places, places < pairs, -1) == own + first).to(tl.int32)
        rank = done + tl.cumsum(match, 0) - match
        tl.store(order_ptr + first_tile * rows + rank, places, match > 0)
        done += tl.sum(match)
    num_tiles = (count + rows - 1) // rows
    rest = count + tl.arange(0, rows)
    tl.store(
        order_ptr + first_tile * rows + rest, tl.full([rows], -1, tl.int32), rest < num_tiles * rows
    )
    for tile in range(0, num_tiles):
        tl.store(tiles_ptr + first_tile + tile, own)


# ---- products


@triton.jit
def _gate_and_up(
    x_ptr, gates_ptr, ups_ptr, gate_scales_ptr, up_scales_ptr, gate_biases_ptr, up_biases_ptr, weights_ptr,
    tiles_ptr, order_ptr, inner_ptr, num_outputs, alpha, limit,
    per_token: tl.constexpr, inputs: tl.constexpr, size: tl.constexpr, biased: tl.constexpr, weighs: tl.constexpr,
    clipped: tl.constexpr, dtype: tl.constexpr, products: tl.constexpr, precision: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    expert = tl.load(tiles_ptr + tile)
    if expert >= 0:
        pair = tl.load(order_ptr + tile * rows + tl.arange(0, rows)).to(tl.int64)
        outputs = tl.program_id(0) * columns + tl.arange(0, columns)
        there, held = pair >= 0, outputs < num_outputs
        firsts = pair // per_token * inputs
        gate_ptr = tl.load(gates_ptr + expert).to(tl.pointer_type(dtype))
        up_ptr = tl.load(ups_ptr + expert).to(tl.pointer_type(dtype))
        gate_scales, up_scales = None, None
        if size > 0:
            gate_scales = tl.load(gate_scales_ptr + expert).to(tl.pointer_type(tl.float32))
            up_scales = tl.load(up_scales_ptr + expert).to(tl.pointer_type(tl.float32))
        gate = tl.zeros([rows, columns], tl.float32)
        up = tl.zeros([rows, columns], tl.float32)
        factors = tl.load(weights_ptr + pair, there, 0.0)
        for start in range(0, inputs, step):
            places = start + tl.arange(0, step)
            known = places < inputs
            x = tl.load(
                x_ptr + firsts[:, None] + places[None, :], there[:, None] & known[None, :], 0.0
            )
            if weighs:
                x = x * factors[:, None]
            x = x.to(products)
            own, taken = (
                outputs.to(tl.int64)[None, :] * inputs + places[:, None],
                held[None, :] & known[:, None],
            )
            gate = add_product(
                gate, x, tl.load(gate_ptr + own, taken, 0.0), gate_scales, outputs, held, start,
                inputs, size, products, precision,
            )  # fmt: skip
            up = add_product(
                up, x, tl.load(up_ptr + own, taken, 0.0), up_scales, outputs, held, start,
                inputs, size, products, precision,
            )  # fmt: skip
        if biased:
            gate_bias = tl.load(gate_biases_ptr + expert).to(tl.pointer_type(tl.float32))
            up_bias = tl.load(up_biases_ptr + expert).to(tl.pointer_type(tl.float32))
            gate += tl.load(gate_bias + outputs, held, 0.0)[None, :]
            up += tl.load(up_bias + outputs, held, 0.0)[None, :]
        if clipped:
            gate = tl.where(gate > limit, limit, gate)
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
            out = gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
        else:
            out = silu(gate) * up
        tl.store(
            inner_ptr + pair[:, None] * num_outputs + outputs[None, :],
            out,
            there[:, None] & held[None, :],
        )


@triton.jit
def _down(
    inner_ptr, downs_ptr, scales_ptr, biases_ptr, weights_ptr, tiles_ptr, order_ptr, outputs_ptr, num_outputs,
    inputs: tl.constexpr, size: tl.constexpr, biased: tl.constexpr, weighs: tl.constexpr,
    dtype: tl.constexpr, products: tl.constexpr, precision: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    expert = tl.load(tiles_ptr + tile)
    if expert >= 0:
        pair = tl.load(order_ptr + tile * rows + tl.arange(0, rows)).to(tl.int64)
        outputs = tl.program_id(0) * columns + tl.arange(0, columns)
        there, held = pair >= 0, outputs < num_outputs
        weight_ptr = tl.load(downs_ptr + expert).to(tl.pointer_type(dtype))
        scales = None
        if size > 0:
            scales = tl.load(scales_ptr + expert).to(tl.pointer_type(tl.float32))
        out = product(
            inner_ptr,
            pair * inputs,
            there,
            weight_ptr,
            scales,
            outputs,
            num_outputs,
            inputs,
            size,
            products,
            precision,
            step,
        )
        if biased:
            bias = tl.load(biases_ptr + expert).to(tl.pointer_type(tl.float32))
            out += tl.load(bias + outputs, held, 0.0)[None, :]
        if not weighs:
            out = out * tl.load(weights_ptr + pair, there, 0.0)[:, None]
        tl.store(
            outputs_ptr + pair[:, None] * num_outputs + outputs[None, :],
            out,
            there[:, None] & held[None, :],
        )


@triton.jit
def _add_up(
    outputs_ptr,
    chosen_ptr,
    out_ptr,
    count,
    width,
    first,
    held,
    per_token: tl.constexpr,
    block: tl.constexpr,
):
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    row, column = places // width, places % width
    total = tl.zeros([block], tl.float32)
    for place in range(per_token):
        pair = row * per_token + place
        own = tl.load(chosen_ptr + pair, places < count, -1) - first
        here = (own >= 0) & (own < held)
        total += tl.load(outputs_ptr + pair * width + column, here, 0.0)
    tl.store(out_ptr + places, total, places < count)


def route(
    logits: Tensor,
    workspace: Workspace,
    *,
    routing: ExpertRouting,
    correction: Tensor | None = None,
    valid: Tensor | None = None,
) -> None:
    """Numbers and weights of the experts of each row of logits [n, num_experts], as `reference.experts.routed`."""
    num_rows, width = len(logits), power_of_two(16, routing.num_experts)
    rows = max(1, 2048 // width)
    _route[(blocks(num_rows, rows),)](
        logits, correction, workspace.chosen, workspace.weights, valid, num_rows, routing.scaling_factor,
        experts=routing.num_experts, per_token=routing.experts_per_token, groups=routing.num_groups,
        groups_per_token=routing.groups_per_token, best_two=routing.group_score == "best_two",
        softmax=routing.scores == "softmax", corrected=correction is not None,
        renormalize=routing.renormalize, has_valid=valid is not None, rows=rows, width=width,
        group_width=power_of_two(2, routing.num_groups), **UNFUSED,
    )  # fmt: skip


def sort_rows(
    workspace: Workspace, counts: Tensor, *, num_rows: int, per_token: int, first: int, held: int
) -> int:
    """Sorts rows by the experts that were chosen, of which `held` from `first` on are here, into tiles.

    Tokens of each expert are added to `counts` [num_experts] int64. Returns the number of tiles that there may be.
    """
    pairs, tiles = num_rows * per_token, workspace.tiles
    num_tiles = blocks(pairs, ROWS) + min(held, pairs)
    chosen, starts, order = workspace.chosen, workspace.starts, workspace.order
    _count[(len(counts),)](chosen, counts, starts, pairs, first, held, block=_PAIRS)
    _first_tiles[(1,)](
        starts, tiles, held, num_tiles, rows=ROWS, width=power_of_two(2, held), block=_PAIRS
    )
    _sort[(held,)](chosen, starts, tiles, order, pairs, first, rows=ROWS, block=_PAIRS)
    return num_tiles


def add_up(workspace: Workspace, out: Tensor, *, per_token: int, first: int, held: int) -> None:
    """Adds up what the experts of each token give, in the order of their numbers: out [n, hidden]."""
    _add_up[(blocks(out.numel(), _BLOCK),)](
        workspace.outputs, workspace.chosen, out, out.numel(), out.shape[1], first, held,
        per_token=per_token, block=_BLOCK, **UNFUSED,
    )  # fmt: skip


def experts(
    x: Tensor,
    logits: Tensor,
    out: Tensor,
    weights: ExpertWeights,
    workspace: Workspace,
    *,
    routing: ExpertRouting,
    activation: ExpertActivation,
    counts: Tensor,
    correction: Tensor | None = None,
    valid: Tensor | None = None,
) -> None:
    """Sends rows of x [n, hidden] through their experts; see `GraphBuilder.experts`.

    Tokens of each expert are added to `counts` [num_experts] int64. Rows from `valid` [1] int64 on are padding:
    their `out` is 0, and they are not counted.
    """
    if not len(x):
        return
    hidden, per_token, held = x.shape[1], routing.experts_per_token, len(weights.gate)
    route(logits, workspace, routing=routing, correction=correction, valid=valid)
    num_tiles = sort_rows(
        workspace, counts, num_rows=len(x), per_token=per_token, first=weights.first, held=held
    )
    tiles, order = workspace.tiles, workspace.order
    biased = weights.gate_bias is not None
    kinds = {
        "biased": biased,
        "weighs": routing.weighs_inputs,
        "dtype": triton_dtype(weights.dtype),
        "rows": ROWS,
        "columns": OUTPUTS,
        **numbers_of(weights.dtype),
    }
    scales: Sequence[Tensor | None] = (None, None, None)
    sizes = (0, 0)
    if weights.scales is not None:
        scales, sizes = weights.scales.addresses, weights.scales.sizes
        kinds |= {"dtype": tl.uint8, **numbers_of_fp8(weights.dtype, sizes)}
    _gate_and_up[(blocks(weights.inner, OUTPUTS), num_tiles)](
        x, weights.gate, weights.up, *scales[:2], weights.gate_bias, weights.up_bias, workspace.weights, tiles,
        order, workspace.inner, weights.inner, activation.alpha, activation.limit,
        per_token=per_token, inputs=hidden, size=sizes[0], clipped=activation.kind == "swiglu_oai", **kinds,
    )  # fmt: skip
    _down[(blocks(hidden, OUTPUTS), num_tiles)](
        workspace.inner, weights.down, scales[2], weights.down_bias, workspace.weights, tiles, order,
        workspace.outputs, hidden, inputs=weights.inner, size=sizes[1], **kinds,
    )  # fmt: skip
    add_up(workspace, out, per_token=per_token, first=weights.first, held=held)
