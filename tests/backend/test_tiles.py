# SPDX-License-Identifier: Apache-2.0
"""Products by AMX's tiles: the emulation is the manual's definition, and kernels on tiles agree with vectors."""

from __future__ import annotations

import struct
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from block_weights import make_blocks, whole_rows
from cpu_cases import (
    DENSE,
    INT8,
    Format,
    Sequences,
    Shape,
    kernels,
    make_weight,
    needs_kernels,
    random_tensor,
    threads,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagoda.backend.cpu import native
from pagoda.backend.weights import DenseWeight
from pagoda.checkpoints.gguf.config import BLOCKS
from pagoda.checkpoints.weight_formats import BlockFormat
from pagoda.devices import BackendUnavailableError
from pagoda.errors import ConfigError

try:
    TILES = [*native.emulated_instruction_sets()]
    TILES += [name for name in native.available_instruction_sets() if name == "amx"]
except BackendUnavailableError:
    TILES = []
pytestmark = [
    needs_kernels,
    pytest.mark.skipif(not TILES, reason="tiles are emulated with AVX-512 and bf16 only"),
]
ROWS = [1, 2, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 128, 129, 161, 300]
_LEAST = Fraction(1, 2**126)
"""The smallest normal number."""
_SPECIAL = (
    *(0, 0x8000, 1, 0x807F, 0x0080, 0x8080),  # zeros, denormals, the smallest normal numbers
    *(0x1F80, 0x9FFF, 0x2000, 0x5C7F, 0xDC7F, 0x3F80),  # whose products vanish, large ones
)
"""bf16 numbers at the ends of the range."""


def _multiply(name: str, bf16: bool, a: Tensor, b: Tensor, sums: Tensor) -> Tensor:
    """sums [rows, 32] + a [rows, words] b [words, 32], all words of four bytes."""
    rows, words = a.shape
    result = sums.clone()
    addresses = (a.data_ptr(), b.data_ptr(), result.data_ptr())
    native.load_native().multiply_tiles(name, bf16, rows, words, *addresses)
    return result


def _words(rows: int, words: int, seed: int, special: bool) -> Tensor:
    """Random pairs of bf16 as words, some of them at the ends of the range."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-8, 9, (rows, 2 * words), generator=generator)
    values = torch.randn(rows, 2 * words, generator=generator) * torch.exp2(exponents)
    bits = values.bfloat16().view(torch.int16)
    if special:
        chosen = torch.tensor(_SPECIAL, dtype=torch.int32).to(torch.int16)
        drawn = chosen[torch.randint(len(chosen), bits.shape, generator=generator)]
        bits = torch.where(torch.rand(bits.shape, generator=generator) < 0.7, drawn, bits)
    return bits.contiguous().view(torch.int32)


def _number(bits: int) -> Fraction:
    """A finite float32 with denormals taken for zeros."""
    value = Fraction(struct.unpack("<f", struct.pack("<I", bits & 0xFFFFFFFF))[0])
    return value if abs(value) >= _LEAST else Fraction(0)


def _rounded(exact: Fraction) -> Fraction:
    """To 24 bits, to even in the middle; what is below the smallest normal number then is zero."""
    if exact == 0:
        return exact
    size, exponent = abs(exact), 0
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if Fraction(2) ** exponent > size:
        exponent -= 1
    step = Fraction(2) ** (exponent - 23)
    result = round(size / step) * step  # Python rounds halves to even
    assert result < Fraction(2) ** 128, "the cases stay within the range"
    if result < _LEAST:
        return Fraction(0)
    return result if exact > 0 else -result


def _defined(a: list[int], b: list[int], before: int) -> Fraction:
    """One element of TDPBF16PS, for a row and a column of words, as the manual's pseudocode has it."""
    even = odd = Fraction(0)
    for x, y in zip(a, b, strict=True):
        even = _rounded(even + _number(x << 16) * _number(y << 16))
        odd = _rounded(odd + _number(x & 0xFFFF0000) * _number(y & 0xFFFF0000))
    return _rounded(_number(before) + _rounded(even + odd))


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(("rows", "words"), [(1, 1), (3, 16), (18, 7), (32, 16)])
def test_sums_of_bf16_are_those_of_the_manual(
    name: str, special: bool, rows: int, words: int
) -> None:
    a, b = _words(rows, words, 1, special), _words(words, 32, 2, special)
    before = torch.randn(rows, 32, generator=torch.Generator().manual_seed(3))
    before[:, ::5] = 1e-40
    before[:, 1::5] *= 2.0**-126
    sums = _multiply(name, True, a, b, before)
    drawn = torch.randperm(rows * 32, generator=torch.Generator().manual_seed(4))[:150]
    for place in drawn.tolist():
        row, column = divmod(place, 32)
        expected = _defined(
            a[row].tolist(), b[:, column].tolist(), int(before.view(torch.int32)[row, column])
        )
        assert Fraction(float(sums[row, column])) == expected, (row, column)


@pytest.mark.parametrize("name", TILES)
def test_products_that_are_no_numbers(name: str) -> None:
    inf, one = 0x7F80, 0x3F80
    a = torch.tensor([[inf | one << 16], [one | inf << 16]], dtype=torch.int32)
    b = torch.full((1, 32), one | one << 16, dtype=torch.int32)
    b[0, 1], b[0, 2] = one << 16, -(0x80 << 16) | one  # minus infinity
    sums = _multiply(name, True, a, b, torch.zeros(2, 32))
    assert bool(sums[:, 0].isinf().all())
    assert sums.isnan()[:, :3].tolist() == [[False, True, True], [False, False, False]]
    assert sums[1, 2] == -torch.inf


@pytest.mark.parametrize("name", TILES)
@given(st.integers(1, 32), st.integers(1, 16), st.integers(0, 2**20))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_sums_of_bytes_wrap_around(name: str, rows: int, words: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randint(-128, 128, (rows, 4 * words), generator=generator).to(torch.int8)
    b = torch.randint(0, 256, (words, 32, 4), generator=generator).to(torch.uint8)
    before = torch.randint(-(2**31), 2**31, (rows, 32), generator=generator).to(torch.int32)
    exact = torch.einsum("rki,kci->rc", a.view(rows, words, 4).long(), b.long()) + before
    wrapped = (exact + 2**31) % 2**32 - 2**31
    sums = _multiply(name, False, a.view(torch.int32), b.view(torch.int32)[..., 0], before)
    assert torch.equal(sums.long(), wrapped)


def test_the_emulation_is_the_processor_in_every_bit() -> None:
    if "amx" not in TILES:
        pytest.skip(f"no AMX to compare with: {native.load_native().amx_obstacle()}")
    for seed in range(64):
        rows, words, special = 1 + 7 * seed % 32, 1 + 5 * seed % 16, seed % 2 == 1
        a, b = _words(rows, words, seed, special), _words(words, 32, seed + 1, special)
        before = random_tensor(rows, 32, seed=seed)
        for bf16 in (True, False):
            start = before if bf16 else before.view(torch.int32)
            own, other = (_multiply(name, bf16, a, b, start) for name in TILES)
            numbers = ~own.isnan() if bf16 else torch.ones_like(own, dtype=torch.bool)
            if bf16:
                assert torch.equal(numbers, ~other.isnan())
            assert torch.equal(own.view(torch.int32)[numbers], other.view(torch.int32)[numbers])


def _rows(rows: int, inputs: int) -> Tensor:
    """Rows whose codes in int8 are not all narrow."""
    x = random_tensor(rows, inputs, seed=5)
    x[:, ::7] *= 10
    x[::3, -1] *= 60
    return x


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("inputs", [1, 2, 31, 64, 130, 1027, 2048])
def test_a_row_has_the_same_bits_among_any_number(name: str, inputs: int) -> None:
    ops, x = kernels(name), _rows(max(ROWS), inputs).bfloat16().float()
    weight = random_tensor(100, inputs, seed=6).bfloat16()
    prepared = ops.prepare_linear([DenseWeight(weight)], None, torch.bfloat16)
    whole = ops.linear(x, prepared)
    torch.testing.assert_close(whole, x @ weight.float().t(), atol=2e-4 * inputs, rtol=1e-4)
    for rows in ROWS:
        assert torch.equal(ops.linear(x[:rows], prepared), whole[:rows]), rows
        assert torch.equal(ops.linear(x[-rows:], prepared), whole[-rows:]), rows


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize(
    "stored_format",
    [
        INT8,
        Format(8, offsets=True),
        *(Format(bits, size, offsets) for bits, size, offsets in (
            (4, 32, True), (4, 64, False), (4, 128, True), (8, 32, False), (8, 64, True), (8, 128, False),
        )),
        *BLOCKS.values(),
        *(whole_rows(bits, 768) for bits in (4, 5, 8)),
    ],
    ids=str,
)  # fmt: skip
def test_quantized_products_have_the_bits_of_vectors(
    name: str, stored_format: Format | BlockFormat
) -> None:
    make = make_blocks if isinstance(stored_format, BlockFormat) else make_weight
    x, weight = _rows(max(ROWS), 768), make(stored_format, 70, 768, 4)
    own, vectors = (
        (ops, ops.prepare_linear([weight], None, torch.float32))
        for ops in (kernels(name), kernels("avx512_vnni"))
    )
    whole = vectors[0].linear(x, vectors[1])
    for rows in ROWS:
        assert torch.equal(own[0].linear(x[:rows], own[1]), whole[:rows]), rows


@pytest.mark.parametrize("name", TILES)
@given(st.integers(1, 140), st.integers(1, 700), threads, st.booleans())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_products_of_any_size_with_one_scale_have_the_bits_of_vectors(
    name: str, rows: int, inputs: int, num_threads: int, offsets: bool
) -> None:
    torch.set_num_threads(num_threads)
    x, weight = (
        _rows(rows, inputs),
        make_weight(Format(8, offsets=offsets), 40, inputs, 7),
    )
    one, other = (
        ops.linear(x, ops.prepare_linear([weight], None, torch.float32))
        for ops in (kernels(name), kernels("avx512_vnni"))
    )
    assert torch.equal(one, other)


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_weights_are_multiplied_by_vectors(name: str, dtype: torch.dtype) -> None:
    x, weight = _rows(70, 200), make_weight(DENSE, 40, 200, 8)
    one, other = (
        ops.linear(x, ops.prepare_linear([weight], None, dtype))
        for ops in (kernels(name), kernels("avx512_bf16"))
    )
    assert torch.equal(one, other)


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 64])
@pytest.mark.parametrize(("heads", "head_dim"), [((8, 1), 64), ((4, 2), 80), ((14, 2), 18)])
def test_attention_is_the_same_in_any_blocks_and_pieces(
    name: str, block_size: int, heads: tuple[int, int], head_dim: int
) -> None:
    """Tokens' values are added up in one order, wherever they lie."""
    expected = None
    for size in (16, block_size):
        shape = Shape(*heads, head_dim, size, None, False, torch.bfloat16, torch.bfloat16)
        sequences, ops = Sequences(shape, [150, 70], 9), kernels(name)
        whole = sequences.attend(ops, sequences.cache(ops), sequences.everything())
        for index, result in enumerate(whole):
            torch.testing.assert_close(
                result.view_as(sequences.formula(index)),
                sequences.formula(index),
                atol=4e-2,
                rtol=2e-2,
            )
        for one, other in zip(sequences.pieces(ops, 3, 60), whole, strict=True):
            assert torch.equal(one, other)
        expected = expected or whole
        for one, other in zip(whole, expected, strict=True):
            assert torch.equal(one, other)


# ---- the choice


def test_amx_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.INSTRUCTION_SET_ENV, "amx")
    module = native.load_native()
    if "amx" in TILES:
        assert native.choose_instruction_set() == "amx"
    lower = [name for name in module.instruction_sets() if name != "amx"]
    monkeypatch.setattr(module, "instruction_sets", lambda: lower)
    monkeypatch.setattr(module, "amx_obstacle", lambda: "the kernel refuses AMX's tiles")
    with pytest.raises(
        ConfigError,
        match=r"PAGODA_CPU_ISA=amx cannot be: the kernel refuses AMX's tiles; give avx2, .*bf16\.",
    ):
        native.choose_instruction_set()
    monkeypatch.setenv(native.INSTRUCTION_SET_ENV, native.emulated_instruction_sets()[0])
    assert native.choose_instruction_set() == "amx_emulated"
    monkeypatch.delenv(native.INSTRUCTION_SET_ENV)
    assert native.choose_instruction_set() == "avx512_bf16"


def test_what_keeps_the_processor_from_amx() -> None:
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("flags")[2].split("\n")[0]
    obstacle = native.load_native().amx_obstacle()
    if {"amx_tile", "amx_bf16", "amx_int8"} <= set(flags.split()):
        assert "this processor" not in obstacle
        assert ("amx" in native.available_instruction_sets()) == (obstacle == "")
    else:
        assert obstacle == "this processor has no AMX with bf16 and int8"
        assert native.available_instruction_sets()[-1] != "amx"
