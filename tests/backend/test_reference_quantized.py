"""Quantized linear maps of the reference backend against their definition, number by number."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from cpu_cases import random_tensor
from test_invariance import assert_row_independent
from torch import Tensor

from pagoda.backend.reference.backend import ReferenceBackend
from pagoda.backend.weights import (
    DenseWeight,
    GroupedWeight,
    Int8Weight,
    LinearWeight,
    dequantize,
)

OPS = ReferenceBackend()


def _integers(low: int, high: int, *shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator).to(dtype)


def _int8(outputs: int, inputs: int) -> Int8Weight:
    values = _integers(-127, 128, outputs, inputs, seed=1, dtype=torch.int8)
    return Int8Weight(values, random_tensor(outputs, seed=2).abs() / 100)


def _grouped(
    outputs: int, inputs: int, *, bits: int, group_size: int, offsets: bool, order: bool
) -> GroupedWeight:
    shape = (outputs, inputs // group_size)
    return GroupedWeight(
        codes=_integers(0, 2**bits, outputs, inputs, seed=1, dtype=torch.uint8),
        scales=random_tensor(*shape, seed=2).half() / 100,
        offsets=random_tensor(*shape, seed=3).half() / 10 if offsets else None,
        bits=bits,
        group_size=group_size,
        act_order=torch.randperm(inputs, generator=torch.Generator().manual_seed(4))
        if order
        else None,
    )


KINDS: dict[str, LinearWeight] = {
    "int8": _int8(70, 96),
    "int8-long": _int8(33, 3000),
    "int4": _grouped(70, 96, bits=4, group_size=32, offsets=False, order=False),
    "int4-offsets": _grouped(70, 256, bits=4, group_size=128, offsets=True, order=False),
    "int4-order": _grouped(70, 192, bits=4, group_size=64, offsets=True, order=True),
    "int8-groups": _grouped(70, 256, bits=8, group_size=128, offsets=True, order=True),
}


def _inputs(weight: LinearWeight) -> int:
    return dequantize(weight).shape[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_is_the_same_in_any_company(kind: str, dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    weight = KINDS[kind]
    bias = random_tensor(weight.scales.shape[0], seed=5, dtype=dtype)  # type: ignore[union-attr]
    prepared = OPS.prepare_linear([weight], bias, dtype)
    x = random_tensor(48, _inputs(weight), dtype=dtype)
    assert OPS.linear(x, prepared).dtype == dtype
    assert_row_independent(lambda x: OPS.linear(x, prepared), x)


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_rounded_inputs(kind: str) -> None:
    """Products agree with fractions, but for the rounding of the scales of inputs."""
    weight = KINDS[kind]
    x = random_tensor(3, _inputs(weight))
    x[1] = 0
    actual = OPS.linear(x, OPS.prepare_linear([weight], None, torch.float32))
    matrix = [[Fraction(v) for v in row] for row in _exact(weight).tolist()]
    group = weight.group_size if isinstance(weight, GroupedWeight) else x.shape[1]
    order = getattr(weight, "act_order", None)
    mapped = x if order is None else x[:, order]
    for row in range(3):
        rounded = _rounded(mapped[row], group)
        for output in range(0, len(matrix), 13):
            exact = sum(a * b for a, b in zip(rounded, matrix[output], strict=True))
            size = sum(abs(a * b) for a, b in zip(rounded, matrix[output], strict=True))
            assert abs(float(actual[row, output]) - float(exact)) <= 1e-6 * float(size)


def _exact(weight: LinearWeight) -> Tensor:
    """[out, in] float64, inputs in the order of the map."""
    if isinstance(weight, Int8Weight):
        return weight.values.double() * weight.scales.double()[:, None]
    assert isinstance(weight, GroupedWeight)
    wide = weight.scales.double().repeat_interleave(weight.group_size, 1)
    values: Tensor = (weight.codes.double() - 2 ** (weight.bits - 1)) * wide
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_a_table_are_dequantized(kind: str, dtype: torch.dtype) -> None:
    weight = KINDS[kind]
    ids = torch.tensor([3, 0, 32, 3])
    rows = OPS.embedding(ids, OPS.prepare_linear([weight], None, dtype))
    assert torch.equal(rows, dequantize(weight)[ids].to(dtype))


@pytest.mark.parametrize("kind", [*KINDS, "dense"])
def test_rows_that_a_part_of_a_table_does_not_have_are_zeros(kind: str) -> None:
    weight: LinearWeight = (
        DenseWeight(random_tensor(33, 96, seed=3)) if kind == "dense" else KINDS[kind]
    )
    table, size = OPS.prepare_linear([weight], None, torch.float32), len(dequantize(weight))
    ids = torch.tensor([0, 99, 100, 100 + size - 1, 100 + size, 199])
    rows = OPS.embedding(ids, table, 100, 200)
    assert torch.equal(rows[2:4], OPS.embedding(torch.tensor([0, size - 1]), table))
    assert not rows[[0, 1, 4, 5]].any()


@pytest.mark.parametrize(("token_id", "vocab_size"), [(-1, 200), (200, 200), (103, None)])
def test_ids_that_a_table_does_not_have_are_refused(token_id: int, vocab_size: int | None) -> None:
    table = OPS.prepare_linear([DenseWeight(random_tensor(3, 8, seed=3))], None, torch.float32)
    with pytest.raises(IndexError, match="A token id is not from 0 to"):
        OPS.embedding(torch.tensor([100, token_id]), table, 100, vocab_size)


@pytest.mark.parametrize("kind", KINDS)
def test_the_highest_output_comes_with_its_value(kind: str) -> None:
    prepared = OPS.prepare_linear([KINDS[kind]], None, torch.bfloat16)
    x = random_tensor(5, dequantize(KINDS[kind]).shape[1]).bfloat16()
    x[3, 3] = torch.nan
    outputs = OPS.logits(x, prepared)
    columns, values, finite = OPS.argmax(x, prepared)
    assert finite.tolist() == [True, True, True, False, True]
    assert torch.equal(columns[finite], outputs.argmax(1)[finite])
    assert torch.equal(values[finite], outputs.amax(1)[finite])


def test_parts_of_all_kinds_follow_one_another() -> None:
    parts = [_int8(5, 96), DenseWeight(random_tensor(7, 96, seed=8)), KINDS["int4"]]
    bias = random_tensor(82, seed=9)
    x = random_tensor(20, 96)
    joined = OPS.linear(x, OPS.prepare_linear(parts, bias, torch.float32))
    apart = [OPS.linear(x, OPS.prepare_linear([part], None, torch.float32)) for part in parts]
    assert torch.equal(joined, torch.cat(apart, 1) + bias)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_numbers_that_broke_are_seen_in_their_row_only(kind: str) -> None:
    prepared = OPS.prepare_linear([KINDS[kind]], None, torch.float32)
    x = random_tensor(4, 96)
    x[1, 5], x[2, 7] = torch.nan, torch.inf
    out = OPS.linear(x, prepared)
    assert out[1:3].isnan().all()
    assert out[0::3].isfinite().all()
