# SPDX-License-Identifier: Apache-2.0
"""Quantized linear maps: those of the reference by their definition, and what all backends have in common."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from cpu_cases import DTYPES, QUANTIZED, REFERENCE, random_tensor
from torch import Tensor

from pagoda.backend.reference.quantized import LANES, NARROW_SPAN, TYPICAL_LANE
from pagoda.backend.weights import (
    BLOCK_INPUT_GROUP,
    BlockWeight,
    DenseWeight,
    GroupedWeight,
    Int8Weight,
    LinearWeight,
    dequantize,
    weight_shape,
)

WEIGHTS: dict[str, LinearWeight] = {
    **QUANTIZED,
    "dense": DenseWeight(random_tensor(33, 96, seed=3)),
}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_products_are_those_of_rounded_inputs(kind: str) -> None:
    """Products agree with fractions, but for the rounding of the scales of inputs."""
    weight = QUANTIZED[kind]
    x = random_tensor(3, weight_shape(weight)[1])
    x[1] = 0
    actual = REFERENCE.linear(x, REFERENCE.prepare_linear([weight], None, torch.float32))
    matrix = [[Fraction(v) for v in row] for row in _exact(weight).tolist()]
    order = getattr(weight, "act_order", None)
    mapped = x if order is None else x[:, order]
    for row in range(3):
        if isinstance(weight, GroupedWeight):
            rounded = _rounded(mapped[row], weight.group_size)
        elif isinstance(weight, BlockWeight) and not weight.stored_format.whole_rows:
            rounded = _rounded(mapped[row], BLOCK_INPUT_GROUP)
        else:
            rounded = _rounded_whole(mapped[row])
        for output in range(0, len(matrix), 13):
            exact = sum(a * b for a, b in zip(rounded, matrix[output], strict=True))
            size = sum(abs(a * b) for a, b in zip(rounded, matrix[output], strict=True))
            assert abs(float(actual[row, output]) - float(exact)) <= 1e-6 * float(size)


def _exact(weight: LinearWeight) -> Tensor:
    """[out, in] float64, inputs in the order of the map."""
    if isinstance(weight, Int8Weight):
        return weight.integers().double() * weight.scales.double()[:, None]
    if isinstance(weight, BlockWeight):
        wide = weight.group_scales().double().repeat_interleave(weight.stored_format.group_size, 1)
        values = weight.numbers().double() * wide
        if (minima := weight.group_minima()) is not None:
            values += minima.double().repeat_interleave(weight.stored_format.group_size, 1)
        return values
    assert isinstance(weight, GroupedWeight)
    wide = weight.scales.double().repeat_interleave(weight.group_size, 1)
    values = (weight.codes.double() - 2 ** (weight.bits - 1)) * wide
    if weight.offsets is not None:
        values += weight.offsets.double().repeat_interleave(weight.group_size, 1)
    return values


def _rounded(row: Tensor, group: int) -> list[Fraction]:
    numbers: list[Fraction] = []
    for part in row.split(group):
        scale = part.abs().max() / 127
        codes = (part / scale).round() if scale > 0 else torch.zeros_like(part)
        numbers += [Fraction(code) * Fraction(scale.item()) for code in codes.tolist()]
    return numbers


def _rounded_whole(row: Tensor) -> list[Fraction]:
    """A row of ordinary numbers, none of which bounds of sums and of integers touch."""
    lanes = sorted(max(map(abs, row[lane::LANES].tolist())) for lane in range(LANES))
    scale = torch.tensor(min(NARROW_SPAN * lanes[TYPICAL_LANE], lanes[-1])) / 127
    if scale == 0:
        return [Fraction(0)] * len(row)
    return [
        Fraction(code) * Fraction(scale.item()) for code in (row * (1 / scale)).round().tolist()
    ]


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_a_table_are_dequantized(ops: Any, kind: str, dtype: torch.dtype) -> None:
    weight = WEIGHTS[kind]
    ids = torch.tensor([3, 0, 32, 3])
    rows = ops.embedding(ids, ops.prepare_linear([weight], None, dtype))
    expected = dequantize(weight)[ids]
    if isinstance(weight, DenseWeight):
        expected = expected.to(dtype).float()
    assert torch.equal(rows, expected)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_rows_that_a_part_of_a_table_does_not_have_are_zeros(ops: Any, kind: str) -> None:
    table, size = (
        ops.prepare_linear([WEIGHTS[kind]], None, torch.float32),
        weight_shape(WEIGHTS[kind])[0],
    )
    ids = torch.tensor([0, 99, 100, 100 + size - 1, 100 + size, 799])
    rows = ops.embedding(ids, table, 100, 800)
    assert torch.equal(rows[2:4], ops.embedding(torch.tensor([0, size - 1]), table))
    assert not rows[[0, 1, 4, 5]].any()


@pytest.mark.parametrize(("token_id", "vocab_size"), [(-1, 200), (200, 200), (103, None)])
def test_ids_that_a_table_does_not_have_are_refused(
    ops: Any, token_id: int, vocab_size: int | None
) -> None:
    table = ops.prepare_linear([DenseWeight(random_tensor(3, 8, seed=3))], None, torch.float32)
    with pytest.raises(IndexError, match="A token id is not from 0 to"):
        ops.embedding(torch.tensor([100, token_id]), table, 100, vocab_size)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_the_highest_output_comes_with_its_value(ops: Any, kind: str) -> None:
    prepared = ops.prepare_linear([WEIGHTS[kind]], None, torch.bfloat16)
    x = random_tensor(5, weight_shape(WEIGHTS[kind])[1])
    x[3, 3] = torch.nan
    outputs = ops.linear(x, prepared)
    columns, values, finite = ops.linear_argmax(x, prepared)
    assert finite.tolist() == [True, True, True, False, True]
    assert torch.equal(columns[finite], outputs.argmax(1)[finite])
    assert torch.equal(values[finite], outputs.amax(1)[finite])


def test_parts_of_all_kinds_follow_one_another(ops: Any) -> None:
    parts = [WEIGHTS[kind] for kind in ("int8", "dense", "int4")]
    bias = random_tensor(sum(weight_shape(part)[0] for part in parts), seed=9)
    x = random_tensor(20, 96)
    joined = ops.linear(x, ops.prepare_linear(parts, bias, torch.float32))
    apart = [ops.linear(x, ops.prepare_linear([part], None, torch.float32)) for part in parts]
    torch.testing.assert_close(joined, torch.cat(apart, 1) + bias)


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_spoils_its_own_row(ops: Any, kind: str, bad: float) -> None:
    prepared = ops.prepare_linear([QUANTIZED[kind]], None, torch.float32)
    x = random_tensor(5, weight_shape(QUANTIZED[kind])[1])
    clean = ops.linear(x, prepared)
    for place in (0, 37, -1):
        spoiled = x.clone()
        spoiled[2, place] = bad
        out = ops.linear(spoiled, prepared)
        assert bool(out[2].isnan().all())
        others = [0, 1, 3, 4]
        assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("tiny", [0.0, 1e-45, 3e-38])
def test_rows_of_nothing_give_the_bias(ops: Any, kind: str, tiny: float) -> None:
    outputs, inputs = weight_shape(QUANTIZED[kind])
    bias = random_tensor(outputs)
    weight = ops.prepare_linear([QUANTIZED[kind]], bias, torch.float32)
    x = torch.full((2, inputs), tiny)
    torch.testing.assert_close(ops.linear(x, weight), bias.expand(2, -1), atol=1e-30, rtol=0)
