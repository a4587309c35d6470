# SPDX-License-Identifier: Apache-2.0
"""Numbers that kernels share: rounding, and sizes of tiles."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from pagoda.backend.fp8 import E4M3

UNFUSED = {"enable_fp_fusion": False}
"""Options of launches whose products must not be joined with sums: the reference rounds both."""


@triton.jit
def rounded(x):
    """x float32 rounded half to even; magnitudes are below 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def to_e4m3(x):
    """Codes uint8 of x float32 in E4M3, rounded half to even; see `fp8.to_e4m3`.

    Integers make them: Triton's own conversion is not to be had on all GPUs, and its interpreter rounds otherwise.
    """
    sign = tl.where(x.to(tl.int32, bitcast=True) < 0, 128, 0)
    high = tl.minimum(tl.abs(x), 448.0)
    bits = high.to(tl.int32, bitcast=True)
    # Three bits of the mantissa stay, of an exponent whose bias is 7; below 2^-6 numbers are multiples of 2^-9.
    codes = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 120 * 8
    codes = tl.where(high < 0.015625, rounded(high * 512.0).to(tl.int32), codes)
    return (sign | tl.where(x == x, codes, 127)).to(tl.uint8)


@triton.jit
def from_e4m3(codes, dtype: tl.constexpr):
    """Numbers of codes uint8 in E4M3, exact in all of `triton_dtype`: `dtype`."""
    if cuda_capability_geq(8, 9):
        numbers = codes.to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        # But for the bias of the exponent, the bits are those of a float16, behind a sign.
        wide = codes.to(tl.int16)
        halves = (((wide & 127) << 7) | ((wide & 128) << 8)).to(tl.float16, bitcast=True) * 256.0
        numbers = tl.where((wide & 127) == 127, float("nan"), halves.to(tl.float32)).to(dtype)
    return numbers


@triton.jit
def widened(held, dtype: tl.constexpr):
    """Numbers of a cache or a weight as `dtype`; bytes are E4M3."""
    if held.dtype == tl.uint8:
        numbers = from_e4m3(held, dtype)
    else:
        numbers = held.to(dtype)
    return numbers


@triton.jit
def narrowed(x, dtype: tl.constexpr):
    """x float32 as numbers of a cache of `dtype`; bytes are E4M3."""
    if dtype == tl.uint8:
        numbers = to_e4m3(x)
    else:
        numbers = x.to(dtype)
    return numbers


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


KV_NARROW = ("int8", "fp8")
"""Formats of K and V besides those that products are in."""


def as_stored(held: Tensor) -> Tensor:
    """A cache or a weight as kernels take it: E4M3 as bytes, whatever of it Triton knows on a GPU."""
    return held.view(torch.uint8) if held.dtype == E4M3 else held


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    """The dtype of products as kernels name it."""
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[
        dtype
    ]
