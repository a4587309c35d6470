# SPDX-License-Identifier: Apache-2.0
"""Operations on every row by itself: the formula on all backends, with the same bits in any company."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cpu_cases import BACKENDS, random_tensor
from torch import Tensor

from pagoda.backend.base import HeadNorms
from pagoda.backend.cpu.backend import CpuBackend
from pagoda.backend.decoder_operations import (
    clip,
    layer_norm_heads,
    position_scale,
    rotate_heads,
    xielu,
)
from pagoda.backend.graph import Value
from pagoda.backend.norms_over_ranks import norm_by_squares, sum_of_squares
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.reference.backend import ReferenceBackend
from pagoda.backend.single import compute
from pagoda.parallel.collectives import Alone


@dataclass(frozen=True)
class _Case:
    op: str
    formula: Callable[[Tensor], Tensor]
    """The operation on one input [n, d], by torch."""
    options: dict[str, Any] = field(default_factory=dict)
    even: bool = False
    """True where rows are of pairs or halves."""


def _gelu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def _gelu_erf_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate) * up


def _swiglu_oai(x: Tensor) -> Tensor:
    gate, up = x[:, ::2].clamp(max=4), x[:, 1::2].clamp(-4, 4)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


CASES = {
    "gelu_and_mul": _Case("gelu_and_mul", _gelu_and_mul, even=True),
    "swiglu_oai": _Case("swiglu_oai", _swiglu_oai, {"alpha": 1.702, "limit": 4.0}, even=True),
    "gelu_erf_and_mul": _Case("gelu_erf_and_mul", _gelu_erf_and_mul, even=True),
    "gelu": _Case("gelu", F.gelu),
    "gelu_tanh": _Case("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
    "silu": _Case("silu", F.silu),
    "relu": _Case("relu", F.relu),
    "sigmoid": _Case("sigmoid", torch.sigmoid),
    "scale": _Case("scale", lambda x: x * 0.3, {"factor": 0.3}),
    "softcap": _Case("softcap", lambda x: 2 * torch.tanh(x / 2), {"cap": 2.0}),
}


@pytest.mark.parametrize("width", [2, 30, 64, 130, 1026])
@pytest.mark.parametrize("name", CASES)
def test_formula_in_any_company(ops: Any, name: str, width: int) -> None:
    case, x = CASES[name], 3 * random_tensor(41, width, seed=width)
    whole = ops.rows(case.op, x, **case.options)
    expected = case.formula(x.double()).float()
    torch.testing.assert_close(whole, expected, atol=3e-6 * math.sqrt(width), rtol=3e-6)
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        for start, size in ((0, 1), (1, 2), (7, 5), (24, 17)):
            part = slice(start, start + size)
            assert torch.equal(ops.rows(case.op, x[part].clone(), **case.options), whole[part])


@pytest.mark.parametrize("name", CASES)
def test_the_ends_of_the_range(ops: Any, name: str) -> None:
    case = CASES[name]
    ends = torch.tensor([-1e12, -200.0, -20.0, -9.0, -1e-30, 0.0, 1e-30, 9.0, 20.0, 200.0, 1e12])
    x = torch.stack((ends, torch.ones_like(ends)), dim=1) if case.even else ends[:, None]
    actual, expected = ops.rows(case.op, x, **case.options), case.formula(x.double()).float()
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=3e-6)
    broken = x.clone()
    broken[3, 0] = torch.nan
    spoiled = ops.rows(case.op, broken, **case.options)
    assert spoiled[3].isnan().any()
    others = [i for i in range(len(x)) if i != 3]
    assert torch.equal(spoiled[others], actual[others])


@pytest.mark.parametrize("width", [1, 30, 64, 130, 1026])
@pytest.mark.parametrize("offset", [0.0, 20.0])
def test_norms(ops: Any, width: int, offset: float) -> None:
    x = 2 * random_tensor(41, width, seed=width) + offset
    x[5] = 0
    weight, bias = (random_tensor(width, seed=i) for i in (1, 2))
    wide = x.double()
    cases = (
        (
            {"op": "layer_norm", "weight": weight, "bias": bias, "eps": 1e-5},
            F.layer_norm(wide, (width,), weight.double(), bias.double(), 1e-5),
        ),
    )
    for options, expected in cases:
        op = options.pop("op")
        whole = ops.rows(op, x, **options)
        torch.testing.assert_close(whole, expected.float(), atol=2e-5, rtol=2e-5)
        for start, size in ((0, 1), (1, 2), (7, 5), (24, 17)):
            part = slice(start, start + size)
            assert torch.equal(ops.rows(op, x[part].clone(), **options), whole[part])


_XIELU = {"positive": 0.8, "negative": 0.7, "beta": 0.5, "eps": -1e-6}


def _xielu(x: Tensor) -> Tensor:
    """The formula of Huang and Schlag 2024."""
    below = 0.7 * (torch.expm1(x.clamp(max=-1e-6)) - x)
    return torch.where(x > 0, 0.8 * x * x, below) + 0.5 * x


@pytest.mark.parametrize("width", [1, 30, 130])
def test_activations_of_few_families(ops: Any, width: int) -> None:
    x = 3 * random_tensor(41, width, seed=width)
    x[7, 0] = torch.nan
    actual = compute(ops.backend, lambda graph, x: xielu(graph, x, **_XIELU), {"x": x})
    expected = _xielu(x.double()).float()
    torch.testing.assert_close(actual, expected, atol=2e-6, rtol=3e-6, equal_nan=True)
    x = x.nan_to_num()
    clipped = compute(ops.backend, lambda graph, x: clip(graph, x, 1.5), {"x": x})
    assert torch.equal(clipped, x.clamp(-1.5, 1.5))


@pytest.mark.parametrize(("head_dim", "rotated"), [(2, 2), (24, 8), (64, 64)])
def test_heads(ops: Any, head_dim: int, rotated: int) -> None:
    """Layer norms of the first five of seven heads, and their rotation."""
    x, count = random_tensor(41, 7 * head_dim, seed=1) + 2, 5 * head_dim
    weight, bias = (random_tensor(count, seed=i) for i in (2, 3))

    def norm(graph: GraphBuilder, x: Value) -> Value:
        return layer_norm_heads(graph, x, weight, bias, head_dim=head_dim, eps=1e-5)

    heads = x[:, :count].double().view(41, 5, head_dim)
    normed = F.layer_norm(heads, (head_dim,), eps=1e-5).flatten(1) * weight + bias
    actual = compute(ops.backend, norm, {"x": x})
    torch.testing.assert_close(actual[:, :count], normed.float(), atol=2e-4, rtol=1e-4)
    assert torch.equal(actual[:, count:], x[:, count:])

    frequencies = torch.logspace(0, -2, rotated // 2)

    def rotate(elements: int) -> Tensor:
        def record(graph: GraphBuilder, x: Value, positions: Value) -> Value:
            table = graph.rotary_table(positions, frequencies, 1.0)
            return rotate_heads(graph, x, table, elements=elements, head_dim=head_dim)

        return compute(ops.backend, record, {"x": x, "positions": positions})

    positions = torch.arange(41)
    turned = torch.polar(torch.ones(()).double(), (positions[:, None] * frequencies).double())
    left, right, rest = heads.split([rotated // 2, rotated // 2, head_dim - rotated], -1)
    both = torch.complex(left, right) * turned[:, None]
    expected = torch.cat((both.real, both.imag, rest), -1).flatten(1).float()
    actual = rotate(count)
    torch.testing.assert_close(actual[:, :count], expected, atol=2e-5, rtol=1e-5)
    assert torch.equal(actual[:, count:], x[:, count:])
    for elements in (8 * head_dim, head_dim + 1):
        with pytest.raises(ValueError, match="are no heads of"):
            rotate(elements)


@pytest.mark.parametrize("width", [1, 30, 64, 130])
def test_products(ops: Any, width: int) -> None:
    x, factor = (random_tensor(41, width, seed=i) for i in (1, 2))
    gates = random_tensor(41, 1, seed=3)
    assert torch.equal(ops.rows("mul", x, factor), x * factor)
    assert torch.equal(ops.rows("scale_rows", x, gates), x * gates)
    with pytest.raises(ValueError, match="Rows of 2 do not fit a weight of 1 inputs"):
        ops.rows("scale_rows", x, random_tensor(41, 2))


@pytest.mark.parametrize(("period", "offset"), [(8192.0, 1.0), (16.0, 0.0)])
def test_scales_of_positions(ops: Any, period: float, offset: float) -> None:
    positions = torch.tensor([0, 15, 16, 8190, 8191, 8192, 100_000])

    def record(graph: GraphBuilder, positions: Value) -> Value:
        return position_scale(graph, positions, period=period, factor=0.1, offset=offset)

    actual = compute(ops.backend, record, {"positions": positions})
    periods = torch.floor((positions.double() + offset) / period)
    expected = (1 + 0.1 * torch.log1p(periods)).float()[:, None]
    torch.testing.assert_close(actual, expected, atol=0.0, rtol=1e-6)


class _Ranks(Alone):
    """Three ranks with the same rows."""

    size = 3

    def all_reduce(self, x: Tensor) -> Tensor:
        return 3 * x


@pytest.mark.parametrize(("queries", "keys"), [(64, 32), (130, 30), (9, 3)])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_norm_over_the_heads_of_all_ranks(name: str, queries: int, keys: int) -> None:
    ranks = _Ranks()
    backend: Any = ReferenceBackend(ranks) if name == "reference" else CpuBackend(name, ranks)
    x = random_tensor(41, queries + 2 * keys, seed=queries)
    norms = HeadNorms(random_tensor(queries, seed=1), random_tensor(keys, seed=2), 1e-5)

    def record(graph: GraphBuilder, x: Value) -> Value:
        squares = graph.all_reduce(sum_of_squares(graph, x, queries=queries, keys=keys))
        whole = {"all_queries": 3 * queries, "all_keys": 3 * keys}
        return norm_by_squares(graph, x, squares, norms, **whole)

    q, k, v = x.double().split([queries, keys, keys], dim=1)
    q, k = (
        part * torch.rsqrt(part.square().mean(1, keepdim=True) + 1e-5) * weight
        for part, weight in ((q, norms.queries), (k, norms.keys))
    )
    expected = torch.cat((q, k, v), dim=1).float()
    whole = compute(backend, record, {"x": x})
    torch.testing.assert_close(whole, expected, atol=2e-6, rtol=2e-5)
    for start, size in ((0, 1), (1, 2), (7, 5), (24, 17)):
        part = slice(start, start + size)
        assert torch.equal(compute(backend, record, {"x": x[part]}), whole[part])
