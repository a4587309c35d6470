"""Operations on every row by itself: sums, activations, norms, and rows that are chosen."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pagoda.backend.cuda.kernels.numbers import (
    blocks,
    hyperbolic_tangent,
    is_finite,
    power_of_two,
    sigmoid as sigmoid_of,
    silu,
    warps_of,
)

_BLOCK = 1024
"""Elements that a program of an element-wise operation computes."""


# ---- element by element


@triton.jit
def _one(x_ptr, out_ptr, count, number, op: tl.constexpr, block: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    x = tl.load(x_ptr + places, places < count, 0.0)
    if op == "scale":
        out = x * number
    elif op == "softcap":
        out = number * hyperbolic_tangent(x / number)
    elif op == "gelu":
        out = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
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
def _gated(
    x_ptr, out_ptr, width, alpha, limit, op: tl.constexpr, block: tl.constexpr
):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    there = columns < width
    if op == "swiglu_oai":
        gate = tl.load(x_ptr + row * 2 * width + 2 * columns, there, 0.0)
        up = tl.load(x_ptr + row * 2 * width + 2 * columns + 1, there, 0.0)
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        out = gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    else:
        gate = tl.load(x_ptr + row * 2 * width + columns, there, 0.0)
        up = tl.load(x_ptr + row * 2 * width + width + columns, there, 0.0)
        if op == "silu_and_mul":
            out = silu(gate) * up
        else:
            doubled = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
            out = gate / (1.0 + tl.exp(-doubled)) * up
    tl.store(out_ptr + row * width + columns, out, there)


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
        rows, width = out.shape
        block = min(_BLOCK, power_of_two(64, width))
        grid = (rows, blocks(width, block))
        _gated[grid](gate_up, out, width, alpha, limit, op=op, block=block)


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


def sigmoid(x: Tensor, out: Tensor) -> None:
    """1 / (1 + e^-x)."""
    _launch_one("sigmoid", x, out)


def silu_and_mul(gate_up: Tensor, out: Tensor) -> None:
    """silu(left half) times right half of [n, 2 d]."""
    _launch_gated("silu_and_mul", gate_up, out)


def gelu_and_mul(gate_up: Tensor, out: Tensor) -> None:
    """gelu(left half), by the hyperbolic tangent, times right half of [n, 2 d]."""
    _launch_gated("gelu_and_mul", gate_up, out)


def swiglu_oai(gate_up: Tensor, out: Tensor, *, alpha: float, limit: float) -> None:
    """SwiGLU of pairs (gate, up) in rows [n, 2 d], as gpt-oss has it."""
    _launch_gated("swiglu_oai", gate_up, out, alpha, limit)


# ---- norms


@triton.jit
def _rms_norm(
    x_ptr, delta_ptr, total_ptr, weight_ptr, out_ptr, eps, adds: tl.constexpr, width: tl.constexpr, block: tl.constexpr
):
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    there = columns < width
    x = tl.load(x_ptr + row * width + columns, there, 0.0)
    if adds:
        x += tl.load(delta_ptr + row * width + columns, there, 0.0)
        tl.store(total_ptr + row * width + columns, x, there)
    factor = tl.rsqrt(tl.sum(x * x) / width + eps)
    weight = tl.load(weight_ptr + columns, there, 0.0)
    tl.store(out_ptr + row * width + columns, x * factor * weight, there)


@triton.jit
def _layer_norm(
    x_ptr, weight_ptr, bias_ptr, out_ptr, eps, width: tl.constexpr, block: tl.constexpr
):
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    there = columns < width
    x = tl.load(x_ptr + row * width + columns, there, 0.0)
    centred = tl.where(there, x - tl.sum(x) / width, 0.0)
    factor = tl.rsqrt(tl.sum(centred * centred) / width + eps)
    weight = tl.load(weight_ptr + columns, there, 0.0)
    bias = tl.load(bias_ptr + columns, there, 0.0)
    tl.store(out_ptr + row * width + columns, centred * factor * weight + bias, there)


@triton.jit
def _gated_head_norm(
    x_ptr, gate_ptr, weight_ptr, out_ptr, eps, width: tl.constexpr, block: tl.constexpr
):
    head, columns = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    there = columns < width
    x = tl.load(x_ptr + head * width + columns, there, 0.0)
    gate = tl.load(gate_ptr + head * width + columns, there, 0.0)
    factor = tl.rsqrt(tl.sum(x * x) / width + eps)
    weight = tl.load(weight_ptr + columns, there, 0.0)
    tl.store(out_ptr + head * width + columns, x * factor * weight * silu(gate), there)


@triton.jit
def _sum_of_squares(
    qkv_ptr, out_ptr, width, queries: tl.constexpr, keys: tl.constexpr, block: tl.constexpr
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, count = part * queries, queries + part * (keys - queries)
    columns = tl.arange(0, block)
    x = tl.load(qkv_ptr + row * width + first + columns, columns < count, 0.0)
    tl.store(out_ptr + row * 2 + part, tl.sum(x * x))


@triton.jit
def _norm_by_squares(
    qkv_ptr, squares_ptr, query_ptr, key_ptr, out_ptr, width, all_queries, all_keys, eps,
    queries: tl.constexpr, keys: tl.constexpr, block: tl.constexpr,
):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    x = tl.load(qkv_ptr + row * width + columns, columns < width, 0.0)
    is_query, is_key = columns < queries, (columns >= queries) & (columns < queries + keys)
    by_query = tl.rsqrt(tl.load(squares_ptr + row * 2) / all_queries + eps)
    by_key = tl.rsqrt(tl.load(squares_ptr + row * 2 + 1) / all_keys + eps)
    normed_query = x * by_query * tl.load(query_ptr + columns, is_query, 0.0)
    normed_key = x * by_key * tl.load(key_ptr + columns - queries, is_key, 0.0)
    out = tl.where(is_query, normed_query, tl.where(is_key, normed_key, x))
    tl.store(out_ptr + row * width + columns, out, columns < width)


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
    rows, width = x.shape
    if rows:
        block = power_of_two(64, width)
        _rms_norm[(rows,)](
            x, delta, total, weight, out, eps,
            adds=delta is not None, width=width, block=block, num_warps=warps_of(block),
        )  # fmt: skip


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor, *, eps: float) -> None:
    """x [n, d] less its mean, over the root of its variance, times weight, plus bias [d]."""
    rows, width = x.shape
    if rows:
        block = power_of_two(64, width)
        _layer_norm[(rows,)](
            x, weight, bias, out, eps, width=width, block=block, num_warps=warps_of(block)
        )


def gated_head_norm(x: Tensor, gate: Tensor, weight: Tensor, out: Tensor, *, eps: float) -> None:
    """RMS norm of every head of x [n, heads d], by a weight [d], times the SiLU of `gate`."""
    width = len(weight)
    if x.numel():
        block = power_of_two(64, width)
        _gated_head_norm[(x.numel() // width,)](
            x, gate, weight, out, eps, width=width, block=block
        )


def sum_of_squares(qkv: Tensor, out: Tensor, *, queries: int, keys: int) -> None:
    """Sums of squares of the first `queries` elements of qkv [n, d], and of the `keys` behind them: [n, 2]."""
    rows, width = qkv.shape
    if rows:
        block = power_of_two(64, max(queries, keys))
        _sum_of_squares[(rows, 2)](
            qkv, out, width, queries=queries, keys=keys, block=block, num_warps=warps_of(block)
        )


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
    rows, width = qkv.shape
    if rows:
        block = min(_BLOCK, power_of_two(64, width))
        _norm_by_squares[(rows, blocks(width, block))](
            qkv, squares, query_norm, key_norm, out, width, float(all_queries), float(all_keys), eps,
            queries=len(query_norm), keys=len(key_norm), block=block,
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
def _select_rows(x_ptr, rows_ptr, out_ptr, width, block: tl.constexpr):
    place, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    row = tl.load(rows_ptr + place)
    x = tl.load(x_ptr + row * width + columns, columns < width, 0)
    tl.store(out_ptr + place * width + columns, x, columns < width)


@triton.jit
def _embedding(ids_ptr, table_ptr, out_ptr, first_id, outputs, width, block: tl.constexpr):
    place, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    own = tl.load(ids_ptr + place) - first_id
    there = (columns < width) & (own >= 0) & (own < outputs)
    x = tl.load(table_ptr + own * width + columns, there, 0.0).to(tl.float32)
    tl.store(out_ptr + place * width + columns, x, columns < width)


@triton.jit
def _argmax(logits_ptr, out_ptr, width, first_id, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * width
    highest, winner, broken = float("-inf"), 0, 0
    for start in range(0, width, block):
        columns = start + tl.arange(0, block)
        x = tl.load(logits_ptr + columns, columns < width, float("-inf"))
        broken += tl.sum((~is_finite(x) & (columns < width)).to(tl.int32))
        own = tl.max(x)
        place = tl.min(tl.where(x == own, columns, width))
        winner = tl.where(own > highest, place, winner)
        highest = tl.maximum(own, highest)
    winner = tl.minimum(winner, width - 1)  # past the end where all are NaN
    bits = tl.load(logits_ptr + winner).to(tl.int32, bitcast=True)
    tl.store(out_ptr + row * 3, winner.to(tl.int64) + first_id)
    tl.store(out_ptr + row * 3 + 1, bits.to(tl.int64))
    tl.store(out_ptr + row * 3 + 2, (broken == 0).to(tl.int64))


def select_rows(x: Tensor, rows: Tensor, out: Tensor) -> None:
    """Rows of x [n, d], or elements of x [n], by `rows` [m] int64."""
    if out.numel():
        width = out.numel() // len(out)
        block = min(_BLOCK, power_of_two(64, width))
        _select_rows[(len(out), blocks(width, block))](x, rows, out, width, block=block)


def embedding(token_ids: Tensor, table: Tensor, out: Tensor, *, first_id: int) -> None:
    """Rows of a table [v, d] of floats by ids [n] int64 from `first_id` on, as float32; zeros for other ids."""
    if out.numel():
        outputs, width = table.shape
        block = min(_BLOCK, power_of_two(64, width))
        _embedding[(len(out), blocks(width, block))](
            token_ids, table, out, first_id, outputs, width, block=block
        )


def argmax(logits: Tensor, out: Tensor, *, first_id: int) -> None:
    """Index plus `first_id`, bits and finiteness of each row's highest element: [n, 3] int64.

    Of equal ones the lowest index; see `GraphBuilder.linear_argmax`.
    """
    rows, width = logits.shape
    if rows:
        block = min(4096, power_of_two(64, width))
        _argmax[(rows,)](logits, out, width, first_id, block=block)
