# SPDX-License-Identifier: Apache-2.0
"""What adapters add to a linear layer: the formula, in the same bits in any company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cpu_cases import (
    BACKENDS,
    DTYPES,
    REFERENCE,
    SETS,
    assert_close,
    backend_of,
    needs_kernels,
    random_tensor,
    threads,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagoda.backend.low_rank import LowRank, LowRankMaps, low_rank_dtype
from pagoda.backend.weights import DenseWeight

SHAPES = [(64, (48,)), (33, (40, 7)), (130, (96, 32, 32)), (576, (1100,)), (96, (600, 600))]
RANKS = (1, 5, 8, 16, 33, 64)


def _low_rank(inputs: int, outputs: int, rank: int, seed: int) -> LowRank:
    down = random_tensor(rank, inputs, seed=seed) * inputs**-0.5
    return LowRank(down, random_tensor(outputs, rank, seed=seed + 1) * rank**-0.5, 0.7)


def _filled(ops: Any, inputs: int, outputs: tuple[int, ...], dtype: torch.dtype) -> LowRankMaps:
    """Adapters 0 to 5 of all ranks; some add nothing to some parts, and number 6 to none."""
    maps = LowRankMaps(inputs, outputs, low_rank_dtype(dtype))
    for adapter, rank in enumerate(RANKS):
        parts = [
            None
            if (adapter + place) % 5 == 4
            else _low_rank(inputs, size, rank, 10 * adapter + place)
            for place, size in enumerate(outputs)
        ]
        ops.set_low_rank(maps, adapter, parts)
    return maps


def _add(ops: Any, maps: LowRankMaps, x: Tensor, adapters: Tensor) -> Tensor:
    out = random_tensor(len(x), sum(maps.outputs), seed=99)
    return ops.add_low_rank(out, x, maps, adapters)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_formula(name: str, dtype: torch.dtype, inputs: int, outputs: tuple[int, ...]) -> None:
    ops, x = backend_of(name), random_tensor(40, inputs)
    maps = _filled(ops, inputs, outputs, dtype)
    adapters = torch.arange(40) % 8 - 1
    expected = random_tensor(40, sum(outputs), seed=99)
    for row, adapter in enumerate(adapters.tolist()):
        first = 0
        for place, size in enumerate(outputs):
            if 0 <= adapter < len(RANKS) and (adapter + place) % 5 != 4:
                part = _low_rank(inputs, size, RANKS[adapter], 10 * adapter + place)
                expected[row, first : first + size] += 0.7 * part.up @ (part.down @ x[row])
            first += size
    tolerance = 3e-2 if maps.dtype == torch.bfloat16 else 1e-5
    actual = _add(ops, maps, x, adapters)
    assert_close(actual, expected, tolerance=tolerance)
    untouched = (adapters < 0) | (adapters >= len(RANKS))
    assert torch.equal(actual[untouched], expected[untouched])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_rows_in_any_company(
    name: str, dtype: torch.dtype, inputs: int, outputs: tuple[int, ...]
) -> None:
    ops, x = backend_of(name), random_tensor(75, inputs)
    maps = _filled(ops, inputs, outputs, dtype)
    adapters = torch.randint(-1, 7, (75,), generator=torch.Generator().manual_seed(4))
    out = random_tensor(75, sum(outputs), seed=99)
    torch.set_num_threads(1)
    whole = ops.add_low_rank(out.clone(), x, maps, adapters)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        assert torch.equal(ops.add_low_rank(out.clone(), x, maps, adapters), whole)
        for size in (1, 2, 3, 7, 13, 30):
            for start in (0, 1, 40):
                part = slice(start, start + size)
                alone = ops.add_low_rank(out[part].clone(), x[part].clone(), maps, adapters[part])
                assert torch.equal(alone, whole[part]), (size, start)
        order = torch.randperm(75, generator=torch.Generator().manual_seed(1))
        mixed = ops.add_low_rank(out[order], x[order], maps, adapters[order])
        assert torch.equal(mixed, whole[order])


@needs_kernels
@given(
    name=st.sampled_from(SETS or [""]),
    dtype=st.sampled_from(DTYPES[:2]),
    inputs=st.integers(1, 90),
    outputs=st.lists(st.integers(1, 80), min_size=1, max_size=3).map(tuple),
    rank=st.integers(1, 70),
    rows=st.integers(1, 30),
    num_threads=threads,
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_kernels_are_the_reference(
    name: str,
    dtype: torch.dtype,
    inputs: int,
    outputs: tuple[int, ...],
    rank: int,
    rows: int,
    num_threads: int,
) -> None:
    torch.set_num_threads(num_threads)
    results = []
    for ops in (REFERENCE, backend_of(name)):
        maps = LowRankMaps(inputs, outputs, low_rank_dtype(dtype))
        parts = [_low_rank(inputs, size, rank, place) for place, size in enumerate(outputs)]
        ops.set_low_rank(maps, 3, parts)
        adapters = torch.where(torch.arange(rows) % 3 == 1, -1, 3)
        results.append(_add(ops, maps, random_tensor(rows, inputs), adapters))
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    assert_close(results[1], results[0], tolerance=tolerance)


@pytest.mark.parametrize("name", BACKENDS)
def test_an_adapter_is_replaced_and_removed(name: str) -> None:
    ops, x, adapters = backend_of(name), random_tensor(5, 64), torch.zeros(5, dtype=torch.int64)
    maps = LowRankMaps(64, (48,), torch.float32)
    plain = random_tensor(5, 48, seed=99)
    assert torch.equal(_add(ops, maps, x, adapters), plain)
    results = []
    for seed in (1, 2, 1):
        ops.set_low_rank(maps, 0, [_low_rank(64, 48, 20, seed)])
        results.append(_add(ops, maps, x, adapters))
    assert torch.equal(results[0], results[2])
    assert not torch.equal(results[0], results[1])
    ops.remove_low_rank(maps, 0)
    ops.remove_low_rank(maps, 0)
    assert torch.equal(_add(ops, maps, x, adapters), plain)


@pytest.mark.parametrize("name", BACKENDS)
def test_matrices_must_fit(name: str) -> None:
    ops, maps = backend_of(name), LowRankMaps(64, (48,), torch.float32)
    with pytest.raises(ValueError, match="do not fit a map of 64 inputs and 48 outputs"):
        ops.set_low_rank(maps, 0, [_low_rank(64, 47, 4, 1)])
    with pytest.raises(ValueError, match="takes no 2"):
        ops.set_low_rank(maps, 0, [None, None])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("inner", [96, 50])
def test_gates(name: str, inner: int) -> None:
    """Gates of rows without adapters keep their bits, and those with some are those of separate operations."""
    ops = backend_of(name)
    weight = DenseWeight(random_tensor(2 * inner, 64, seed=3))
    prepared = ops.prepare_linear([weight], None, torch.float32)
    maps, x = _filled(ops, 64, (inner, inner), torch.float32), random_tensor(9, 64)
    adapters = torch.tensor([-1, 0, 3, -1, 6, 5, 5, -1, 2])
    apart = ops.silu_and_mul(ops.add_low_rank(ops.linear(x, prepared), x, maps, adapters))

    assert torch.equal(ops.gated_linear(x, prepared, maps, adapters), apart)
    plain = ops.gated_linear(x, prepared)
    untouched = (adapters < 0) | (adapters == 6)
    assert torch.equal(apart[untouched], plain[untouched])
