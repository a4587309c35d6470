# SPDX-License-Identifier: Apache-2.0
"""The native kernels compute what the reference computes, in every instruction set, and the same bits always."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from block_weights import OTHER_BLOCKS, make_blocks, whole_rows
from cpu_cases import (
    DENSE,
    INT8,
    REFERENCE,
    SETS,
    Format,
    assert_close,
    dtypes,
    examples,
    grouped,
    kernels,
    make_weight,
    needs_kernels,
    quantized,
    random_tensor,
    seeds,
    sets,
    threads,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from single_operations import SingleOperations
from torch import Tensor

from pagoda.backend.block_rounding import quantize_blocks
from pagoda.backend.cpu import native
from pagoda.backend.cpu.backend import MAX_INT8_INPUTS
from pagoda.backend.cpu.native import load_native
from pagoda.backend.reference.quantized import quantize_int4, quantize_int8, rounded_rows
from pagoda.backend.weights import (
    BLOCK_INPUT_GROUP,
    BlockWeight,
    DenseWeight,
    Fp8Weight,
    Int8Weight,
    LinearWeight,
    dequantize,
)
from pagoda.checkpoints.gguf.config import BLOCKS
from pagoda.checkpoints.gguf.reader import BLOCK_TYPES
from pagoda.checkpoints.weight_formats import BLOCK_SIZES, BlockFormat, format_bytes
from pagoda.errors import ConfigError
from pagoda.plugins.backend_check.products import fp8_weight
from pagoda.plugins.backend_check.subject import batch_of_spans

pytestmark = needs_kernels
_WHOLE_ROWS = {f"rows{bits}": whole_rows(bits, 256) for bits in (4, 5, 8)}


@given(
    sets, dtypes, threads, seeds, st.integers(1, 40), st.integers(1, 300), st.integers(1, 200),
    st.booleans(), st.integers(0, 3),
)  # fmt: skip
@examples
def test_linear(
    name: str, dtype: torch.dtype, num_threads: int, seed: int, rows: int, inputs: int, outputs: int,
    biased: bool, gap: int,
) -> None:  # fmt: skip
    torch.set_num_threads(num_threads)
    x = random_tensor(rows, inputs + gap, seed=seed)[:, gap:]
    weight = random_tensor(outputs, inputs, seed=seed + 1, dtype=dtype)
    bias = random_tensor(outputs, seed=seed + 2, dtype=dtype) if biased else None
    ops = kernels(name)
    prepared = ops.prepare_linear([DenseWeight(weight)], bias, dtype)
    actual = ops.linear(x, prepared)
    rounded = x.bfloat16() if dtype == torch.bfloat16 else x
    exact = rounded.double() @ weight.double().t()
    exact = exact if bias is None else exact + bias.double()
    assert_close(actual, exact.float(), scale=inputs**0.5)
    ids = torch.randint(outputs, (5,), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(ops.embedding(ids, prepared), weight[ids].float())


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kind", ["dense", "int8", "int4"])
def test_rows_that_no_cache_holds_have_the_bits_of_single_ones(name: str, kind: str) -> None:
    torch.set_num_threads(2)
    ops, x = kernels(name), random_tensor(300, 4096)
    values = random_tensor(300, 4096, seed=1, dtype=torch.bfloat16)
    prepared = ops.prepare_linear([quantized(ops, kind, values)], None, torch.bfloat16)
    whole = ops.linear(x, prepared)
    for row in (0, 95, 96, 127, 128, 255, 299):
        assert torch.equal(ops.linear(x[row : row + 1], prepared)[0], whole[row])


@given(sets, seeds, st.integers(1, 40), st.integers(1, 300))
@examples
def test_rows(name: str, seed: int, rows: int, width: int) -> None:
    ops = kernels(name)
    x, delta = (random_tensor(rows, width, seed=seed + i) for i in range(2))
    weight = random_tensor(width, seed=seed + 2)
    assert_close(ops.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6), 4)
    total, normed = ops.add_rms_norm(x, delta, weight, 1e-6)
    expected_total, expected_normed = REFERENCE.add_rms_norm(x, delta, weight, 1e-6)
    assert torch.equal(total, expected_total)
    assert_close(normed, expected_normed, 4)
    gate_up = 8 * random_tensor(rows, 2 * width, seed=seed + 3)
    assert_close(ops.silu_and_mul(gate_up), REFERENCE.silu_and_mul(gate_up), 16)
    for i in range(rows):
        alone = ops.add_rms_norm(x[i : i + 1], delta[i : i + 1], weight, 1e-6)
        assert torch.equal(torch.cat(alone), torch.stack([total[i], normed[i]]))
        assert torch.equal(ops.silu_and_mul(gate_up[i : i + 1])[0], ops.silu_and_mul(gate_up)[i])


@pytest.mark.parametrize("name", SETS)
def test_gates_at_the_ends_of_the_range(name: str) -> None:
    gate = torch.tensor([[-1e30, -200.0, -88.0, -1e-30, 0.0, 1e-30, 88.0, 200.0, 1e30, torch.nan]])
    gate_up = torch.cat((gate, torch.ones_like(gate)), dim=1)
    expected = torch.nn.functional.silu(gate)
    actual = kernels(name).silu_and_mul(gate_up)
    torch.testing.assert_close(actual, expected, equal_nan=True, atol=1e-6, rtol=1e-6)


# ---- what is refused


@pytest.mark.parametrize("name", SETS)
def test_what_does_not_fit_is_refused(name: str) -> None:
    ops = kernels(name)
    weight = ops.prepare_linear([DenseWeight(torch.zeros(8, 4))], None, torch.float32)
    with pytest.raises(ValueError, match="3 do not fit a weight of 4 inputs"):
        ops.linear(torch.zeros(2, 3), weight)
    with pytest.raises(ValueError, match=r"x0 is torch.bfloat16, but torch.float32 is needed"):
        ops.linear(torch.zeros(2, 4, dtype=torch.bfloat16), weight)
    with pytest.raises(IndexError, match="not from 0 to 7"):
        ops.embedding(torch.tensor([8]), weight)
    with pytest.raises(ConfigError, match="even head sizes"):
        ops.allocate_kv_cache(1, 16, 1, 7, torch.float32)
    with pytest.raises(ConfigError, match=r"sums of kv_lora_rank, .* up to 1024, not 1028;"):
        ops.allocate_latent_cache(1, 16, 900, 28, torch.float32, index_dim=100)
    cache = ops.allocate_kv_cache(1, 16, 1, 8, torch.float32)
    plan = ops.attention_metadata(batch_of_spans([(0, 2, [0])]), 1, cache)
    with pytest.raises(ValueError, match="3 tokens do not fit metadata of 2"):
        ops.attention(torch.zeros(3, 1, 8), cache, plan, scale=1.0, window=None)


def test_the_environment_chooses_the_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(native.INSTRUCTION_SET_ENV, raising=False)
    assert native.choose_instruction_set() == native.available_instruction_sets()[-1]
    monkeypatch.setenv(native.INSTRUCTION_SET_ENV, SETS[0])
    assert native.choose_instruction_set() == SETS[0]
    monkeypatch.setenv(native.INSTRUCTION_SET_ENV, "mmx")
    with pytest.raises(ConfigError, match=f"PAGODA_CPU_ISA must be one of {SETS[0]}.*, got 'mmx'"):
        native.choose_instruction_set()
    with pytest.raises(ValueError, match="this CPU has no mmx"):
        kernels("mmx")


def _rows(rows: int, inputs: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Rows that a product with dense weights of the dtype does not round."""
    x = random_tensor(rows, inputs, seed=seed)
    x[:, ::7] *= 10
    return x.to(dtype).float()


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of float32 numbers along the last dimension."""
    highest = x.abs().amax(-1, keepdim=True)
    inverse = torch.div(torch.tensor(127.0), highest).masked_fill_(highest == 0, 0)
    return (x * inverse).round().long(), (highest / 127).squeeze(-1)


def _exact(x: Tensor, weight: LinearWeight) -> tuple[Tensor, Tensor]:
    """Outputs in float64, and the sums of the magnitudes that are added up in them."""
    if isinstance(weight, DenseWeight | Fp8Weight):
        values = dequantize(weight).double().t()
        return x.double() @ values, x.double().abs() @ values.abs()
    if isinstance(weight, Int8Weight):
        rounded, scales = rounded_rows(x)
        result = rounded.double() @ weight.integers().double().t()
        result *= scales.double() * weight.scales.double()
        return result, result.abs()
    if isinstance(weight, BlockWeight):
        return _exact_blocks(x, weight)
    x = x if weight.act_order is None else x[:, weight.act_order]
    size, own = weight.group_size, weight.codes.long() - 2 ** (weight.bits - 1)
    own_scales, offsets = weight.scales, weight.offsets
    codes, scales = _quantized(x.unflatten(1, (-1, size)))
    sums = torch.einsum("ngi,ogi->nog", codes, own.unflatten(1, (-1, size))).double()
    terms = sums * scales.double()[:, None] * own_scales.double()
    magnitudes = terms.abs()
    if offsets is not None:
        of_offsets = (codes.sum(-1).double() * scales.double())[:, None] * offsets.double()
        terms, magnitudes = terms + of_offsets, magnitudes + of_offsets.abs()
    return terms.sum(-1), magnitudes.sum(-1)


def _exact_blocks(x: Tensor, weight: BlockWeight) -> tuple[Tensor, Tensor]:
    if weight.stored_format.whole_rows:
        rounded, of_rows = rounded_rows(x)
        codes = rounded.unflatten(1, (-1, BLOCK_INPUT_GROUP))
        scales = of_rows.expand(-1, codes.shape[1])
    else:
        codes, scales = _quantized(x.unflatten(1, (-1, BLOCK_INPUT_GROUP)))
    size = weight.stored_format.group_size
    own = weight.numbers().double() * weight.group_scales().double().repeat_interleave(size, 1)
    rows = codes.double() * scales.double()[..., None]
    own = own.unflatten(1, (-1, BLOCK_INPUT_GROUP))
    terms = torch.einsum("ngi,ogi->nog", rows, own)
    magnitudes = terms.abs()
    if (minima := weight.group_minima()) is not None:
        minima = minima.repeat_interleave(size // BLOCK_INPUT_GROUP, 1)
        of_minima = rows.sum(-1)[:, None] * minima.double()
        terms, magnitudes = terms + of_minima, magnitudes + of_minima.abs()
    return terms.sum(-1), magnitudes.sum(-1)


def _check(
    ops: SingleOperations,
    x: Tensor,
    parts: list[LinearWeight],
    bias: Tensor | None,
    dtype: torch.dtype,
) -> None:
    prepared = ops.prepare_linear(parts, bias, dtype)
    actual = ops.linear(x, prepared)
    assert actual.dtype == torch.float32
    results, magnitudes = zip(*(_exact(x, part) for part in parts), strict=True)
    exact, bound = torch.cat(results, dim=1), torch.cat(magnitudes, dim=1)
    if bias is not None:
        exact, bound = exact + bias.double(), bound + bias.double().abs()
    error = (actual.double() - exact).abs()
    assert bool((error <= 6e-6 * bound + 1e-6).all())
    if len(prepared.segments) > 1:
        return  # no table of embeddings
    rows = torch.cat([dequantize(part) for part in parts])
    if isinstance(parts[0], DenseWeight):
        rows = rows.to(dtype)
    ids = torch.randint(len(rows), (9,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(ops.embedding(ids, prepared), rows[ids].float())


@given(
    sets, dtypes, threads, seeds, st.integers(1, 40), st.just(INT8) | grouped, st.integers(1, 300),
    st.integers(1, 150), st.booleans(), st.integers(0, 3),
)  # fmt: skip
@settings(examples, max_examples=120)
def test_one_format(
    name: str, dtype: torch.dtype, num_threads: int, seed: int, rows: int, stored_format: Format, inputs: int,
    outputs: int, biased: bool, gap: int,
) -> None:  # fmt: skip
    torch.set_num_threads(num_threads)
    if stored_format.group_size is not None:
        inputs = (1 + inputs % 5) * stored_format.group_size
    x = _rows(rows, inputs + gap, seed, dtype)[:, gap:]
    bias = torch.randn(outputs).to(dtype) if biased else None
    _check(kernels(name), x, [make_weight(stored_format, outputs, inputs, seed)], bias, dtype)


@given(
    sets, dtypes, threads, seeds, st.integers(1, 10) | st.integers(90, 200),
    st.sampled_from([*BLOCKS, *OTHER_BLOCKS, *_WHOLE_ROWS]), st.integers(1, 5), st.integers(1, 150), st.booleans(),
    st.integers(0, 3),
)  # fmt: skip
@settings(examples, max_examples=120)
def test_blocks(
    name: str, dtype: torch.dtype, num_threads: int, seed: int, rows: int, kind: str, blocks: int,
    outputs: int, biased: bool, gap: int,
) -> None:  # fmt: skip
    torch.set_num_threads(num_threads)
    stored_format = (BLOCKS | OTHER_BLOCKS | _WHOLE_ROWS)[kind]
    if stored_format.whole_rows:
        stored_format = whole_rows(stored_format.bits, 64 * blocks)
        blocks = 1
    elif stored_format.integer_scales:
        stored_format = replace(stored_format, block_size=BLOCK_SIZES[seed % len(BLOCK_SIZES)])
    inputs = blocks * stored_format.block_size
    x = _rows(rows, inputs + gap, seed, dtype)[:, gap:]
    bias = torch.randn(outputs).to(dtype) if biased else None
    weight = make_blocks(stored_format, outputs, inputs, seed)
    _check(kernels(name), x, [weight], bias, dtype)


@given(
    sets, dtypes, threads, seeds, st.integers(1, 10) | st.integers(90, 200),
    st.sampled_from([None, 32, 64, 128]), st.integers(1, 300), st.integers(1, 150), st.booleans(),
)  # fmt: skip
@settings(examples, max_examples=120)
def test_8_bit_floats(
    name: str, dtype: torch.dtype, num_threads: int, seed: int, rows: int, group_size: int | None, inputs: int,
    outputs: int, biased: bool,
) -> None:  # fmt: skip
    torch.set_num_threads(num_threads)
    bias = torch.randn(outputs).to(dtype) if biased else None
    weight = fp8_weight(outputs, inputs, group_size, seed)
    _check(kernels(name), _rows(rows, inputs, seed, dtype), [weight], bias, dtype)


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_take_their_own_bits(kind: str) -> None:
    """Panels are as large as reckoned, and at most a 16th larger than the file."""
    outputs, inputs, stored_format = 96, 512, BLOCKS[kind]
    weight = make_blocks(stored_format, outputs, inputs, 1)
    (segment,) = kernels(SETS[-1]).prepare_linear([weight], None, torch.float32).segments
    assert segment.num_bytes == format_bytes(stored_format, outputs, inputs, 2)
    stored = next(block for block in BLOCK_TYPES.values() if block.name == kind)
    assert segment.num_bytes <= outputs * inputs // stored.weights * stored.num_bytes * 17 // 16


def test_blocks_that_kernels_do_not_know_are_refused() -> None:
    shapes = load_native().QuantizedShape
    no_points = (0, 0, 0, 0)
    for bits, group, block, integers, minima, codebook in (
        (7, 32, 256, True, False, False),
        (6, 32, 256, True, False, False),
        (4, 64, 256, True, True, False),
        (4, 32, 512, True, True, False),
        (4, 32, 48, True, True, False),
        (4, 32, 256, False, True, False),
        (5, 32, 256, True, False, False),
        (3, 16, 256, True, False, 1),
        (4, 32, 256, True, False, 2),
        (4, 16, 256, True, True, 2),
        (4, 32, 256, True, False, 3),
        (4, 32, 32, False, False, 5),
        (3, 32, 256, True, False, 7),
    ):
        with pytest.raises(ValueError, match="there are no such blocks"):
            shapes.in_blocks(
                32, 256, bits, group, block, integers, minima, codebook, False, *no_points
            )


@given(
    sets, seeds, st.integers(1, 20), st.booleans(),
    st.lists(st.tuples(st.just(DENSE) | st.just(INT8) | grouped, st.integers(1, 70)), min_size=1, max_size=4),
)  # fmt: skip
@examples
def test_parts_of_any_formats_and_sizes(
    name: str, seed: int, rows: int, biased: bool, parts: list[tuple[Format, int]]
) -> None:
    weights = [make_weight(stored_format, outputs, 256, seed) for stored_format, outputs in parts]
    bias = torch.randn(sum(outputs for _, outputs in parts)) if biased else None
    _check(kernels(name), _rows(rows, 256, seed, torch.float32), weights, bias, torch.float32)


def test_parts_of_one_format_become_one_map() -> None:
    ops = kernels(SETS[-1])
    stored_format = Format(4, 32, False, True)
    for part in (DENSE, INT8, stored_format, Format(4, 128, True)):
        parts = [make_weight(part, outputs, 128, 1) for outputs in (33, 7)]
        assert len(ops.prepare_linear(parts, None, torch.float32).segments) == 1
    parts = [make_weight(stored_format, 33, 128, seed) for seed in (1, 2)]
    assert len(ops.prepare_linear(parts, None, torch.float32).segments) == 2


@pytest.mark.parametrize(
    "stored_format",
    [
        INT8,
        Format(4, 32, True),
        Format(8, 128),
        *BLOCKS.values(),
        *OTHER_BLOCKS.values(),
        *_WHOLE_ROWS.values(),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [1, 33])
def test_instruction_sets_agree_in_every_bit(
    stored_format: Format | BlockFormat, rows: int
) -> None:
    make = make_blocks if isinstance(stored_format, BlockFormat) else make_weight
    x, weight = _rows(rows, 256, 3, torch.float32), make(stored_format, 100, 256, 4)
    first, *others = (
        ops.linear(x, ops.prepare_linear([weight], None, torch.float32))
        for ops in map(kernels, SETS)
    )
    for other in others:
        assert torch.equal(other, first)


# ---- the ends of the range


@pytest.mark.parametrize("name", SETS)
def test_the_largest_sums_fit(name: str) -> None:
    ops = kernels(name)
    inputs = MAX_INT8_INPUTS
    codes = torch.full((2, inputs), 127, dtype=torch.int8)
    codes[1] = -127
    weight = ops.prepare_linear([Int8Weight(codes, torch.ones(2))], None, torch.float32)
    for sign in (1.0, -1.0):
        actual = ops.linear(torch.full((1, inputs), sign * 127), weight)
        expected = sign * 127 * 127 * inputs
        assert actual.tolist() == [[expected, -expected]]
    high = Int8Weight(codes, torch.ones(2), torch.tensor([-128, 127], dtype=torch.int32))
    weight = ops.prepare_linear([high], None, torch.float32)
    for sign in (1.0, -1.0):
        actual = ops.linear(torch.full((1, inputs), sign * 127), weight)
        expected = sign * 127 * inputs
        assert actual.tolist() == [[expected * 255, -expected * 254]]
    too_many = Int8Weight(torch.zeros(1, inputs + 1, dtype=torch.int8), torch.ones(1))
    with pytest.raises(ValueError, match="at most 65536 inputs, not 65537"):
        ops.prepare_linear([too_many], None, torch.float32)


@given(sets, st.integers(1, 30), st.integers(1, 700), st.booleans(), seeds)
@settings(examples, max_examples=80)
def test_int8_products_of_rows_with_outliers_are_those_of_the_specification(
    name: str, rows: int, inputs: int, zero_points: bool, seed: int
) -> None:
    weight = make_weight(Format(8, offsets=zero_points), 40, inputs, seed)
    x = random_tensor(rows, inputs, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    x *= 10 ** (
        3 * torch.rand(rows, 1, generator=generator) * torch.rand(x.shape, generator=generator) ** 8
    )
    actual, expected = (
        ops.linear(x, ops.prepare_linear([weight], None, torch.float32))
        for ops in (kernels(name), REFERENCE)
    )
    assert torch.equal(actual, expected)


kinds = st.sampled_from(["normal", "ties", "zeros", "tiny", "large"])


def _dense(kind: str, outputs: int, inputs: int, seed: int, dtype: torch.dtype) -> Tensor:
    values = random_tensor(outputs, inputs, seed=seed, dtype=torch.float32)
    if kind == "ties":
        values = values.round()
    elif kind == "zeros":
        values[:, : inputs // 2] = 0
    elif kind == "tiny":
        values *= 1e-7
    elif kind == "large":
        values *= 1e4
    return values.to(dtype)


@given(
    sets, dtypes, kinds, st.integers(1, 40), st.integers(1, 150), st.sampled_from([32, 64, 128]), seeds
)  # fmt: skip
@settings(examples, max_examples=120)
def test_rounding_is_that_of_the_specification(
    name: str, dtype: torch.dtype, kind: str, outputs: int, inputs: int, group_size: int, seed: int
) -> None:
    values = _dense(kind, outputs, inputs, seed, dtype)
    for symmetric in (True, False):
        actual = kernels(name).quantize_int8(values, symmetric=symmetric)
        expected = quantize_int8(values, symmetric=symmetric)
        assert torch.equal(actual.scales, expected.scales)
        assert torch.equal(actual.values, expected.values)
        if expected.zero_points is None:
            assert actual.zero_points is None
        else:
            assert torch.equal(actual.zero_points, expected.zero_points)
    values = _dense(kind, outputs, (1 + inputs % 4) * group_size, seed, dtype)
    in_groups = kernels(name).quantize_int4(values, group_size)
    wanted = quantize_int4(values, group_size)
    assert torch.equal(in_groups.scales, wanted.scales)
    assert torch.equal(in_groups.codes, wanted.codes)


@given(
    sets, dtypes, kinds, st.sampled_from([-1.0, 0.0, 1.0]), st.integers(1, 40), st.integers(1, 9),
    st.sampled_from([(4, 32), (5, 32), (8, 64)]), seeds,
)  # fmt: skip
@settings(examples, max_examples=120)
def test_rounding_to_blocks_of_whole_rows_is_that_of_the_specification(
    name: str, dtype: torch.dtype, kind: str, sign: float, outputs: int, groups: int, held: tuple[int, int],
    seed: int,
) -> None:  # fmt: skip
    (bits, group_size), inputs = held, groups * held[1]
    stored_format = BlockFormat(
        bits, group_size, inputs, integer_scales=True, minima=True, whole_rows=True
    )
    values = _dense(kind, outputs, inputs, seed, dtype)
    if sign:  # no weight on the other side of zero
        values = values.abs() * sign
    actual = kernels(name).quantize_blocks(values, stored_format)
    expected = quantize_blocks(values, stored_format)
    for field in ("codes", "scales", "minima", "block_scales", "block_minima"):
        assert torch.equal(getattr(actual, field), getattr(expected, field)), field


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_rounding_what_is_not_finite_leaves_a_trace(name: str, bad: float) -> None:
    values = torch.ones(2, 64)
    values[1, 40] = bad
    ops = kernels(name)
    for symmetric in (True, False):
        rounded = ops.quantize_int8(values, symmetric=symmetric)
        assert rounded.scales.isfinite().tolist() == [True, False]
    assert ops.quantize_int4(values, 32).scales.isfinite().tolist() == [[True, True], [True, False]]
    whole_rows = BlockFormat(4, 32, 64, integer_scales=True, minima=True, whole_rows=True)
    of_rows = ops.quantize_blocks(values, whole_rows).block_scales
    assert of_rows is not None
    assert of_rows.isfinite().tolist() == [[True], [False]]


@given(
    sets, dtypes, st.sampled_from(["dense", "int8", "int4"]), st.integers(0, 30), st.integers(1, 200),
    threads, st.booleans(), seeds,
)  # fmt: skip
@examples
def test_argmax_is_the_first_of_the_highest_outputs(
    name: str, dtype: torch.dtype, kind: str, rows: int, outputs: int, num_threads: int, rounded: bool,
    seed: int,
) -> None:  # fmt: skip
    torch.set_num_threads(num_threads)
    ops = kernels(name)
    values = _dense("normal", outputs, 64, seed, dtype)
    x = _dense("ties" if rounded else "normal", rows, 64, seed + 1, dtype).float()
    if rounded:  # many outputs are equal
        values = values.round()
    prepared = ops.prepare_linear([quantized(ops, kind, values)], None, dtype)
    if rows > 2:
        x[1, 3], x[2, 5] = float("nan"), float("inf")
    expected = ops.linear(x, prepared)
    columns, values, finite = ops.linear_argmax(x, prepared)
    assert torch.equal(finite, expected.isfinite().all(dim=1))
    assert torch.equal(columns[finite], expected.argmax(dim=1)[finite])
    assert torch.equal(values[finite], expected.amax(dim=1)[finite])
