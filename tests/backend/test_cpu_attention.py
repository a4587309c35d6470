# SPDX-License-Identifier: Apache-2.0
"""Attention over the paged cache: what the reference computes, and the same bits however a sequence is cut."""

from __future__ import annotations

import pytest
import torch
from cpu_cases import (
    DTYPES,
    REFERENCE,
    SETS,
    Sequences,
    Shape,
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
from single_operations import SingleOperations

from pagoda.backend.base import KVCache
from pagoda.plugins.backend_check.subject import batch_of_spans

KV_DTYPES = [*DTYPES, torch.int8, torch.float8_e4m3fn]

pytestmark = needs_kernels


shapes = st.builds(
    lambda group, kv_heads, dim, block, window, normed, dtype, kv_dtype: Shape(
        group * kv_heads, kv_heads, 2 * dim, block, window, normed, dtype, kv_dtype or dtype
    ),
    st.integers(1, 16),
    st.integers(1, 3),
    st.integers(1, 40) | st.sampled_from([32, 48, 64]),
    st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128, 384]),
    st.none() | st.integers(1, 200),
    st.booleans(),
    dtypes,
    st.none() | st.sampled_from(KV_DTYPES),
)


@given(
    sets, shapes, st.lists(st.integers(1, 180), min_size=1, max_size=4), threads, seeds,
    st.integers(1, 60),
)  # fmt: skip
@settings(max_examples=150, deadline=None, derandomize=True)
def test_attention(
    name: str, shape: Shape, lengths: list[int], num_threads: int, seed: int, longest: int
) -> None:
    torch.set_num_threads(num_threads)
    sequences, ops = Sequences(shape, lengths, seed), kernels(name)
    whole = sequences.attend(ops, sequences.cache(ops), sequences.everything())
    expected = sequences.attend(REFERENCE, sequences.cache(REFERENCE), sequences.everything())
    for actual, wanted in zip(whole, expected, strict=True):
        assert_close(actual, wanted, 4, shape.tolerance)
    torch.set_num_threads(1 + num_threads % 4)
    for one, other in zip(sequences.pieces(ops, seed, longest), whole, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.int8),
        (torch.bfloat16, torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_long_contexts_are_split_without_a_trace(
    name: str, window: int | None, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """A lone token's context is shared out among threads; in a large step it is not."""
    shape = Shape(4, 2, 32, 16, window, True, dtype, kv_dtype)
    sequences, ops = Sequences(shape, [1700, 1024, 513, 40], 3), kernels(name)
    torch.set_num_threads(1)
    whole = sequences.attend(ops, sequences.cache(ops), sequences.everything())
    expected = sequences.attend(REFERENCE, sequences.cache(REFERENCE), sequences.everything())
    for actual, wanted in zip(whole, expected, strict=True):
        assert_close(actual, wanted, 4, shape.tolerance)
    for num_threads in (1, 4):
        torch.set_num_threads(num_threads)
        cache = sequences.cache(ops)
        for i, n in enumerate(sequences.lengths):
            early = sequences.attend(ops, cache, [(i, 0, n - 3)])[0]
            late = [sequences.attend(ops, cache, [(i, n - k, 1)])[0] for k in (3, 2, 1)]
            assert torch.equal(torch.cat([early, *late]), whole[i])


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 16])
def test_a_broken_sequence_breaks_no_other(
    name: str, dtype: torch.dtype, kv_dtype: torch.dtype, block_size: int
) -> None:
    """A scale that is not a number makes no element a number, so the fault shows."""
    shape = Shape(4, 2, 32, block_size, None, False, dtype, kv_dtype)
    sequences, ops = Sequences(shape, [40, 21], 5), kernels(name)
    whole = sequences.attend(ops, sequences.cache(ops), sequences.everything())
    for column in (0, 4 * 32 + 3, 6 * 32 + 3):  # of a query, a key, a value
        kept = sequences.qkv[0][7, column].clone()
        sequences.qkv[0][7, column] = torch.nan
        broken, other = sequences.attend(ops, sequences.cache(ops), sequences.everything())
        sequences.qkv[0][7, column] = kept
        assert broken[7].isnan().any(), column
        assert torch.equal(other, whole[1])


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_int8_caches_hold_what_the_reference_caches(
    name: str, dtype: torch.dtype, block_size: int
) -> None:
    """Some elements may be rounded the other way, as rotation does not end in the same last bit."""
    shape = Shape(2, 2, 32, block_size, None, False, dtype, torch.int8)
    sequences, ops = Sequences(shape, [37], 6), kernels(name)
    sequences.qkv[0][3] = 0  # has no scale
    own, expected = sequences.cache(ops), sequences.cache(REFERENCE)
    for one, cache in ((ops, own), (REFERENCE, expected)):
        sequences.attend(one, cache, sequences.everything())
    blocks = sequences.blocks[0][: 37 // block_size]  # the last may be part empty
    keys = own.keys.permute(0, 1, 3, 2, 4).reshape(expected.keys.shape)
    values = own.values.transpose(3, 4).reshape(expected.values.shape)
    differences = (keys[blocks].int() - expected.keys[blocks].int()).abs()
    assert int(differences.max()) <= 1
    assert float(differences.float().mean()) < 0.02
    assert torch.equal(values[blocks], expected.values[blocks])
    for scales, wanted in (
        (own.key_scales, expected.key_scales),
        (own.value_scales, expected.value_scales),
    ):
        assert scales is not None
        assert wanted is not None
        torch.testing.assert_close(scales[blocks], wanted[blocks], rtol=2**-7, atol=0)


tables = st.tuples(
    st.lists(st.integers(0, 24), min_size=1, max_size=3),  # blocks of prompts that many begin with
    st.lists(
        # Which of them, how many of its blocks, own blocks, tokens of the last one, new tokens.
        st.tuples(
            st.integers(0, 2),
            st.integers(0, 24),
            st.integers(1, 6),
            st.integers(1, 128),
            st.integers(1, 40),
        ),
        min_size=2,
        max_size=9,
    ),
)


@given(
    sets, st.integers(1, 9), st.integers(1, 3), st.sampled_from([8, 48, 64]),
    st.sampled_from([1, 16, 32, 128]), st.none() | st.sampled_from([70, 400, 1500]), dtypes,
    st.booleans(), threads, tables, st.integers(0, 2), seeds,
)  # fmt: skip
@settings(max_examples=80, deadline=None, derandomize=True)
def test_sequences_that_share_blocks_get_what_they_get_alone(
    name: str, group: int, kv_heads: int, head_dim: int, block_size: int, window: int | None,
    dtype: torch.dtype, int8: bool, num_threads: int,
    drawn: tuple[list[int], list[tuple[int, int, int, int, int]]], decoding: int, seed: int,
) -> None:  # fmt: skip
    ops, scale = kernels(name), 64 // block_size or 1
    ids = iter(torch.randperm(4096, generator=torch.Generator().manual_seed(seed)).tolist())
    prompts = [[next(ids) for _ in range(count * scale)] for count in drawn[0]]
    spans = []
    for which, shared, own, last, new in drawn[1]:
        prompt = prompts[which % len(prompts)][: shared * scale]
        blocks = [*prompt, *(next(ids) for _ in range(own))]
        length = (len(blocks) - 1) * block_size + (last - 1) % block_size + 1
        count = min(length, new if decoding == 0 else 1)
        spans.append((length - count, count, blocks))
    cache = random_cache(ops, 4096, block_size, kv_heads, head_dim, dtype, int8, seed)
    rows = [random_tensor(n, group * kv_heads, head_dim) for _, n, _ in spans]

    def attend(chosen: list[int]) -> list[torch.Tensor]:
        plan = ops.attention_metadata(
            batch_of_spans([spans[i] for i in chosen]), group * kv_heads, cache
        )
        queries = torch.cat([rows[i] for i in chosen])
        out = ops.attention(queries, cache, plan, scale=head_dim**-0.5, window=window)
        return list(out.split([spans[i][1] for i in chosen]))

    torch.set_num_threads(num_threads)
    together = attend(list(range(len(spans))))
    torch.set_num_threads(1 + num_threads % 4)
    for i, result in enumerate(together):
        assert torch.equal(attend([i])[0], result), i


def random_cache(
    ops: SingleOperations, num_blocks: int, block_size: int, kv_heads: int, head_dim: int,
    dtype: torch.dtype, int8: bool, seed: int,
) -> KVCache:  # fmt: skip
    kv_dtype = torch.int8 if int8 else dtype
    cache = ops.allocate_kv_cache(num_blocks, block_size, kv_heads, head_dim, dtype, kv_dtype)
    generator = torch.Generator().manual_seed(seed)
    for part in cache.tensors.values():
        if part.dtype == torch.int8:
            part.random_(-127, 128, generator=generator)
        else:
            part.normal_(generator=generator).mul_(0.1 if int8 else 1.0)
    return cache


@needs_kernels
@pytest.mark.parametrize(
    ("contexts", "shared", "read"),
    [
        # A prompt of 2,048 tokens is read once; 16 rows of two queries are one tile.
        ([2304] * 16, 2048, 2048 + 16 * 256),
        # Whole key tiles of 64 are shared.
        ([1400, 1500], 1400, 1344 + (1400 - 1344) + (1500 - 1344)),
        # Too few of the last split are: 64 of 1,024 to 1,088.
        ([1100, 1400], 1100, 1024 + (1100 - 1024) + (1400 - 1024)),
        # Nothing to speak of in common.
        ([200] * 2, 64, 400),
        ([600, 700, 800], 0, 2100),
    ],
)
def test_a_shared_prefix_is_read_once(contexts: list[int], shared: int, read: int) -> None:
    ops, size = kernels(SETS[-1]), 4
    cache = ops.allocate_kv_cache(20000, size, 2, 8, torch.float32)
    ids, prompt = iter(range(1000, 20000)), list(range(shared // size))
    spans = [
        (context - 1, 1, [*prompt, *(next(ids) for _ in range(-(-context // size) - len(prompt)))])
        for context in contexts
    ]
    plan = ops.attention_metadata(batch_of_spans(spans), 4, cache)
    assert plan.native.num_tokens_read(2**40) == read


@needs_kernels
def test_tokens_behind_a_window_are_not_read() -> None:
    ops = kernels(SETS[-1])
    cache = ops.allocate_kv_cache(200, 16, 2, 8, torch.float32)
    plan = ops.attention_metadata(batch_of_spans([(2000, 1, list(range(200)))]), 4, cache)
    assert plan.native.num_tokens_read(2**40) == 2001
    # Key tiles are read from their beginning.
    assert plan.native.num_tokens_read(100) == 2001 - (2001 - 100) // 64 * 64
