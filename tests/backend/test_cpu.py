"""The native kernels compute what the reference computes, in every instruction set, and the same bits always."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagoda.backend import cpu
from pagoda.backend.base import HeadNorms, KVCache, TokenBatch
from pagoda.backend.cpu import BackendUnavailableError, CpuBackend
from pagoda.backend.reference import ReferenceBackend
from pagoda.backend.weights import DenseWeight
from pagoda.errors import ConfigError


def _sets() -> list[str]:
    try:
        return cpu.available_instruction_sets()
    except BackendUnavailableError:
        return []


SETS = _sets()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
REFERENCE = ReferenceBackend()

pytestmark = pytest.mark.skipif(not SETS, reason="the kernels are not built, or not for this CPU")

sets = st.sampled_from(SETS or [""])
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**20)
threads = st.integers(1, 4)
examples = settings(max_examples=60, deadline=None, derandomize=True)


@pytest.fixture(autouse=True)
def _threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _random(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance * scale, rtol=tolerance)


@given(
    sets, dtypes, threads, seeds, st.integers(1, 40), st.integers(1, 300), st.integers(1, 200),
    st.booleans(), st.integers(0, 3),
)  # fmt: skip
@examples
def test_linear(
    name: str,
    dtype: torch.dtype,
    num_threads: int,
    seed: int,
    rows: int,
    inputs: int,
    outputs: int,
    biased: bool,
    gap: int,
) -> None:
    torch.set_num_threads(num_threads)
    x = _random(rows, inputs + gap, seed=seed, dtype=dtype)[:, gap:]
    weight = _random(outputs, inputs, seed=seed + 1, dtype=dtype)
    bias = _random(outputs, seed=seed + 2, dtype=dtype) if biased else None
    ops = CpuBackend(name)
    prepared = ops.prepare_linear([DenseWeight(weight)], bias, dtype)
    actual = ops.linear(x, prepared)
    exact = x.double() @ weight.double().t()
    exact = exact if bias is None else exact + bias.double()
    assert_close(actual, exact.to(dtype), scale=inputs**0.5)
    ids = torch.randint(outputs, (5,), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(ops.linear_rows(ids, prepared), weight[ids])


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 192), (333, 777), (256, 4097), (3072, 64)])
def test_a_row_of_a_linear_map_is_the_same_in_any_company(
    name: str, dtype: torch.dtype, inputs: int, outputs: int
) -> None:
    ops = CpuBackend(name)
    weight = ops.prepare_linear(
        [DenseWeight(_random(outputs, inputs, seed=1, dtype=dtype))], None, dtype
    )
    x = _random(100, inputs, seed=2, dtype=dtype)
    torch.set_num_threads(1)
    whole = ops.linear(x, weight)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        assert torch.equal(ops.linear(x, weight), whole)
        for size in (*range(1, 26), 64):
            for start in (0, 1, 13):
                part = ops.linear(x[start : start + size], weight)
                assert torch.equal(part, whole[start : start + size]), (size, start)


@given(sets, dtypes, seeds, st.integers(1, 40), st.integers(1, 300))
@examples
def test_rows(name: str, dtype: torch.dtype, seed: int, rows: int, width: int) -> None:
    ops = CpuBackend(name)
    x, delta = (_random(rows, width, seed=seed + i, dtype=dtype) for i in range(2))
    weight = _random(width, seed=seed + 2, dtype=dtype)
    assert_close(ops.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6), 4)
    total, normed = ops.add_rms_norm(x, delta, weight, 1e-6)
    expected_total, expected_normed = REFERENCE.add_rms_norm(x, delta, weight, 1e-6)
    assert torch.equal(total, expected_total)
    assert_close(normed, expected_normed, 4)
    gate_up = 8 * _random(rows, 2 * width, seed=seed + 3, dtype=dtype)
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
    actual = CpuBackend(name).silu_and_mul(gate_up)
    torch.testing.assert_close(actual, expected, equal_nan=True, atol=1e-6, rtol=1e-6)


# ---- attention


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    window: int | None
    normed: bool
    dtype: torch.dtype


class Sequences:
    """Random sequences in a cache, attended to in any order, by the kernels or by the reference."""

    def __init__(self, shape: Shape, lengths: list[int], seed: int) -> None:
        self.shape = shape
        self.lengths = lengths
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.qkv = [
            _random(n, width, seed=seed + i, dtype=shape.dtype) for i, n in enumerate(lengths)
        ]
        self.norms = None
        if shape.normed:
            weights = (
                1 + 0.2 * _random(shape.head_dim, seed=seed - i, dtype=torch.float32)
                for i in range(2)
            )
            q, k = (weight.to(shape.dtype) for weight in weights)
            self.norms = HeadNorms(q, k, 1e-6)
        self.num_blocks = 3 + sum(-(-n // shape.block_size) for n in lengths)
        ids = list(range(self.num_blocks))
        random.Random(seed).shuffle(ids)
        self.blocks = [[ids.pop() for _ in range(-(-n // shape.block_size))] for n in lengths]
        self.frequencies = torch.logspace(0, -3, shape.head_dim // 2)

    def cache(self, ops: CpuBackend | ReferenceBackend) -> KVCache:
        shape = self.shape
        cache = ops.allocate_kv_cache(
            self.num_blocks, shape.block_size, shape.kv_heads, shape.head_dim, shape.dtype
        )
        cache.keys.fill_(torch.nan)  # what ended requests may have left
        cache.values.fill_(torch.nan)
        return cache

    def attend(
        self,
        ops: CpuBackend | ReferenceBackend,
        cache: KVCache,
        shares: list[tuple[int, int, int]],
    ) -> list[Tensor]:
        """One step over (sequence, tokens before, tokens now)."""
        shape = self.shape
        batch = _batch([(done, n, self.blocks[i]) for i, done, n in shares])
        qkv = torch.cat([self.qkv[i][done : done + n] for i, done, n in shares])
        plan = ops.plan_attention(batch, shape.heads, cache)
        table = ops.rotary_table(batch.positions, self.frequencies, 1.0)
        queries = ops.rotate_and_cache(qkv, cache, plan, table, self.norms)  # type: ignore[arg-type]
        scale = shape.head_dim**-0.5
        out = ops.attention(queries, cache, plan, scale=scale, window=shape.window)  # type: ignore[arg-type]
        return list(out.split([n for _, _, n in shares]))

    def everything(self) -> list[tuple[int, int, int]]:
        return [(i, 0, n) for i, n in enumerate(self.lengths)]

    def pieces(self, ops: CpuBackend, seed: int, longest: int) -> list[Tensor]:
        """Every sequence in random pieces, in random company."""
        rng, cache = random.Random(seed), self.cache(ops)
        done = [0] * len(self.lengths)
        parts: list[list[Tensor]] = [[] for _ in self.lengths]
        while any(d < n for d, n in zip(done, self.lengths, strict=True)):
            open_ones = [i for i, n in enumerate(self.lengths) if done[i] < n]
            chosen = rng.sample(open_ones, rng.randint(1, len(open_ones)))
            shares = [
                (i, done[i], min(rng.choice([1, 1, longest]), self.lengths[i] - done[i]))
                for i in chosen
            ]
            for (i, _, n), part in zip(shares, self.attend(ops, cache, shares), strict=True):
                parts[i].append(part)
                done[i] += n
        return [torch.cat(part) for part in parts]


def _batch(spans: list[tuple[int, int, list[int]]]) -> TokenBatch:
    """Of (tokens computed before, tokens computed now, block ids) per sequence."""
    width = max(len(blocks) for _, _, blocks in spans)
    counts = torch.tensor([count for _, count, _ in spans])
    positions = torch.cat([torch.arange(done, done + count) for done, count, _ in spans])
    return TokenBatch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        sequence_ids=torch.repeat_interleave(counts),
        query_lens=counts,
        context_lens=torch.tensor([done + count for done, count, _ in spans]),
        block_tables=torch.tensor([b + [0] * (width - len(b)) for _, _, b in spans]),
    )


shapes = st.builds(
    lambda group, kv_heads, dim, block, window, normed, dtype: Shape(
        group * kv_heads, kv_heads, 2 * dim, block, window, normed, dtype
    ),
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(1, 40),
    st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128]),
    st.none() | st.integers(1, 200),
    st.booleans(),
    dtypes,
)


@given(
    sets, shapes, st.lists(st.integers(1, 180), min_size=1, max_size=4), threads, seeds,
    st.integers(1, 60),
)  # fmt: skip
@examples
def test_attention(
    name: str, shape: Shape, lengths: list[int], num_threads: int, seed: int, longest: int
) -> None:
    torch.set_num_threads(num_threads)
    sequences, ops = Sequences(shape, lengths, seed), CpuBackend(name)
    whole = sequences.attend(ops, sequences.cache(ops), sequences.everything())
    expected = sequences.attend(REFERENCE, sequences.cache(REFERENCE), sequences.everything())
    for actual, wanted in zip(whole, expected, strict=True):
        assert_close(actual, wanted, 4)
    torch.set_num_threads(1 + num_threads % 4)
    for one, other in zip(sequences.pieces(ops, seed, longest), whole, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("window", [None, 700])
def test_long_contexts_are_split_without_a_trace(name: str, window: int | None) -> None:
    """A lone token's context is shared out among threads; in a large step it is not."""
    shape = Shape(4, 2, 32, 16, window, True, torch.float32)
    sequences, ops = Sequences(shape, [1700, 1024, 513, 40], 3), CpuBackend(name)
    torch.set_num_threads(1)
    whole = sequences.attend(ops, sequences.cache(ops), sequences.everything())
    expected = sequences.attend(REFERENCE, sequences.cache(REFERENCE), sequences.everything())
    for actual, wanted in zip(whole, expected, strict=True):
        assert_close(actual, wanted, 4)
    for num_threads in (1, 4):
        torch.set_num_threads(num_threads)
        cache = sequences.cache(ops)
        for i, n in enumerate(sequences.lengths):
            early = sequences.attend(ops, cache, [(i, 0, n - 3)])[0]
            late = [sequences.attend(ops, cache, [(i, n - k, 1)])[0] for k in (3, 2, 1)]
            assert torch.equal(torch.cat([early, *late]), whole[i])


# ---- what is refused


@pytest.mark.parametrize("name", SETS)
def test_what_does_not_fit_is_refused(name: str) -> None:
    ops = CpuBackend(name)
    weight = ops.prepare_linear([DenseWeight(torch.zeros(8, 4))], None, torch.float32)
    with pytest.raises(ValueError, match="3 do not fit a weight of 4 inputs"):
        ops.linear(torch.zeros(2, 3), weight)
    with pytest.raises(ValueError, match=r"torch.bfloat16, but torch.float32"):
        ops.linear(torch.zeros(2, 4, dtype=torch.bfloat16), weight)
    with pytest.raises(IndexError, match="not from 0 to 7"):
        ops.linear_rows(torch.tensor([8]), weight)
    with pytest.raises(ConfigError, match="even head sizes"):
        ops.allocate_kv_cache(1, 16, 1, 7, torch.float32)
    cache = ops.allocate_kv_cache(1, 16, 1, 8, torch.float32)
    plan = ops.plan_attention(_batch([(0, 2, [0])]), 1, cache)
    with pytest.raises(ValueError, match="3 tokens do not fit a plan of 2"):
        ops.attention(torch.zeros(3, 1, 8), cache, plan, scale=1.0, window=None)


def test_the_environment_chooses_the_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cpu.INSTRUCTION_SET_ENV, raising=False)
    assert cpu.choose_instruction_set() == SETS[-1]
    monkeypatch.setenv(cpu.INSTRUCTION_SET_ENV, SETS[0])
    assert cpu.choose_instruction_set() == SETS[0]
    monkeypatch.setenv(cpu.INSTRUCTION_SET_ENV, "mmx")
    with pytest.raises(ConfigError, match=r"PAGODA_CPU_ISA must be one of avx2.*, got 'mmx'"):
        cpu.choose_instruction_set()
    with pytest.raises(ValueError, match="this CPU has no mmx"):
        CpuBackend("mmx")
