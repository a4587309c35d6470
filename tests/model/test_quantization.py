# SPDX-License-Identifier: Apache-2.0
"""Dense weights quantized as they are loaded."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagoda.backend.block_rounding import quantize_blocks
from pagoda.backend.reference.backend import ReferenceBackend
from pagoda.backend.reference.quantized import quantize_int4, quantize_int8
from pagoda.backend.weights import (
    BlockWeight,
    DenseWeight,
    Fp8Weight,
    GroupedWeight,
    LinearWeight,
    dequantize,
    weight_format,
)
from pagoda.checkpoints.linears import LinearRole, LinearSpec
from pagoda.checkpoints.weight_formats import GROUP_SIZES, BlockFormat, Int8Format
from pagoda.errors import ConfigError
from pagoda.model.quantization import QuantizationOnLoad, quantization_on_load
from pagoda.model.sharding import LinearShard

seeds = st.integers(0, 2**31)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def _weight(seed: int, outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """Rows of very different sizes, some of them zero, and values that occur with both signs."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(outputs, inputs, generator=generator)
    sizes = torch.randint(-12, 4, (outputs, 1), generator=generator)
    kept = torch.rand(outputs, 1, generator=generator) > 0.2
    return (values.mul(8).round().div(8) * 2.0**sizes * kept).to(dtype)


@settings(deadline=None, max_examples=50)
@given(seeds, dtypes, st.integers(1, 9), st.integers(1, 5000))
def test_int8(seed: int, dtype: torch.dtype, outputs: int, inputs: int) -> None:
    values = _weight(seed, outputs, inputs, dtype)
    weight = quantize_int8(values, symmetric=True)
    exact = values.double().numpy()
    highest = np.abs(exact).max(1).astype(np.float32)
    assert np.array_equal(weight.scales.numpy(), highest / np.float32(127))
    codes = weight.values.numpy()
    assert codes.min() >= -127
    assert (np.abs(codes).max(1) == np.where(highest > 0, 127, 0)).all()
    errors = np.abs(dequantize(weight).double().numpy() - exact)
    assert (errors <= (highest / 127 * 0.5001)[:, None]).all()


@settings(deadline=None, max_examples=50)
@given(seeds, dtypes, st.integers(1, 9), st.integers(1, 5000), st.floats(-3, 3))
def test_int8_with_zero_points(
    seed: int, dtype: torch.dtype, outputs: int, inputs: int, shift: float
) -> None:
    values = _weight(seed, outputs, inputs, torch.float32)
    values = (values + shift * values.std(1, correction=0, keepdim=True)).to(dtype)
    weight = quantize_int8(values, symmetric=False)
    exact = values.double().numpy()
    low, high = exact.min(1).clip(max=0), exact.max(1).clip(min=0)
    steps = (high - low) / 255
    assert np.allclose(weight.scales.numpy(), steps, rtol=1e-6, atol=0)
    errors = np.abs(dequantize(weight).double().numpy() - exact)
    assert (errors <= (steps * 1.0001)[:, None]).all()
    assert not dequantize(weight)[values == 0].any()


@settings(deadline=None, max_examples=50)
@given(seeds, dtypes, st.integers(1, 9), st.integers(1, 30), st.sampled_from(GROUP_SIZES))
def test_int4_is_q4_0(
    seed: int, dtype: torch.dtype, outputs: int, num_groups: int, group_size: int
) -> None:
    values = _weight(seed, outputs, num_groups * group_size, dtype)
    weight = quantize_int4(values, group_size)
    assert (weight.bits, weight.offsets, weight.act_order) == (4, None, None)
    for output in range(outputs):
        for group in range(num_groups):
            inputs = slice(group * group_size, (group + 1) * group_size)
            scale, codes = _q4_0(values[output, inputs].double().tolist())
            assert weight.scales[output, group].item() == scale
            assert weight.codes[output, inputs].tolist() == codes


def _q4_0(values: list[float]) -> tuple[float, list[int]]:
    """Codes by the words of the format, one number after the other."""
    peak = 0.0
    for value in values:
        if abs(value) > abs(peak):
            peak = value
    scale = float(np.float16(np.float32(peak) / np.float32(-8)))
    if scale == 0:
        return scale, [8] * len(values)
    return scale, [
        min(max(int(np.rint(np.float32(v) / np.float32(scale))) + 8, 0), 15) for v in values
    ]


def test_pieces_of_large_weights_are_quantized_alike() -> None:
    values = torch.randn(700, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole, rows = quantize_int4(values, 32), quantize_int4(values[300:301], 32)
    assert torch.equal(whole.codes[300:301], rows.codes)
    whole, row = (quantize_int8(part, symmetric=True) for part in (values, values[300:301]))
    assert torch.equal(whole.values[300:301], row.values)


def _spec(outputs: int, inputs: int, role: LinearRole = LinearRole.MLP_IN) -> LinearSpec:
    return LinearSpec("a", outputs, inputs, role)


def _quantized(
    quantization: QuantizationOnLoad, linear: LinearSpec, values: Tensor
) -> LinearWeight:
    part = LinearShard(range(linear.outputs), range(linear.inputs))
    return quantization.quantize(linear, part, DenseWeight(values), ReferenceBackend())


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e38])
def test_weights_that_cannot_be_quantized_are_named(bad: float) -> None:
    values = torch.ones(2, 64)
    values[1, 3] = bad
    with pytest.raises(ConfigError, match=r"^a.weight holds numbers that are infinite, NaN or too"):
        _quantized(QuantizationOnLoad(32), _spec(2, 64), values)


@pytest.mark.parametrize(
    ("role", "kind"),
    [
        (LinearRole.MLP_IN, GroupedWeight),
        (LinearRole.HEAD, BlockWeight),
        (LinearRole.EMBEDDING, BlockWeight),
        (LinearRole.ROUTER, DenseWeight),
    ],
)
def test_with_larger_groups_heads_and_tables_are_int8(
    role: LinearRole, kind: type[LinearWeight]
) -> None:
    weight = _quantized(QuantizationOnLoad(64), _spec(8, 64, role), torch.ones(8, 64).bfloat16())
    assert isinstance(weight, kind)


@pytest.mark.parametrize(
    ("role", "bits"), [(LinearRole.MLP_IN, 4), (LinearRole.HEAD, 5), (LinearRole.EMBEDDING, 5)]
)
def test_groups_of_32_are_blocks_of_rows(role: LinearRole, bits: int) -> None:
    values = torch.randn(8, 96, generator=torch.Generator().manual_seed(1))
    weight = _quantized(QuantizationOnLoad(32), _spec(8, 96, role), values)
    assert weight_format(weight) == _whole_rows(bits, 32, 96)
    router = _quantized(QuantizationOnLoad(32), _spec(8, 96, LinearRole.ROUTER), values)
    assert isinstance(router, DenseWeight)


@settings(deadline=None, max_examples=50)
@given(seeds, dtypes, st.integers(1, 9), st.integers(1, 30), st.sampled_from([4, 5, 8]))
def test_blocks(seed: int, dtype: torch.dtype, outputs: int, num_groups: int, bits: int) -> None:
    size = 64 if bits == 8 else 32
    inputs = size * num_groups
    values = _weight(seed, outputs, inputs, torch.float32).to(dtype)
    stored_format = _whole_rows(bits, size, inputs)
    weight = quantize_blocks(values, stored_format)
    rows = quantize_blocks(values[-1:], stored_format)
    assert torch.equal(weight.codes[-1:], rows.codes)
    groups = values.float().unflatten(1, (-1, size))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1)
    steps = (high - low) / (2**bits - 1)
    # Half a step, half a unit of the minimum, and as many halves of a unit of the scale as there are steps.
    units = 2**bits / 2 * steps.amax(1, keepdim=True) + low.abs().amax(1, keepdim=True) / 2
    allowed = 0.5 * steps + 1.02 / 127 * units + 2**-19
    if bits == 8:
        # Half a step that is a unit of the scale and one of the minimum wider.
        units = steps.amax(1, keepdim=True) + low.abs().amax(1, keepdim=True) / 255
        allowed = 0.5 * (steps + 1.02 / 127 * (steps.amax(1, keepdim=True) + units)) + 2**-19
    errors = (dequantize(weight) - values.float()).abs().unflatten(1, (-1, size)).amax(-1)
    assert bool((errors <= 1.01 * allowed).all())
    assert not dequantize(weight)[(values == 0).all(1)].any()


def test_a_grid_of_16_numbers_is_found_again() -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (64, 18, 32), generator=generator)
    codes[..., 0], codes[..., 1] = 0, 15
    steps = 0.01 + 0.01 * torch.rand(64, 18, 1, generator=generator)
    values = ((codes - 7) * steps).flatten(1)
    stored_format = _whole_rows(4, 32, 576)
    assert torch.equal(quantize_blocks(values, stored_format).codes, codes.flatten(1).byte())


@pytest.mark.parametrize("role", [LinearRole.HEAD, LinearRole.EMBEDDING])
def test_tables_of_int8_have_groups_of_64(role: LinearRole) -> None:
    quantization = QuantizationOnLoad(None)
    assert quantization.format_of(_spec(8, 192, role)) == _whole_rows(8, 64, 192)
    assert quantization.format_of(_spec(8, 96, role)) == Int8Format(zero_points=True)
    assert quantization.format_of(_spec(8, 192, LinearRole.MLP_OUT)) == Int8Format(zero_points=True)


def _whole_rows(bits: int, group_size: int, inputs: int) -> BlockFormat:
    return BlockFormat(bits, group_size, inputs, integer_scales=True, minima=True, whole_rows=True)


def test_groups_that_do_not_divide_the_inputs() -> None:
    with pytest.raises(ConfigError) as caught:
        QuantizationOnLoad(64).format_of(_spec(8, 96))
    assert str(caught.value) == (
        "a.weight has 96 inputs, which groups of 64 do not divide; "
        "take another --quantization-group-size, or --quantization int8."
    )


def test_8_bit_floats_have_a_scale_for_each_output() -> None:
    quantization = quantization_on_load("fp8", 32)
    assert quantization is not None
    values = torch.randn(7, 40, generator=torch.Generator().manual_seed(1))
    values[2] = 0
    weight = _quantized(quantization, _spec(7, 40), values.bfloat16())
    assert isinstance(weight, Fp8Weight)
    highest = weight.values.float().abs().amax(dim=1)
    assert highest.tolist() == [448.0, 448.0, 0.0, 448.0, 448.0, 448.0, 448.0]
    errors = (dequantize(weight) - values.bfloat16().float()).abs()
    assert bool((errors <= values.abs() / 15 + weight.scales * 2**-9).all())
    for role in (LinearRole.EMBEDDING, LinearRole.HEAD, LinearRole.ROUTER):
        held = _quantized(quantization, _spec(7, 40, role), values.bfloat16())
        assert isinstance(held, DenseWeight)
    values[3, 5] = torch.inf
    with pytest.raises(ConfigError, match="infinite, NaN or too large"):
        _quantized(quantization, _spec(7, 40), values)


def test_flags() -> None:
    assert quantization_on_load("fp8", 32) == QuantizationOnLoad(None, in_fp8=True)
    assert quantization_on_load("none", 32) is None
    assert quantization_on_load("int8", 32) == QuantizationOnLoad(None)
    assert quantization_on_load("int4", 128) == QuantizationOnLoad(128)
    with pytest.raises(ConfigError) as caught:
        quantization_on_load("int4", 48)
    assert str(caught.value) == "--quantization-group-size must be one of 32, 64, 128, got 48."
