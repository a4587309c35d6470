# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pagoda.backend.block_rounding import quantize_blocks
from pagoda.backend.reference.quantized import quantize_int4, quantize_int8
from pagoda.backend.weights import GroupedWeight, Int8Weight, LinearWeight, dequantize
from pagoda.checkpoints.weight_formats import BlockFormat
from pagoda.model import gptq
from pagoda.model.gptq import (
    InputProducts,
    Rounded,
    dequantized,
    grid_of,
    one_above_the_other,
    round_by_outputs,
    with_codes,
)
from pagoda.model.rounding import ZeroPointGroups, round_asymmetric, round_symmetric

OUTPUTS, INPUTS = 40, 96
KINDS: dict[str, Callable[[Tensor], Rounded]] = {
    "int8": lambda values: quantize_int8(values, symmetric=True),
    "int8 with zero points": lambda values: quantize_int8(values, symmetric=False),
    "int4": lambda values: quantize_int4(values, 32),
    "blocks": lambda values: quantize_blocks(
        values, BlockFormat(4, 32, INPUTS, integer_scales=True, minima=True, whole_rows=True)
    ),
    "w8a16": lambda values: round_symmetric(values, 8, 32, torch.float16),
    "w4a16": lambda values: round_asymmetric(values, 4, 32, torch.float16),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def _weights() -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(OUTPUTS, INPUTS, generator=generator) * 0.05 + 0.01


def _inputs(count: int = 400) -> Tensor:
    """Rows [count, in] whose elements depend on one another, a few of them much larger than the others."""
    generator = torch.Generator().manual_seed(6)
    mixing = torch.randn(24, INPUTS, generator=generator)
    mixed = torch.randn(count, 24, generator=generator) @ mixing
    sizes = torch.ones(INPUTS)
    sizes[[3, 50]] = 8.0
    return (mixed + torch.randn(count, INPUTS, generator=generator)) * sizes


def _products(x: Tensor) -> Tensor:
    return x.t() @ x / len(x)


def _codes(rounded: Rounded) -> Tensor:
    return rounded.values if isinstance(rounded, Int8Weight) else rounded.codes


def _values(rounded: Rounded) -> Tensor:
    return dequantized(grid_of(rounded), _codes(rounded))


def _as_linear(rounded: Rounded) -> LinearWeight:
    if not isinstance(rounded, ZeroPointGroups):
        return rounded
    zeros = torch.full(rounded.scales.shape, 2 ** (rounded.bits - 1))
    zeros = zeros if rounded.zeros is None else rounded.zeros
    offsets = rounded.scales.float() * (2 ** (rounded.bits - 1) - zeros.float())
    return GroupedWeight(rounded.codes, rounded.scales, offsets.half(), rounded.bits, 32)


@kinds
def test_a_grid_with_its_codes_is_the_weight(kind: str) -> None:
    rounded = KINDS[kind](_weights())
    grid = grid_of(rounded)
    assert _codes(rounded).min() >= grid.lowest
    assert _codes(rounded).max() <= grid.highest
    expected = dequantize(_as_linear(rounded))
    torch.testing.assert_close(_values(rounded), expected, rtol=1e-3, atol=1e-4)
    again = with_codes(rounded, _codes(rounded).float())
    assert _codes(again).dtype == _codes(rounded).dtype
    assert torch.equal(_codes(again), _codes(rounded))


@kinds
def test_pieces_one_above_the_other_are_the_weight(kind: str) -> None:
    whole = KINDS[kind](_weights())
    joined = one_above_the_other([KINDS[kind](piece) for piece in _weights().split(16)])
    assert torch.equal(_values(joined), _values(whole))
    assert joined.scales.dtype == whole.scales.dtype


@kinds
def test_inputs_that_are_independent_take_the_nearest_codes(kind: str) -> None:
    values = _weights()
    grid = grid_of(KINDS[kind](values))
    inputs = InputProducts.of(torch.diag(torch.arange(1.0, INPUTS + 1)))
    size = INPUTS // grid.steps.shape[1]
    steps, bases = (it.repeat_interleave(size, 1) for it in (grid.steps, grid.bases))
    nearest = ((values - bases) / steps).round().clamp(grid.lowest, grid.highest)
    assert torch.equal(round_by_outputs(values, grid, inputs), nearest)


@kinds
def test_outputs_are_nearer_than_with_the_nearest_codes(kind: str) -> None:
    values, x = _weights(), _inputs()
    rounded = KINDS[kind](values)
    codes = round_by_outputs(values, grid_of(rounded), InputProducts.of(_products(x)))
    found = with_codes(rounded, codes)
    errors = [(x @ (_values(it) - values).t()).square().mean() for it in (found, rounded)]
    assert errors[0] < 0.5 * errors[1]
    unseen = _inputs(600)[400:]
    errors = [(unseen @ (_values(it) - values).t()).square().mean() for it in (found, rounded)]
    assert errors[0] < 0.5 * errors[1]


def test_codes_are_those_of_the_plain_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """One input after the other, the inverse of all products anew without it (Frantar and Alistarh 2022)."""
    monkeypatch.setattr(gptq, "_OUTPUTS_AT_ONCE", 7)
    values, products = _weights(), _products(_inputs())
    rounded = round_asymmetric(values, 4, 32, torch.float16)
    grid = grid_of(rounded)
    found = round_by_outputs(values, grid, InputProducts.of(products.clone()))

    squares = products.diagonal().double()
    shrunk = products.double() * (1 - gptq.SHRINKAGE)
    shrunk.diagonal().copy_(squares + 0.01 * squares.mean())
    rest, left = values.double(), squares.argsort(descending=True, stable=True).tolist()
    expected = torch.empty_like(rest)
    while left:
        inverse = shrunk[left][:, left].inverse()
        index, group = left[0], left[0] // 32
        step, base = grid.steps[:, group].double(), grid.bases[:, group].double()
        code = ((rest[:, index] - base) / step).round().clamp(0, 15)
        expected[:, index] = code
        error = rest[:, index] - (code * step + base)
        rest[:, left] -= error[:, None] * inverse[0] / inverse[0, 0]
        left = left[1:]
    assert (found != expected).float().mean() < 0.001


def test_inputs_that_are_always_zero_do_no_harm() -> None:
    values, x = _weights(), _inputs()
    x[:, 32:64] = 0
    rounded = round_asymmetric(values, 4, 32, torch.float16)
    codes = round_by_outputs(values, grid_of(rounded), InputProducts.of(_products(x)))
    assert torch.equal(codes[:, 32:64], _codes(rounded)[:, 32:64].float())
    assert InputProducts.of(torch.zeros(4, 4)).factor.isfinite().all()
