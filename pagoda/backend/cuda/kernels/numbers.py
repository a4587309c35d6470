"""Numbers that kernels share: rounding, and sizes of tiles."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

UNFUSED = {"enable_fp_fusion": False}
"""Options of launches whose products must not be joined with sums: the reference rounds both."""


@triton.jit
def rounded(x):
    """x float32 rounded half to even; magnitudes are below 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def is_finite(x):
    """True where x is neither infinite nor NaN."""
    return x - x == 0.0


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x) of float32."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    """x / (1 + e^-x) of float32."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """log(1 + e^x) of float32, by a series where e^x would be lost beside 1."""
    grown = tl.exp(x)
    low = grown * (1.0 - grown * (0.5 - grown * (1.0 / 3.0 - grown * (0.25 - grown * 0.2))))
    return tl.where(x > 20.0, x, tl.where(grown < 0.06, low, tl.log(1.0 + grown)))


@triton.jit
def hyperbolic_tangent(x):
    """tanh(x) of float32, by a series near 0, where the quotient would cancel."""
    decay = tl.exp(-2.0 * tl.abs(x))
    high = (1.0 - decay) / (1.0 + decay)
    high = tl.where(x < 0.0, -high, high)
    square = x * x
    low = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0)))
    return tl.where(tl.abs(x) < 0.06, low, tl.where(x == x, high, x))


def power_of_two(least: int, count: int) -> int:
    """The least power of two that is at least both."""
    return 1 << (max(least, count, 1) - 1).bit_length()


def warps_of(block: int) -> int:
    """Warps that a row of `block` elements is shared out to."""
    return 4 if block <= 2048 else 8 if block <= 8192 else 16


def blocks(count: int, block: int) -> int:
    """Number of blocks that hold `count` elements."""
    return -(-count // block)


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    """The dtype of products as kernels name it."""
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[
        dtype
    ]
