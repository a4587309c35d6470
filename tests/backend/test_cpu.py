"""The native kernels compute what the reference computes, in every instruction set, and the same bits always."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cpu_cases import (
    REFERENCE,
    SETS,
    assert_close,
    dtypes,
    examples,
    needs_kernels,
    random_tensor,
    seeds,
    sets,
    threads,
    token_batch,
)
from hypothesis import given
from hypothesis import strategies as st

from pagoda.backend.cpu import native
from pagoda.backend.cpu.backend import CpuBackend
from pagoda.backend.weights import DenseWeight
from pagoda.errors import ConfigError

pytestmark = needs_kernels


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
    x = random_tensor(rows, inputs + gap, seed=seed, dtype=dtype)[:, gap:]
    weight = random_tensor(outputs, inputs, seed=seed + 1, dtype=dtype)
    bias = random_tensor(outputs, seed=seed + 2, dtype=dtype) if biased else None
    ops = CpuBackend(name)
    prepared = ops.prepare_linear([DenseWeight(weight)], bias, dtype)
    actual = ops.linear(x, prepared)
    exact = x.double() @ weight.double().t()
    exact = exact if bias is None else exact + bias.double()
    assert_close(actual, exact.to(dtype), scale=inputs**0.5)
    ids = torch.randint(outputs, (5,), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(ops.embedding(ids, prepared), weight[ids])


@given(sets, dtypes, seeds, st.integers(1, 40), st.integers(1, 300))
@examples
def test_rows(name: str, dtype: torch.dtype, seed: int, rows: int, width: int) -> None:
    ops = CpuBackend(name)
    x, delta = (random_tensor(rows, width, seed=seed + i, dtype=dtype) for i in range(2))
    weight = random_tensor(width, seed=seed + 2, dtype=dtype)
    assert_close(ops.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6), 4)
    total, normed = ops.add_rms_norm(x, delta, weight, 1e-6)
    expected_total, expected_normed = REFERENCE.add_rms_norm(x, delta, weight, 1e-6)
    assert torch.equal(total, expected_total)
    assert_close(normed, expected_normed, 4)
    gate_up = 8 * random_tensor(rows, 2 * width, seed=seed + 3, dtype=dtype)
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
        ops.embedding(torch.tensor([8]), weight)
    with pytest.raises(ConfigError, match="even head sizes"):
        ops.allocate_kv_cache(1, 16, 1, 7, torch.float32)
    cache = ops.allocate_kv_cache(1, 16, 1, 8, torch.float32)
    plan = ops.attention_metadata(token_batch([(0, 2, [0])]), 1, cache)
    with pytest.raises(ValueError, match="3 tokens do not fit a plan of 2"):
        ops.attention(torch.zeros(3, 1, 8), cache, plan, scale=1.0, window=None)
    cache = ops.allocate_kv_cache(1, 16, 1, 8, torch.float32, torch.int8)
    keys = cache.keys.view(1, 1, 8, 16, 1)
    with pytest.raises(ValueError, match=r"torch.int8 is not for values of torch.float32"):
        ops.attention(torch.zeros(2, 1, 8), replace(cache, keys=keys), plan, scale=1.0, window=None)


def test_the_environment_chooses_the_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(native.INSTRUCTION_SET_ENV, raising=False)
    assert native.choose_instruction_set() == SETS[-1]
    monkeypatch.setenv(native.INSTRUCTION_SET_ENV, SETS[0])
    assert native.choose_instruction_set() == SETS[0]
    monkeypatch.setenv(native.INSTRUCTION_SET_ENV, "mmx")
    with pytest.raises(ConfigError, match=r"PAGODA_CPU_ISA must be one of avx2.*, got 'mmx'"):
        native.choose_instruction_set()
    with pytest.raises(ValueError, match="this CPU has no mmx"):
        CpuBackend("mmx")
