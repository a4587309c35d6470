# SPDX-License-Identifier: Apache-2.0
"""Kernels of rows in Triton's interpreter: the reference's results, and the same bits in any company."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pagoda.backend import host
from pagoda.backend.reference import rows as reference
from pagoda.backend.reference.states import gated_head_norm
from pagoda.plugins.backend_check.subject import random_tensor
from pagoda.plugins.cuda.kernels import rows

ENDS = (-1e12, -200.0, -20.0, -9.0, -1e-30, 0.0, 1e-30, 9.0, 20.0, 200.0, 1e12)
ALIKE: dict[str, dict[str, Any]] = {
    "scale": {"factor": 0.3},
    "softcap": {"cap": 2.0},
    "sigmoid": {},
    "silu_and_mul": {},
    "gelu_and_mul": {},
    "swiglu_oai": {"alpha": 1.702, "limit": 4.0},
    "gelu": {},
    "gelu_tanh": {},
    "silu": {},
    "relu": {},
    "gelu_erf_and_mul": {},
}
HALVED = ("silu_and_mul", "gelu_and_mul", "gelu_erf_and_mul", "swiglu_oai")


def out_of(op: str, x: Tensor) -> Tensor:
    return torch.full((len(x), x.shape[1] // (1 + (op in HALVED))), torch.nan)


@pytest.mark.parametrize("op", ALIKE)
@pytest.mark.parametrize("width", [2, 130])
def test_activations(op: str, width: int) -> None:
    x = 3 * random_tensor(9, width)
    out, own = out_of(op, x), getattr(rows, op)
    own(x, out, **ALIKE[op])
    wanted = getattr(reference, op)(x, **ALIKE[op])
    torch.testing.assert_close(out, wanted, atol=2e-6, rtol=2e-6)
    alone = out_of(op, x[4:5])
    own(x[4:5].clone(), alone, **ALIKE[op])
    assert torch.equal(alone[0], out[4])


@pytest.mark.parametrize("op", ALIKE)
def test_the_ends_of_the_range(op: str) -> None:
    x = torch.ones(len(ENDS), 2)
    x[:, 0] = torch.tensor(ENDS)
    out, own = out_of(op, x), getattr(rows, op)
    own(x, out, **ALIKE[op])
    wanted = getattr(reference, op)(x, **ALIKE[op])
    torch.testing.assert_close(out, wanted, atol=1e-6, rtol=1e-5)
    x[3, 0] = torch.nan
    spoiled = out_of(op, x)
    own(x, spoiled, **ALIKE[op])
    assert spoiled[3].isnan().any()
    others = [row for row in range(len(ENDS)) if row != 3]
    assert torch.equal(spoiled[others], out[others])


Norm = Callable[[Tensor, Tensor], None]


@pytest.mark.parametrize("width", [6, 64, 130])
def test_norms(width: int) -> None:
    x, weight, bias = (
        3 * random_tensor(40, width),
        random_tensor(width, seed=1),
        random_tensor(width),
    )
    gate = random_tensor(40, 2 * width, seed=2)
    heads = random_tensor(40, 2 * width, seed=3)
    norms: dict[str, tuple[Norm, Tensor, Tensor]] = {
        "rms": (
            lambda x, out: rows.rms_norm(x, weight, out, eps=1e-5),
            x,
            reference.rms_norm(x, weight, eps=1e-5),
        ),
        "layer": (
            lambda x, out: rows.layer_norm(x, weight, bias, out, eps=1e-5),
            x,
            reference.layer_norm(x, weight, bias, eps=1e-5),
        ),
        "gated": (
            lambda x, out: rows.gated_head_norm(x, gate[-len(x) :], weight, out, eps=1e-5),
            heads,
            gated_head_norm(heads, gate, weight, head_dim=width, eps=1e-5),
        ),
    }
    for own, given, wanted in norms.values():
        out, last = torch.empty_like(wanted), torch.empty_like(wanted[-1:])
        own(given, out)
        torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
        own(given[-1:].clone(), last)
        assert torch.equal(last[0], out[-1])


def test_a_sum_and_its_norm_in_one() -> None:
    x, delta, weight = random_tensor(5, 70), random_tensor(5, 70, seed=1), random_tensor(70)
    apart, joined, total = torch.empty(5, 70), torch.empty(5, 70), x.clone()
    rows.rms_norm(x + delta, weight, apart, eps=1e-5)
    rows.rms_norm(total, weight, joined, eps=1e-5, delta=delta, total=total)
    assert torch.equal(total, x + delta)
    assert torch.equal(joined, apart)


def test_sums_and_products() -> None:
    x, y, factors = random_tensor(5, 70), random_tensor(5, 70, seed=1), random_tensor(5, 1)
    out = torch.empty_like(x)
    for own, given, wanted in (
        (rows.add, y, x + y),
        (rows.mul, y, x * y),
        (rows.scale_rows, factors, x * factors),
    ):
        own(x, given, out)
        assert torch.equal(out, wanted)


@pytest.mark.parametrize(("queries", "keys"), [(64, 32), (9, 3)])
def test_norms_over_ranks(queries: int, keys: int) -> None:
    qkv = random_tensor(7, queries + 2 * keys)
    norms = random_tensor(queries), random_tensor(keys)
    squares, out = torch.empty(7, 2), torch.empty_like(qkv)
    rows.sum_of_squares(qkv, squares, queries=queries, keys=keys)
    wanted = reference.sum_of_squares(qkv, queries=queries, keys=keys)
    torch.testing.assert_close(squares, wanted, atol=1e-5, rtol=1e-5)
    sizes = {"all_queries": 2 * queries, "all_keys": 2 * keys, "eps": 1e-5}
    rows.norm_by_squares(qkv, squares, *norms, out, **sizes)
    wanted = reference.norm_by_squares(qkv, squares, *norms, queries=queries, keys=keys, **sizes)
    torch.testing.assert_close(out, wanted, atol=1e-6, rtol=1e-5)


def test_positions() -> None:
    positions, frequencies = torch.arange(9) * 2003, torch.logspace(0, -4, 6)
    cosines, sines, factors = torch.empty(9, 6), torch.empty(9, 6), torch.empty(9, 1)
    rows.rotary_table(positions, frequencies, cosines, sines, scale=1.25)
    wanted = host.rotary_table(positions, frequencies, scale=1.25)
    torch.testing.assert_close((cosines, sines), wanted, atol=1e-6, rtol=0)
    numbers = {"period": 16.0, "factor": 0.1, "offset": 1.0}
    rows.position_scale(positions, factors, **numbers)
    torch.testing.assert_close(factors, host.position_scale(positions, **numbers))


def test_chosen_rows() -> None:
    x, chosen = random_tensor(9, 33), torch.tensor([4, 0, 8])
    out, numbers = torch.empty(3, 33), torch.empty(3, dtype=torch.int64)
    rows.select_rows(x, chosen, out)
    assert torch.equal(out, x[chosen])
    rows.select_rows(torch.arange(9) * 10**12, chosen, numbers)
    assert numbers.tolist() == [4 * 10**12, 0, 8 * 10**12]
    for dtype in (torch.float32, torch.float16):
        table, found = x.to(dtype), torch.empty(4, 33)
        rows.embedding(torch.tensor([9, 5, 13, 14]), table, found, first_id=5)
        wanted = torch.stack((table[4], table[0], table[8], torch.zeros(33))).float()
        assert torch.equal(found, wanted)


def test_argmax() -> None:
    """First of equal ones, over several blocks, and rows that are not finite are told."""
    x = random_tensor(6, 5000)
    x[0, [4500, 4999]] = 9.0
    x[1, [17, 4500]] = 9.0
    x[2, 30], x[3, 4999], x[4] = torch.nan, torch.inf, torch.nan
    out = torch.empty((6, 3), dtype=torch.int64)
    rows.argmax(x, out, first_id=1000)
    assert out[:2, 0].tolist() == [5500, 1017]
    assert out[[0, 1, 5], 0].tolist() == (x[[0, 1, 5]].argmax(1) + 1000).tolist()
    assert out[5, 1] == int(x[5].max().view(torch.int32))
    assert out[:, 2].tolist() == [1, 1, 0, 0, 0, 1]


def test_no_rows() -> None:
    none, out = torch.empty(0, 64), torch.empty(0, 64)
    rows.add(none, none, out)
    rows.rms_norm(none, torch.ones(64), out, eps=1e-5)
    rows.argmax(none, torch.empty((0, 3), dtype=torch.int64), first_id=0)
