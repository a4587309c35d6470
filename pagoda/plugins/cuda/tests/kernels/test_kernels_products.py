# SPDX-License-Identifier: Apache-2.0
"""Kernels of linear layers, adapters and experts in Triton's interpreter against the reference."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagoda.backend.base import ExpertActivation, Experts
from pagoda.backend.low_rank import LowRank, LowRankMaps
from pagoda.backend.reference import experts as reference_experts
from pagoda.backend.reference import linear as reference
from pagoda.backend.weights import (
    DenseWeight,
    GroupedWeight,
    Int8Weight,
    LinearWeight,
    dequantize,
)
from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.plugins.backend_check.products import fp8_weight, weights_of
from pagoda.plugins.backend_check.subject import random_tensor
from pagoda.plugins.cuda.kernels import experts as kernels
from pagoda.plugins.cuda.kernels import linear, low_rank, quantized

CPU = torch.device("cpu")


def addresses(tensors: list[Tensor]) -> Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors])


def same(actual: Tensor, wanted: Tensor) -> bool:
    """Equal in every bit, NaN apart."""
    return torch.equal(actual.nan_to_num(7e7), wanted.nan_to_num(7e7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dense_weights(dtype: torch.dtype) -> None:
    x, weight, bias = (
        random_tensor(70, 100),
        (random_tensor(33, 100) / 8).to(dtype),
        random_tensor(33),
    )
    out, alone = torch.empty(70, 33), torch.empty(1, 33)
    linear.linear(x, weight, out, bias=bias)
    wanted = reference.linear(x, reference.prepare_linear([DenseWeight(weight)], bias, dtype))
    torch.testing.assert_close(out, wanted, atol=2e-5, rtol=2e-5)
    linear.linear(x[66:67].clone(), weight, alone, bias=bias)
    assert torch.equal(alone[0], out[66])
    spoiled = x.clone()
    spoiled[3] = torch.nan
    linear.linear(spoiled, weight, out, bias=bias)
    assert torch.equal(alone[0], out[66])
    assert out[3].isnan().all()


@pytest.mark.parametrize("count", [1, 20, 64, 100, 200, 600])
def test_tiles_for_hopper(count: int) -> None:
    """They take other number formats, too, where bfloat16 is not right."""
    x, weight, bias = random_tensor(count, 256), random_tensor(70, 256) / 8, random_tensor(70)
    out = torch.full((count, 70), torch.nan)
    linear.hopper_linear(x, weight, out, bias=bias)
    wanted = reference.linear(
        x, reference.prepare_linear([DenseWeight(weight)], bias, torch.float32)
    )
    torch.testing.assert_close(out, wanted, atol=5e-5, rtol=5e-5)
    x[count // 2] = torch.nan
    spoiled = torch.empty_like(out)
    linear.hopper_linear(x, weight, spoiled, bias=bias)
    assert spoiled.isnan().any(1).sum() == spoiled.isnan().all(1).sum() == 1


def test_linear_maps_of_heads() -> None:
    x, weights = random_tensor(3, 60), [random_tensor(17, 20, seed=i) for i in range(3)]
    out = torch.empty(3, 51)
    linear.head_linear(x, addresses(weights), out, dtype=torch.float32)
    wanted = [part @ weight.t() for part, weight in zip(x.split(20, 1), weights, strict=True)]
    torch.testing.assert_close(out, torch.cat(wanted, 1), atol=1e-5, rtol=1e-5)


def quantized_product(x: Tensor, weight: LinearWeight, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Product by the kernels, and rows 2, 0 and none of the weight as an embedding table."""
    held = reference.prepare_linear([weight], None, torch.float32).parts[0]
    out, ids = torch.empty(len(x), len(bias)), torch.tensor([7, 5, 4])
    looked_up = torch.empty(3, x.shape[1])
    if isinstance(weight, Int8Weight):
        rows = quantized.RoundedRows.new(*x.shape, CPU)
        quantized.round_rows(x, rows)
        zeros = {"zero_points": weight.zero_points}
        quantized.int8_linear(rows, weight.values, weight.scales, out, bias=bias, **zeros)
        quantized.int8_embedding(ids, weight.values, weight.scales, looked_up, first_id=5, **zeros)
        return out, looked_up
    assert isinstance(weight, GroupedWeight)
    packed = held.weight  # type: ignore[union-attr]
    groups = quantized.RoundedGroups.new(*x.shape, weight.group_size, CPU)
    quantized.round_groups(x, groups, order=weight.act_order)
    kinds = {"bits": weight.bits, "offsets": weight.offsets}
    quantized.grouped_linear(groups, packed.codes, packed.scales, out, bias=bias, **kinds)
    quantized.grouped_embedding(ids, packed.codes, packed.scales, looked_up, first_id=5, **kinds)
    return out, looked_up


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_integer_weights_have_the_bits_of_the_reference(name: str) -> None:
    x, bias = random_tensor(6, 320), random_tensor(33)
    x[1] *= 1e4
    x[2] = 0
    x[3, 5] *= 300
    x[4, 7], x[5, 9] = torch.nan, torch.inf
    for what, weight in weights_of(name, 33, 320):
        held = reference.prepare_linear([weight], bias, torch.float32)
        out, looked_up = quantized_product(x, weight, bias)
        assert same(out, reference.linear(x, held)), what
        if getattr(weight, "act_order", None) is None:
            wanted = reference.embedding(torch.tensor([7, 5, 4]), held, first_id=5, vocab_size=99)
            assert same(looked_up, wanted), what
        alone, _ = quantized_product(x[3:4].clone(), weight, bias)
        assert torch.equal(alone[0], out[3]), what


@settings(max_examples=12)
@given(
    rows=st.integers(1, 70),
    outputs=st.integers(1, 80),
    inputs=st.integers(1, 200),
    size=st.sampled_from([None, 32, 64, 96, 128]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_8_bit_floats(
    rows: int, outputs: int, inputs: int, size: int | None, dtype: torch.dtype
) -> None:
    """As the reference has them, each row with its own bits, whatever is beside it."""
    weight, bias = fp8_weight(outputs, inputs, size), random_tensor(outputs)
    x, out, alone = random_tensor(rows, inputs), torch.empty(rows, outputs), torch.empty(1, outputs)
    held = reference.prepare_linear([weight], bias, dtype)
    kinds = {"size": size or 2**30, "dtype": dtype, "bias": bias}
    linear.fp8_linear(x, weight.values, weight.scales, out, **kinds)
    torch.testing.assert_close(out, reference.linear(x, held), atol=5e-5, rtol=5e-5)
    dense = reference.prepare_linear([DenseWeight(dequantize(weight))], bias, torch.float32)
    torch.testing.assert_close(out, reference.linear(x, dense), atol=5e-5, rtol=5e-5)
    spoiled = x.clone()
    spoiled[:-1] = torch.nan
    for beside in (x[-1:].clone(), spoiled):
        found = alone if len(beside) == 1 else torch.empty_like(out)
        linear.fp8_linear(beside, weight.values, weight.scales, found, **kinds)
        assert torch.equal(found[-1], out[-1])
    ids, looked_up = torch.tensor([outputs + 2, 3, 2]), torch.empty(3, inputs)
    options = {"first_id": 3, "size": size or 2**30}
    linear.fp8_embedding(ids, weight.values, weight.scales, looked_up, **options)
    wanted = reference.embedding(ids, held, first_id=3, vocab_size=99)
    assert torch.equal(looked_up, wanted)


def test_adapters() -> None:
    x, before = random_tensor(9, 40), random_tensor(9, 50)
    numbers = torch.tensor([0, -1, 2, 2, 0, 1, 3, 9, 0])
    maps = LowRankMaps(40, (30, 20), torch.float32)
    table, kept = torch.zeros((4, 2, low_rank.COLUMNS), dtype=torch.int64), []
    for adapter, rank in ((0, 3), (2, 70)):
        parts = [
            LowRank(random_tensor(rank, 40), random_tensor(outputs, rank), 0.5 + adapter)
            if (adapter, outputs) != (2, 20)
            else None
            for outputs in (30, 20)
        ]
        kept.append(parts)
        reference.set_low_rank(maps, adapter, parts)
        for place, part in enumerate(parts):
            if part is not None:
                (bits,) = struct.unpack("i", struct.pack("f", part.scale))
                row = [part.down.data_ptr(), part.up.data_ptr(), rank, bits]
                table[adapter, place] = torch.tensor(row)
    narrow = torch.full((9, 2, low_rank.narrow_width(70)), torch.nan)
    kinds = {"outputs": (30, 20), "dtype": torch.float32}
    out = before.clone()
    low_rank.add_low_rank(out, x, numbers, table, narrow, **kinds)
    wanted = reference.add_low_rank(before.clone(), x, numbers, maps)
    torch.testing.assert_close(out, wanted, atol=2e-5, rtol=2e-5)
    others = [1, 5, 6, 7]
    assert torch.equal(out[others], before[others])
    alone = before[2:3].clone()
    low_rank.add_low_rank(alone, x[2:3].clone(), numbers[2:3], table, narrow, **kinds)
    assert torch.equal(alone[0], out[2])


ROUTINGS = {
    "ties": ExpertRouting(8, 2, renormalize=True),
    "groups": ExpertRouting(8, 3, False, "sigmoid", 4, 2, "best_two", 2.5),
    "inputs": ExpertRouting(6, 2, True, "softmax", 3, 2, "best", weighs_inputs=True),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_experts(name: str) -> None:
    """Rows of padding count for nothing, and a token's bits are its own."""
    routing, hidden, inner = ROUTINGS[name], 48, 40
    biased, corrected = name == "ties", name == "groups"
    first, held = (2, 5) if corrected else (0, routing.num_experts)
    x, logits = random_tensor(12, hidden), random_tensor(12, routing.num_experts) * 2
    if name == "ties":
        logits.round_()
    correction = random_tensor(routing.num_experts, seed=9) if corrected else None
    activation = ExpertActivation("swiglu_oai", 1.7, 3.0) if biased else ExpertActivation()
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    maps = {
        part: [random_tensor(*shape, seed=i + ord(part[0])) / 5 for i in range(held)]
        for part, shape in shapes.items()
    }
    biases = {part: [weight[:, 0].clone() for weight in own] for part, own in maps.items()}
    prepared = {
        part: tuple(
            reference.prepare_linear([DenseWeight(weight)], bias if biased else None, torch.float32)
            for weight, bias in zip(own, biases[part], strict=True)
        )
        for part, own in maps.items()
    }
    counts = [torch.zeros(routing.num_experts, dtype=torch.int64) for _ in range(2)]
    whole = Experts(
        routing, first, **prepared, counts=counts[0], activation=activation, correction=correction
    )
    wanted = reference_experts.experts(x[:9], logits[:9], whole)
    weights = kernels.ExpertWeights(
        *(addresses(own) for own in maps.values()),
        torch.float32,
        first,
        inner,
        *(addresses(own) if biased else None for own in biases.values()),
    )
    room = kernels.Workspace.new(12, hidden, inner, routing.experts_per_token, held, CPU)
    kinds = {"routing": routing, "activation": activation, "correction": correction}
    out, alone = torch.full((12, hidden), torch.nan), torch.empty(1, hidden)
    valid = torch.tensor([9])
    kernels.experts(x, logits, out, weights, room, counts=counts[1], valid=valid, **kinds)
    chosen, factors = reference_experts.routed(logits[:9], routing, correction)
    assert torch.equal(room.chosen[:9].long(), chosen)
    torch.testing.assert_close(room.weights[:9], factors)
    torch.testing.assert_close(out[:9], wanted, atol=2e-5, rtol=2e-5)
    assert not out[9:].any()
    assert torch.equal(*counts)
    kernels.experts(
        x[4:5].clone(), logits[4:5].clone(), alone, weights, room, counts=counts[1], **kinds
    )
    assert torch.equal(alone[0], out[4])
