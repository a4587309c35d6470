# SPDX-License-Identifier: Apache-2.0
"""Latent attention by native kernels: what the reference computes, and the same bits in any company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cpu_cases import (
    DTYPES,
    REFERENCE,
    SETS,
    assert_close,
    dtypes,
    kernels,
    needs_kernels,
    random_tensor,
    seeds,
    sets,
    threads,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda.backend.base import LatentCache
from pagoda.backend.graph import Value
from pagoda.backend.latent_layers import latent_attention, rotate_and_cache_latents
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.single import compute
from pagoda.plugins.backend_check.subject import batch_of_spans

pytestmark = needs_kernels

Span = tuple[int, int, list[int]]
"""Tokens computed before, tokens computed now, and blocks of a sequence."""


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """Heads, rank, rotated elements and tokens of a block."""
    return (
        draw(st.integers(1, 33)),
        2 * draw(st.integers(1, 40) | st.sampled_from([8, 32])),
        2 * draw(st.integers(1, 12)),
        draw(st.sampled_from([1, 2, 8, 16, 32, 128])),
    )


def random_cache(
    ops: Any, shape: tuple[int, int, int, int], num_blocks: int, dtype: torch.dtype,
    kv_dtype: torch.dtype, seed: int,
) -> LatentCache:  # fmt: skip
    _, rank, rope_dim, block_size = shape
    cache: LatentCache = ops.allocate_latent_cache(
        num_blocks, block_size, rank, rope_dim, dtype, kv_dtype
    )
    generator = torch.Generator().manual_seed(seed)
    for part in cache.tensors.values():
        if part.dtype == torch.int8:
            part.random_(-127, 128, generator=generator)
        elif part.dtype.itemsize == 1:
            part.copy_(torch.empty(part.shape).normal_(generator=generator))
        else:
            part.normal_(generator=generator).mul_(0.02 if kv_dtype == torch.int8 else 1.0)
    return cache


def attend(
    ops: Any, cache: LatentCache, spans: list[Span], rows: list[torch.Tensor]
) -> list[torch.Tensor]:
    """What the tokens of each span attend to; rows are queries, those of the rank first."""
    heads = rows[0].shape[1] // cache.width
    joined = torch.cat(rows)
    split = [heads * cache.rank, heads * cache.rope_dim]
    first, rest = (part.contiguous() for part in joined.split(split, dim=1))

    def record(ops: GraphBuilder, first: Value, rest: Value, metadata: Value) -> Value:
        return latent_attention(ops, first, rest, metadata, cache, scale=0.3)

    metadata = ops.attention_metadata(batch_of_spans(spans), heads, cache)
    out = compute(ops, record, {"first": first, "rest": rest}, metadata)
    return list(out.split([n for _, n, _ in spans]))


@given(
    sets, shapes(), dtypes, st.booleans(), threads, st.integers(0, 1200),
    st.lists(st.tuples(st.integers(0, 400), st.integers(1, 9)), min_size=1, max_size=4), seeds,
)  # fmt: skip
@settings(max_examples=80, deadline=None, derandomize=True)
def test_sequences_that_share_blocks_get_what_they_get_alone(
    name: str, shape: tuple[int, int, int, int], dtype: torch.dtype, int8: bool, num_threads: int,
    shared: int, own: list[tuple[int, int]], seed: int,
) -> None:  # fmt: skip
    ops, block_size = kernels(name).backend, shape[-1]
    prompt = list(range(shared // block_size))
    ids, spans = iter(range(len(prompt), 10_000)), list[Span]()
    for more, count in own:
        length = len(prompt) * block_size + more + count
        blocks = [*prompt, *(next(ids) for _ in range(-(-length // block_size) - len(prompt)))]
        spans.append((length - count, count, blocks))
    kv_dtype = torch.int8 if int8 else dtype
    cache = random_cache(ops, shape, next(ids), dtype, kv_dtype, seed)
    rows = [random_tensor(n, shape[0] * (shape[1] + shape[2])) for _, n, _ in spans]
    torch.set_num_threads(num_threads)
    together = attend(ops, cache, spans, rows)
    torch.set_num_threads(1 + num_threads % 4)
    for i, result in enumerate(together):
        assert torch.equal(attend(ops, cache, [spans[i]], [rows[i]])[0], result), i


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kv_dtype", [*DTYPES, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("block_size", [1, 8, 16])
def test_long_contexts(name: str, kv_dtype: torch.dtype, block_size: int) -> None:
    """Prompts that are computed at once, against the reference; a lone token behind them, split among threads."""
    heads, rank, rope_dim, ops = 5, 48, 16, kernels(name).backend
    dtype = torch.float32 if kv_dtype.itemsize == 1 else kv_dtype
    n, norm = 1300, 1 + 0.1 * random_tensor(rank)
    blocks = torch.randperm(
        -(-n // block_size), generator=torch.Generator().manual_seed(1)
    ).tolist()
    latents = random_tensor(n, rank + rope_dim, seed=1)
    queries, rotary = (random_tensor(n, heads * d, seed=d) for d in (rank, rope_dim))

    def run(ops: Any, cache: LatentCache, done: int, end: int) -> torch.Tensor:
        def record(ops: GraphBuilder, metadata: Value, **rows: Value) -> Value:
            table = ops.rotary_table(rows["positions"], torch.logspace(0, -3, rope_dim // 2), 1.0)
            rotary = rotate_and_cache_latents(
                ops, rows["rotary"], rows["latents"], metadata, table, cache, norm, 1e-6
            )
            return latent_attention(ops, rows["queries"], rotary, metadata, cache, scale=0.3)

        batch = batch_of_spans([(done, end - done, blocks)])
        tensors = {"queries": queries, "rotary": rotary, "latents": latents}
        tensors = {name: rows[done:end] for name, rows in tensors.items()}
        tensors["positions"] = batch.positions
        metadata = ops.attention_metadata(batch, heads, cache)
        found: torch.Tensor = compute(ops, record, tensors, metadata)
        return found

    shape = (len(blocks), block_size, rank, rope_dim, dtype, kv_dtype)
    torch.set_num_threads(2)
    cache = ops.allocate_latent_cache(*shape)
    whole = run(ops, cache, 0, n)
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3}.get(kv_dtype, 3e-2)
    assert_close(
        whole, run(REFERENCE.backend, REFERENCE.allocate_latent_cache(*shape), 0, n), 4, tolerance
    )
    for num_threads in (1, 4):
        torch.set_num_threads(num_threads)
        for tensor in cache.tensors.values():
            tensor.fill_(torch.nan if tensor.is_floating_point() else -128)
        parts = [
            run(ops, cache, 0, n - 2),
            run(ops, cache, n - 2, n - 1),
            run(ops, cache, n - 1, n),
        ]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kv_dtype", [*DTYPES, torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_broken_sequence_breaks_no_other(name: str, kv_dtype: torch.dtype) -> None:
    ops, shape = kernels(name).backend, (4, 32, 8, 16)
    dtype = torch.float32 if kv_dtype.itemsize == 1 else kv_dtype
    cache = random_cache(ops, shape, 8, dtype, kv_dtype, 0)
    spans: list[Span] = [(40, 3, [1, 2, 3]), (20, 1, [4, 5])]
    rows = [random_tensor(n, 4 * 40) for _, n, _ in spans]
    _, expected = attend(ops, cache, spans, rows)
    rows[0][1, 5] = torch.nan
    broken, other = attend(ops, cache, spans, rows)
    assert broken[1].isnan().any()
    assert not broken[0].isnan().any()
    assert torch.equal(other, expected)


def test_a_shared_prefix_is_read_once() -> None:
    ops = kernels(SETS[-1]).backend
    cache = ops.allocate_latent_cache(400, 16, 32, 8, torch.float32)
    ids, prompt = iter(range(200, 400)), list(range(128))
    spans = [(2303, 1, [*prompt, *(next(ids) for _ in range(16))]) for _ in range(3)]
    plan = ops.attention_metadata(batch_of_spans(spans), 16, cache)
    assert plan.native.num_tokens_read(2**40) == 2048 + 3 * 256
