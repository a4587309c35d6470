# SPDX-License-Identifier: Apache-2.0
"""Operations on every row by itself: sums, activations, norms, and rows that are chosen."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from collections.abc import Callable, Mapping

import triton
import triton.language as tl
from torch import Tensor

from pagoda.plugins.cuda.kernels.numbers import (
    blocks,
    hyperbolic_tangent,
    is_finite,
    power_of_two,
    warps_of,
)
from pagoda.plugins.cuda.kernels.numbers import (
    sigmoid as sigmoid_of,
)
from pagoda.plugins.cuda.kernels.numbers import (
    silu as silu_of,
)

_BLOCK = 1024
"""Elements that a program of an element-wise operation computes."""


# ---- element by element


@triton.jit
def _gelu(x):
    return x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _gelu_tanh(x):
    return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit
def _one(x_ptr, out_ptr, count, number, op: tl.constexpr, block: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    x = tl.load(x_ptr + places, places < count, 0.0)
    if op == "scale":
        out = x * number
    elif op == "softcap":
        out = number * hyperbolic_tangent(x / number)
    elif op == "gelu":
        out = _gelu(x)
    elif op == "gelu_tanh":
        out = _gelu_tanh(x)
    elif op == "silu":
        out = silu_of(x)
    elif op == "relu":
        out = tl.where(x < 0.0, 0.0, x)
    else:
        out = sigmoid_of(x)
    tl.store(out_ptr + places, out, places < count)


@triton.jit
def _two(x_ptr, y_ptr, out_ptr, count, width, op: tl.constexpr, block: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    x = tl.load(x_ptr + places, places < count, 0.0)
    others = places // width if op == "scale_rows" else places
    y = tl.load(y_ptr + others, places < count, 0.0)
    tl.store(out_ptr + places, x + y if op == "add" else x * y, places < count)


@triton.jit
def _gated(x_ptr, out_ptr, count, width, alpha, limit, op: tl.constexpr, block: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    there, row, column = places < count, places // width, places % width
    if op == "swiglu_oai":
        gate = tl.load(x_ptr + 2 * places, there, 0.0)
        up = tl.load(x_ptr + 2 * places + 1, there, 0.0)
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        out = gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    else:
        gate = tl.load(x_ptr + row * 2 * width + column, there, 0.0)
        up = tl.load(x_ptr + row * 2 * width + width + column, there, 0.0)
        if op == "silu_and_mul":
            out = silu_of(gate) * up
        elif op == "gelu_erf_and_mul":
            out = _gelu(gate) * up
        else:
            out = _gelu_tanh(gate) * up
    tl.store(out_ptr + places, out, there)


def _launch_one(op: str, x: Tensor, out: Tensor, number: float = 0.0) -> None:
    if x.numel():
        _one[(blocks(x.numel(), _BLOCK),)](x, out, x.numel(), number, op=op, block=_BLOCK)


def _launch_two(op: str, x: Tensor, y: Tensor, out: Tensor) -> None:
    if x.numel():
        count, width = x.numel(), x.numel() // len(x)
        _two[(blocks(count, _BLOCK),)](x, y, out, count, width, op=op, block=_BLOCK)


def _launch_gated(
    op: str, gate_up: Tensor, out: Tensor, alpha: float = 0.0, limit: float = 0.0
) -> None:
    if out.numel():
        count, width = out.numel(), out.shape[1]
        grid = (blocks(count, _BLOCK),)
        _gated[grid](gate_up, out, count, width, alpha, limit, op=op, block=_BLOCK)


def add(x: Tensor, delta: Tensor, out: Tensor) -> None:
    """x + delta; `out` may be either."""
    _launch_two("add", x, delta, out)


def mul(x: Tensor, factor: Tensor, out: Tensor) -> None:
    """x times factor, element by element."""
    _launch_two("mul", x, factor, out)


def scale_rows(x: Tensor, factors: Tensor, out: Tensor) -> None:
    """Rows of x [n, d] times factors [n, 1]."""
    _launch_two("scale_rows", x, factors, out)


def scale(x: Tensor, out: Tensor, *, factor: float) -> None:
    """x times a number."""
    _launch_one("scale", x, out, factor)


def softcap(x: Tensor, out: Tensor, *, cap: float) -> None:
    """cap tanh(x / cap)."""
    _launch_one("softcap", x, out, cap)


def gelu(x: Tensor, out: Tensor) -> None:
    """x/2 (1 + erf(x / sqrt(2)))."""
    _launch_one("gelu", x, out)


def gelu_tanh(x: Tensor, out: Tensor) -> None:
    """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    _launch_one("gelu_tanh", x, out)


def silu(x: Tensor, out: Tensor) -> None:
    """x / (1 + e^-x)."""
    _launch_one("silu", x, out)


def relu(x: Tensor, out: Tensor) -> None:
    """x where it is above 0, else 0."""
    _launch_one("relu", x, out)


def sigmoid(x: Tensor, out: Tensor) -> None:
    """1 / (1 + e^-x)."""
    _launch_one("sigmoid", x, out)


def silu_and_mul(gate_up: Tensor, out: Tensor) -> None:
    """silu(left half) times right half of [n, 2 d]."""
    _launch_gated("silu_and_mul", gate_up, out)


def gelu_and_mul(gate_up: Tensor, out: Tensor) -> None:
    """gelu(left half), by the hyperbolic tangent, times right half of [n, 2 d]."""
    _launch_gated("gelu_and_mul", gate_up, out)


def gelu_erf_and_mul(gate_up: Tensor, out: Tensor) -> None:
    """gelu(left half), by the error function, times right half of [n, 2 d]."""
    _launch_gated("gelu_erf_and_mul", gate_up, out)


def swiglu_oai(gate_up: Tensor, out: Tensor, *, alpha: float, limit: float) -> None:
    """SwiGLU of pairs (gate, up) in rows [n, 2 d], as gpt-oss has it."""
    _launch_gated("swiglu_oai", gate_up, out, alpha, limit)


# ---- norms


@triton.jit
def _rms_norm(
    x_ptr, delta_ptr, total_ptr, weight_ptr, out_ptr, num_rows, eps,
    adds: tl.constexpr, width: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row, columns = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows), tl.arange(0, block)
    there = (row < num_rows)[:, None] & (columns < width)[None, :]
    places = row[:, None] * width + columns[None, :]
    x = tl.load(x_ptr + places, there, 0.0)
    if adds:
        x += tl.load(delta_ptr + places, there, 0.0)
        tl.store(total_ptr + places, x, there)
    factors = tl.rsqrt(tl.sum(x * x, 1) / width + eps)[:, None]
    weight = tl.load(weight_ptr + columns, columns < width, 0.0)[None, :]
    tl.store(out_ptr + places, x * factors * weight, there)


@triton.jit
def _layer_norm(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, eps,
    width: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row, columns = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows), tl.arange(0, block)
    there = (row < num_rows)[:, None] & (columns < width)[None, :]
    places = row[:, None] * width + columns[None, :]
    x = tl.load(x_ptr + places, there, 0.0)
    centred = tl.where(there, x - (tl.sum(x, 1) / width)[:, None], 0.0)
    factors = tl.rsqrt(tl.sum(centred * centred, 1) / width + eps)[:, None]
    weight = tl.load(weight_ptr + columns, columns < width, 0.0)[None, :]
    bias = tl.load(bias_ptr + columns, columns < width, 0.0)[None, :]
    tl.store(out_ptr + places, centred * factors * weight + bias, there)


@triton.jit
def _gated_head_norm(
    x_ptr, gate_ptr, weight_ptr, out_ptr, num_rows, eps,
    width: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row, columns = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows), tl.arange(0, block)
    there = (row < num_rows)[:, None] & (columns < width)[None, :]
    places = row[:, None] * width + columns[None, :]
    x = tl.load(x_ptr + places, there, 0.0)
    gate = tl.load(gate_ptr + places, there, 0.0)
    factors = tl.rsqrt(tl.sum(x * x, 1) / width + eps)[:, None]
    weight = tl.load(weight_ptr + columns, columns < width, 0.0)[None, :]
    tl.store(out_ptr + places, x * factors * weight * silu_of(gate), there)


@triton.jit
def _sum_of_squares(
    qkv_ptr, out_ptr, num_rows, width,
    queries: tl.constexpr, keys: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows), tl.program_id(1)
    columns = tl.arange(0, block)
    first, count = part * queries, queries + part * (keys - queries)
    there = (row < num_rows)[:, None] & (columns < count)[None, :]
    x = tl.load(qkv_ptr + row[:, None] * width + first + columns[None, :], there, 0.0)
    tl.store(out_ptr + row * 2 + part, tl.sum(x * x, 1), row < num_rows)


@triton.jit
def _norm_by_squares(
    qkv_ptr, squares_ptr, query_ptr, key_ptr, out_ptr, count, width, all_queries, all_keys, eps,
    queries: tl.constexpr, keys: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    there, row, column = places < count, places // width, places % width
    x = tl.load(qkv_ptr + places, there, 0.0)
    is_query, is_key = column < queries, (column >= queries) & (column < queries + keys)
    by_query = tl.rsqrt(tl.load(squares_ptr + row * 2, there, 0.0) / all_queries + eps)
    by_key = tl.rsqrt(tl.load(squares_ptr + row * 2 + 1, there, 0.0) / all_keys + eps)
    normed_query = x * by_query * tl.load(query_ptr + column, there & is_query, 0.0)
    normed_key = x * by_key * tl.load(key_ptr + column - queries, there & is_key, 0.0)
    out = tl.where(is_query, normed_query, tl.where(is_key, normed_key, x))
    tl.store(out_ptr + places, out, there)


def _grid(num_rows: int, width: int) -> tuple[tuple[int], dict[str, int]]:
    """Programs of whole rows, and sizes of their blocks, which depend on the width alone."""
    block = power_of_two(64, width)
    rows = max(1, 2048 // block)
    return (blocks(num_rows, rows),), {"rows": rows, "block": block, "num_warps": warps_of(block)}


def rms_norm(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    eps: float,
    delta: Tensor | None = None,
    total: Tensor | None = None,
) -> None:
    """x [n, d] over the root of its mean square, times weight [d].

    With `delta` [n, d], `total` becomes x + delta, and `out` the norm of that; `total` may be x or `delta`.
    """
    width = len(weight)
    if len(x):
        grid, sizes = _grid(len(x), width)
        adds = delta is not None
        _rms_norm[grid](x, delta, total, weight, out, len(x), eps, adds=adds, width=width, **sizes)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor, *, eps: float) -> None:
    """x [n, d] less its mean, over the root of its variance, times weight, plus bias [d]."""
    width = len(weight)
    if len(x):
        grid, sizes = _grid(len(x), width)
        _layer_norm[grid](x, weight, bias, out, len(x), eps, width=width, **sizes)


def gated_head_norm(x: Tensor, gate: Tensor, weight: Tensor, out: Tensor, *, eps: float) -> None:
    """RMS norm of every head of x [n, heads d], by a weight [d], times the SiLU of `gate`."""
    width = len(weight)
    if x.numel():
        count = x.numel() // width
        grid, sizes = _grid(count, width)
        _gated_head_norm[grid](x, gate, weight, out, count, eps, width=width, **sizes)


def sum_of_squares(qkv: Tensor, out: Tensor, *, queries: int, keys: int) -> None:
    """Sums of squares of the first `queries` elements of qkv [n, d], and of the `keys` behind them: [n, 2]."""
    if len(qkv):
        (programs,), sizes = _grid(len(qkv), max(queries, keys))
        parts = {"queries": queries, "keys": keys}
        _sum_of_squares[(programs, 2)](qkv, out, len(qkv), qkv.shape[1], **parts, **sizes)


def norm_by_squares(
    qkv: Tensor,
    squares: Tensor,
    query_norm: Tensor,
    key_norm: Tensor,
    out: Tensor,
    *,
    all_queries: int,
    all_keys: int,
    eps: float,
) -> None:
    """RMS norms of queries, and of keys, of qkv [n, d] by their sums of squares [n, 2]."""
    count, width = qkv.numel(), qkv.shape[1]
    if count:
        _norm_by_squares[(blocks(count, _BLOCK),)](
            qkv, squares, query_norm, key_norm, out, count, width, float(all_queries), float(all_keys), eps,
            queries=len(query_norm), keys=len(key_norm), block=_BLOCK,
        )  # fmt: skip


# ---- positions


@triton.jit
def _position_scale(positions_ptr, out_ptr, count, period, factor, offset, block: tl.constexpr):
    places = tl.program_id(0) * block + tl.arange(0, block)
    positions = tl.load(positions_ptr + places, places < count, 0).to(tl.float32)
    periods = tl.floor((positions + offset) / period)
    tl.store(out_ptr + places, tl.log(periods + 1.0) * factor + 1.0, places < count)


@triton.jit
def _rotary_table(
    positions_ptr, frequencies_ptr, cosines_ptr, sines_ptr, count, half, factor, block: tl.constexpr
):
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    there = places < count
    positions = tl.load(positions_ptr + places // half, there, 0).to(tl.float32)
    angles = positions * tl.load(frequencies_ptr + places % half, there, 0.0)
    tl.store(cosines_ptr + places, tl.cos(angles) * factor, there)
    tl.store(sines_ptr + places, tl.sin(angles) * factor, there)


def position_scale(
    positions: Tensor, out: Tensor, *, period: float, factor: float, offset: float
) -> None:
    """1 + factor log(1 + floor((position + offset) / period)) of positions [n] int64: [n, 1]."""
    if len(positions):
        block = 256
        grid = (blocks(len(positions), block),)
        _position_scale[grid](positions, out, len(positions), period, factor, offset, block=block)


def rotary_table(
    positions: Tensor, frequencies: Tensor, cosines: Tensor, sines: Tensor, *, scale: float
) -> None:
    """Cosines and sines [n, h] of positions [n] int64 times frequencies [h], times `scale`."""
    count, half = cosines.numel(), len(frequencies)
    if count:
        block = 256
        _rotary_table[(blocks(count, block),)](
            positions, frequencies, cosines, sines, count, half, scale, block=block
        )


# ---- rows that are chosen


@triton.jit
def _select_rows(x_ptr, rows_ptr, out_ptr, count, width, block: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    row = tl.load(rows_ptr + places // width, places < count, 0)
    x = tl.load(x_ptr + row * width + places % width, places < count, 0)
    tl.store(out_ptr + places, x, places < count)


@triton.jit
def _embedding(ids_ptr, table_ptr, out_ptr, count, first_id, outputs, width, block: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    own = tl.load(ids_ptr + places // width, places < count, 0) - first_id
    there = (places < count) & (own >= 0) & (own < outputs)
    x = tl.load(table_ptr + own * width + places % width, there, 0.0).to(tl.float32)
    tl.store(out_ptr + places, x, places < count)


@triton.jit
def _argmax(
    logits_ptr, out_ptr, num_rows, width, first_id, rows: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    highest = tl.full([rows], float("-inf"), tl.float32)
    winner = tl.zeros([rows], tl.int32)
    broken = tl.zeros([rows], tl.int32)
    for start in range(0, width, block):
        columns = start + tl.arange(0, block)
        there = (row < num_rows)[:, None] & (columns < width)[None, :]
        x = tl.load(logits_ptr + row[:, None] * width + columns[None, :], there, float("-inf"))
        broken += tl.sum((~is_finite(x) & there).to(tl.int32), 1)
        own = tl.max(x, 1)
        place = tl.min(tl.where(x == own[:, None], columns[None, :], width), 1)
        winner = tl.where(own > highest, place, winner)
        highest = tl.maximum(own, highest)
    winner = tl.minimum(winner, width - 1)  # past the end where all are NaN
    bits = tl.load(logits_ptr + row * width + winner, row < num_rows, 0.0).to(
        tl.int32, bitcast=True
    )
    tl.store(out_ptr + row * 3, winner.to(tl.int64) + first_id, row < num_rows)
    tl.store(out_ptr + row * 3 + 1, bits.to(tl.int64), row < num_rows)
    tl.store(out_ptr + row * 3 + 2, (broken == 0).to(tl.int64), row < num_rows)


def select_rows(x: Tensor, rows: Tensor, out: Tensor) -> None:
    """Rows of x [n, d], or elements of x [n], by `rows` [m] int64."""
    if out.numel():
        count, width = out.numel(), out.numel() // len(out)
        _select_rows[(blocks(count, _BLOCK),)](x, rows, out, count, width, block=_BLOCK)


def embedding(token_ids: Tensor, table: Tensor, out: Tensor, *, first_id: int) -> None:
    """Rows of a table [v, d] of floats by ids [n] int64 from `first_id` on, as float32; zeros for other ids."""
    if out.numel():
        count, (outputs, width) = out.numel(), table.shape
        _embedding[(blocks(count, _BLOCK),)](
            token_ids, table, out, count, first_id, outputs, width, block=_BLOCK
        )


def argmax(logits: Tensor, out: Tensor, *, first_id: int) -> None:
    """Index plus `first_id`, bits and finiteness of each row's highest element: [n, 3] int64.

    Of equal ones the lowest index; see `GraphBuilder.linear_argmax`.
    """
    num_rows, width = logits.shape
    if num_rows:
        block = min(16384, power_of_two(64, width))
        rows = max(1, 4096 // block)
        _argmax[(blocks(num_rows, rows),)](
            logits,
            out,
            num_rows,
            width,
            first_id,
            rows=rows,
            block=block,
            num_warps=warps_of(block),
        )


OPERATIONS: Mapping[str, Callable[..., None]] = {
    function.__name__: function
    for function in (
        add,
        rms_norm,
        silu_and_mul,
        gelu_and_mul,
        gelu_erf_and_mul,
        swiglu_oai,
        gelu,
        gelu_tanh,
        silu,
        relu,
        sigmoid,
        mul,
        scale,
        softcap,
        scale_rows,
        position_scale,
        sum_of_squares,
        norm_by_squares,
        layer_norm,
        gated_head_norm,
        rotary_table,
    )
}
"""Operations of a graph by name: functions of inputs, weights, outputs and those attributes that they name."""
WRITES_ANY = frozenset(
    {"rms_norm", "silu_and_mul", "gelu_and_mul", "gelu_erf_and_mul", "swiglu_oai"}
)
"""Operations whose output is written in any number format."""
