"""A token's result is the same in every bit, whatever else is in the batch and however its sequence was cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cpu_cases import DTYPES, random_tensor, token_batch
from torch import Tensor

from pagoda.backend.base import KVCache
from pagoda.backend.reference.backend import ReferenceBackend
from pagoda.backend.weights import DenseWeight

BLOCK_SIZE = 16


@pytest.fixture(params=[1, 2, 3])
def _threads(request: pytest.FixtureRequest) -> None:
    torch.set_num_threads(request.param)


def assert_row_independent(operation: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Row by row, in odd groups, shuffled: the same bits."""
    whole = operation(x)
    for size in (1, 2, 3, 5, 7, 16, 17, 31):
        for start in (0, 1, 13):
            part = operation(x[start : start + size].clone())
            assert torch.equal(part, whole[start : start + size]), (size, start)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    assert torch.equal(operation(x[order]), whole[order])


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(64, 192), (96, 100), (256, 768), (768, 256), (333, 777), (256, 4097)]
)
def test_linear(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    ops = ReferenceBackend()
    weight = ops.prepare_linear(
        [DenseWeight(random_tensor(outputs, inputs, seed=1, dtype=dtype))],
        random_tensor(outputs, seed=2, dtype=dtype),
        dtype,
    )
    x = random_tensor(48, inputs, dtype=dtype)
    assert_row_independent(lambda x: ops.linear(x, weight), x)
    assert_row_independent(lambda x: ops.logits(x, weight), x)
    assert ops.logits(x, weight).dtype == torch.float32


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [24, 64, 130, 768, 1026])
def test_token_operations(width: int, dtype: torch.dtype) -> None:
    ops = ReferenceBackend()
    x = random_tensor(200, width, dtype=dtype)
    weight = random_tensor(width, seed=3, dtype=dtype)
    assert_row_independent(lambda x: ops.rms_norm(x, weight, 1e-6), x)
    assert_row_independent(ops.silu_and_mul, x)
    frequencies = random_tensor(width // 2, seed=4).abs()

    def rotate(rows: Tensor) -> Tensor:
        table = ops.rotary_table((rows[:, 0].float() * 1000).long().abs(), frequencies, 1.0)
        return ops.rotary(rows[:, None, :].expand(-1, 3, -1), table).flatten(1)

    assert_row_independent(rotate, x)


@pytest.mark.parametrize("width", [64, 130])
def test_head_norms_of_a_slice(width: int) -> None:
    ops = ReferenceBackend()
    weight = random_tensor(width, seed=3)
    assert_row_independent(
        lambda x: ops.rms_norm(x.view(-1, 6, width)[:, :4], weight, 1e-6).flatten(1),
        random_tensor(48, 6 * width),
    )


class _Sequences:
    """Random queries, keys and values of some sequences, attended to in any order."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, window: int | None) -> None:
        self.ops = ReferenceBackend()
        self.lengths = [300, 1, 129, 64, 257, 40]
        self.window = window
        self.heads = heads
        self.q, self.k, self.v = (
            [random_tensor(n, h, head_dim, seed=10 * i + j) for i, n in enumerate(self.lengths)]
            for j, h in ((0, heads), (1, kv_heads), (2, kv_heads))
        )
        self.cache = self.ops.allocate_kv_cache(200, BLOCK_SIZE, kv_heads, head_dim, torch.float32)
        self.cache.keys.fill_(torch.nan)  # what ended requests may have left
        self.cache.values.fill_(torch.nan)
        ids = torch.randperm(200, generator=torch.Generator().manual_seed(5)).tolist()
        self.blocks = [[ids.pop() for _ in range(-(-n // BLOCK_SIZE))] for n in self.lengths]

    def attend(self, shares: list[tuple[int, int, int]]) -> list[Tensor]:
        """One step over (sequence, tokens before, tokens now)."""
        batch = token_batch([(done, n, self.blocks[i]) for i, done, n in shares])
        plan = self.ops.attention_metadata(batch, self.heads, self.cache)
        k, v, q = (
            torch.cat([x[i][done : done + n] for i, done, n in shares])
            for x in (self.k, self.v, self.q)
        )
        self.ops.write_kv(self.cache, k, v, plan)
        out = self.ops.attention(q, self.cache, plan, scale=0.2, window=self.window)
        return list(out.split([n for _, _, n in shares]))

    def naive(self, index: int) -> Tensor:
        """The formula, over the whole sequence at once."""
        group = self.heads // self.k[index].shape[1]
        keys = self.k[index].repeat_interleave(group, dim=1)
        values = self.v[index].repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", self.q[index], keys) * 0.2
        distance = torch.arange(self.lengths[index])[:, None] - torch.arange(self.lengths[index])
        hidden = distance < 0 if self.window is None else (distance < 0) | (distance >= self.window)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window"),
    [(4, 2, 64, None), (14, 2, 24, None), (4, 4, 32, 50), (20, 1, 16, 130), (4, 2, 128, 1)],
)
def test_attention(heads: int, kv_heads: int, head_dim: int, window: int | None) -> None:
    together = _Sequences(heads, kv_heads, head_dim, window)
    everything = [(i, 0, n) for i, n in enumerate(together.lengths)]
    whole = together.attend(everything)
    for index, result in enumerate(whole):
        torch.testing.assert_close(result, together.naive(index), atol=2e-5, rtol=1e-4)

    cut = _Sequences(heads, kv_heads, head_dim, window)
    parts: list[list[Tensor]] = [[] for _ in cut.lengths]
    done = [0] * len(cut.lengths)
    for chunk in (7, 1, 1, 100, 3, 64, 124):
        shares = [
            (i, done[i], min(chunk, n - done[i]))
            for i, n in reversed(list(enumerate(cut.lengths)))
            if done[i] < n
        ]
        for (i, _, n), result in zip(shares, cut.attend(shares), strict=True):
            parts[i].append(result)
            done[i] += n
    for result, pieces in zip(whole, parts, strict=True):
        assert torch.equal(torch.cat(pieces), result)

    alone = _Sequences(heads, kv_heads, head_dim, window)
    for index, n in enumerate(alone.lengths):
        assert torch.equal(alone.attend([(index, 0, n)])[0], whole[index])


def test_cache_is_laid_out_by_block_and_head() -> None:
    ops = ReferenceBackend()
    cache = ops.allocate_kv_cache(4, BLOCK_SIZE, 2, 8, torch.bfloat16)
    assert isinstance(cache, KVCache)
    assert cache.keys.shape == cache.values.shape == (4, 2, BLOCK_SIZE, 8)
    batch = token_batch([(BLOCK_SIZE + 1, 1, [3, 1])])
    plan = ops.attention_metadata(batch, 4, cache)
    keys = random_tensor(1, 2, 8).bfloat16()
    ops.write_kv(cache, keys, -keys, plan)
    assert torch.equal(cache.keys[1, :, 1], keys[0])
    assert torch.equal(cache.values[1, :, 1], -keys[0])
