# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagoda.backend.reference.quantized import quantize_int4
from pagoda.backend.weights import dequantize
from pagoda.model.rounding import ZeroPointGroups, round_asymmetric, round_symmetric

SIZE = 32


def _weights(outputs: int = 40, inputs: int = 96) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(outputs, inputs, generator=generator) * 0.05


def _values(groups: ZeroPointGroups) -> Tensor:
    zeros: Tensor | float = 2.0 ** (groups.bits - 1)
    if groups.zeros is not None:
        zeros = groups.zeros.float().repeat_interleave(SIZE, 1)
    return (groups.codes.float() - zeros) * groups.scales.float().repeat_interleave(SIZE, 1)


def _error(values: Tensor, rounded: Tensor) -> float:
    return (values - rounded).square().mean().item()


def test_symmetric_codes_reach_the_highest_magnitude_and_its_mirror_image() -> None:
    values = _weights()
    groups = round_symmetric(values, 8, SIZE, torch.float16)
    assert groups.zeros is None
    assert (groups.codes.view(40, -1, SIZE).int() - 128).abs().amax(-1).unique().tolist() == [127]
    assert (_values(groups) - values).abs().max() <= 0.51 * groups.scales.float().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_search_is_nearer_than_the_range_and_than_symmetric_codes(dtype: torch.dtype) -> None:
    values = _weights()
    groups = round_asymmetric(values, 4, SIZE, dtype)
    assert groups.codes.max() <= 15
    assert groups.zeros is not None
    assert groups.zeros.max() <= 15
    assert torch.equal(groups.scales.half().to(dtype), groups.scales), "exact in both dtypes"
    by_group = values.view(40, -1, SIZE)
    low, high = by_group.amin(-1).clamp(max=0), by_group.amax(-1).clamp(min=0)
    scale = ((high - low) / 15)[..., None]
    zero = (-low[..., None] / scale).round()
    plain = (((by_group / scale).round() + zero).clamp(0, 15) - zero) * scale
    assert _error(values, _values(groups)) < 0.95 * _error(values, plain.flatten(1))
    assert _error(values, _values(groups)) < _error(values, dequantize(quantize_int4(values, SIZE)))


def test_importance_moves_the_error_to_where_it_does_not_matter() -> None:
    values = _weights()
    importance = torch.ones(96)
    importance[::4] = 100.0
    plain = (values - _values(round_asymmetric(values, 4, SIZE, torch.float16))).square()
    groups = round_asymmetric(values, 4, SIZE, torch.float16, importance)
    weighed = (values - _values(groups)).square()
    assert (weighed * importance).sum() < 0.8 * (plain * importance).sum()


def test_edges_of_a_grid() -> None:
    values = torch.zeros(3, SIZE)
    values[1] = torch.linspace(0.5, 1.0, SIZE)  # all of one sign: the grid still holds zero
    values[2, 7] = -2.0
    groups = round_asymmetric(values, 4, SIZE, torch.bfloat16)
    rounded = _values(groups)
    assert torch.equal(rounded[0], values[0])
    assert (rounded[1] - values[1]).abs().max() < 0.05
    torch.testing.assert_close(rounded[2], values[2], rtol=2**-8, atol=0)


def test_a_row_does_not_depend_on_the_others() -> None:
    values = _weights(outputs=2000)
    whole = round_asymmetric(values, 4, SIZE, torch.float16)
    part = round_asymmetric(values[1234:1250], 4, SIZE, torch.float16)
    assert torch.equal(whole.codes[1234:1250], part.codes)
    assert torch.equal(whole.scales[1234:1250], part.scales)
