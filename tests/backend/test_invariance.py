# SPDX-License-Identifier: Apache-2.0
"""A token's result is the same in every bit, whatever else is in the batch and however its sequence was cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from cpu_cases import (
    BACKENDS,
    DTYPES,
    QUANTIZED,
    REFERENCE,
    Sequences,
    Shape,
    backend_of,
    random_tensor,
)
from torch import Tensor

from pagoda.backend.base import KVCache
from pagoda.backend.host import rotary_table
from pagoda.backend.reference.kept import write_kv
from pagoda.backend.reference.rows import rms_norm, rotated
from pagoda.backend.weights import DenseWeight, LinearWeight, weight_shape
from pagoda.plugins.backend_check.products import fp8_weight
from pagoda.plugins.backend_check.subject import batch_of_spans

BLOCK_SIZE = 16
DENSE = [(64, 192), (96, 100), (256, 768), (768, 256), (333, 777), (256, 4097), (4096, 333)]
WEIGHTS: dict[str, LinearWeight] = {
    **QUANTIZED,
    "fp8": fp8_weight(70, 200, 64),
    "fp8-long": fp8_weight(333, 1100, None),
    **{f"{i} x {o}": DenseWeight(random_tensor(o, i, seed=1)) for i, o in DENSE},
}


@pytest.fixture(params=[1, 2, 3])
def _threads(request: pytest.FixtureRequest) -> None:
    torch.set_num_threads(request.param)


def assert_row_independent(
    operation: Callable[[Tensor], Tensor], x: Tensor, sizes: Sequence[int] = (*range(1, 18), 25, 31)
) -> None:
    """Row by row, in odd groups, shuffled: the same bits."""
    whole = operation(x)
    for size in sizes:
        for start in (0, 1, 13):
            part = operation(x[start : start + size].clone())
            assert torch.equal(part, whole[start : start + size]), (size, start)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    assert torch.equal(operation(x[order]), whole[order])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_linear(name: str, dtype: torch.dtype, kind: str) -> None:
    ops, weight = backend_of(name), WEIGHTS[kind]
    outputs, inputs = weight_shape(weight)
    bias = random_tensor(outputs, seed=5, dtype=dtype)
    prepared = ops.prepare_linear([weight], bias, dtype)
    x = random_tensor(48, inputs)
    torch.set_num_threads(1)
    whole = ops.linear(x, prepared)
    assert whole.dtype == torch.float32
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        assert torch.equal(ops.linear(x, prepared), whole)
        assert_row_independent(lambda x: ops.linear(x, prepared), x)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("width", [24, 64, 130, 768, 1026])
def test_token_operations(width: int) -> None:
    ops = REFERENCE
    x = random_tensor(200, width)
    weight = random_tensor(width, seed=3)
    assert_row_independent(lambda x: ops.rms_norm(x, weight, 1e-6), x)
    assert_row_independent(ops.silu_and_mul, x)
    frequencies = random_tensor(width // 2, seed=4).abs()

    def rotate(rows: Tensor) -> Tensor:
        table = rotary_table((rows[:, 0] * 1000).long().abs(), frequencies, scale=1.0)
        return rotated(rows[:, None, :].expand(-1, 3, -1), table).flatten(1)

    assert_row_independent(rotate, x)


@pytest.mark.parametrize("width", [64, 130])
def test_head_norms_of_a_slice(width: int) -> None:
    weight = random_tensor(width, seed=3)
    assert_row_independent(
        lambda x: rms_norm(x.view(-1, 6, width)[:, :4], weight, eps=1e-6).flatten(1),
        random_tensor(48, 6 * width),
    )


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window"),
    [
        (4, 2, 64, None),
        (14, 2, 24, None),
        (4, 4, 32, 50),
        (20, 1, 16, 130),
        (4, 2, 128, 1),
        (6, 2, 6, None),
        (5, 1, 10, 20),
    ],
)
def test_attention(heads: int, kv_heads: int, head_dim: int, window: int | None) -> None:
    shape = Shape(heads, kv_heads, head_dim, 16, window, False, torch.float32, torch.float32)
    sequences = Sequences(shape, [300, 1, 129, 64, 257, 40], 5)
    whole = sequences.attend(REFERENCE, sequences.cache(REFERENCE), sequences.everything())
    alone = sequences.cache(REFERENCE)
    pieces = sequences.pieces(REFERENCE, 7, 100)
    for index, (result, n) in enumerate(zip(whole, sequences.lengths, strict=True)):
        torch.testing.assert_close(result, sequences.formula(index), atol=2e-5, rtol=1e-4)
        assert torch.equal(pieces[index], result)
        assert torch.equal(sequences.attend(REFERENCE, alone, [(index, 0, n)])[0], result)


def test_cache_is_laid_out_by_block_and_head() -> None:
    ops = REFERENCE
    cache = ops.allocate_kv_cache(4, BLOCK_SIZE, 2, 8, torch.bfloat16)
    assert isinstance(cache, KVCache)
    assert cache.keys.shape == cache.values.shape == (4, 2, BLOCK_SIZE, 8)
    batch = batch_of_spans([(BLOCK_SIZE + 1, 1, [3, 1])])
    plan = ops.attention_metadata(batch, 4, cache)
    keys = random_tensor(1, 2, 8).bfloat16().float()
    write_kv(cache, keys, -keys, plan)
    assert torch.equal(cache.keys[1, :, 1].float(), keys[0])
    assert torch.equal(cache.values[1, :, 1].float(), -keys[0])
