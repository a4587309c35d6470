# SPDX-License-Identifier: Apache-2.0
"""Shared memory between ranks that are threads of one process here; `tests/parallel` has them as processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import pytest
import torch
from cpu_cases import (
    DTYPES,
    SETS,
    TOLERANCE,
    assert_close,
    dtypes,
    needs_kernels,
    random_tensor,
    seeds,
    sets,
    threads,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagoda.backend.base import StepInput
from pagoda.backend.cpu.backend import CpuBackend
from pagoda.backend.cpu.collectives import SharedMemory, SharedMemoryCollectives
from pagoda.backend.cpu.weights import NativeAttentionMetadata
from pagoda.backend.graph import Graph
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.reference.backend import ReferenceBackend
from pagoda.backend.weights import DenseWeight
from pagoda.parallel.collectives import Alone, Collectives
from pagoda.parallel.distributed import DistributedCollectives, GroupStore

pytestmark = needs_kernels

_T = TypeVar("_T")
SLOT = 2**20
"""Bytes of a slot in csrc/collectives.cpp."""


@contextmanager
def _memory(size: int) -> Iterator[str]:
    memory = SharedMemory(size)
    try:
        yield memory.path
    finally:
        memory.close()


def _together(size: int, work: Callable[[int], _T]) -> list[_T]:
    """Results of `work` for each rank, each in a thread."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


def _in_group(size: int, work: Callable[[Collectives], _T]) -> list[_T]:
    with _memory(size) as path:
        return _together(size, lambda rank: work(SharedMemoryCollectives(path, rank, size)))


def _sum(parts: list[Tensor]) -> Tensor:
    """Sum in order, as floats."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


@given(
    size=st.integers(1, 5),
    dtype=dtypes,
    counts=st.lists(
        st.one_of(st.integers(0, 300), st.integers(5000, 70000)),
        min_size=1,
        max_size=6,
    ),
    num_threads=threads,
    seed=seeds,
)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_sums_are_in_order_of_rank(
    size: int, dtype: torch.dtype, counts: list[int], num_threads: int, seed: int
) -> None:
    inputs = [
        [random_tensor(count, seed=seed + 7 * rank + i, dtype=dtype) for rank in range(size)]
        for i, count in enumerate(counts)
    ]

    def work(group: Collectives) -> list[Tensor]:
        torch.set_num_threads(num_threads)
        return [group.all_reduce(parts[group.rank].clone()) for parts in inputs]

    for results in _in_group(size, work):
        for result, parts in zip(results, inputs, strict=True):
            assert torch.equal(_bits(result), _bits(_sum(parts)))


@pytest.mark.parametrize("size", [2, 3])
def test_sums_of_more_than_fits_the_memory(size: int) -> None:
    parts = [random_tensor(SLOT // 2 + 33, seed=rank, dtype=torch.float32) for rank in range(size)]
    for result in _in_group(size, lambda group: group.all_reduce(parts[group.rank].clone())):
        assert torch.equal(result, _sum(parts))


def test_what_is_not_finite_stays_so() -> None:
    x = torch.tensor([1.0, float("inf"), float("nan"), -0.0])

    def work(group: Collectives) -> Tensor:
        return group.all_reduce(x.clone())

    for result in _in_group(3, work):
        assert result.isfinite().tolist() == [True, False, False, True]
        assert result.isnan().tolist() == [False, False, True, False]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.bool])
def test_everybody_gathers_the_same(dtype: torch.dtype) -> None:
    for count in (1, 1000, SLOT // dtype.itemsize + 5):
        parts = [torch.arange(count).add(rank).to(dtype) for rank in range(3)]

        def work(group: Collectives, parts: list[Tensor] = parts) -> Tensor:
            return group.all_gather(parts[group.rank])

        for result in _in_group(3, work):
            assert torch.equal(result, torch.stack(parts))


@pytest.mark.parametrize("length", [0, 1, 100, SLOT + 1])
def test_what_rank_0_broadcasts_comes_to_all(length: int) -> None:
    payload = os.urandom(length)
    results = _in_group(3, lambda group: group.broadcast(None if group.rank else payload))
    assert results == [payload] * 3


def test_rank_0_must_broadcast_something() -> None:
    with _memory(2) as path, pytest.raises(ValueError, match="Rank 0 gives what is broadcast"):
        SharedMemoryCollectives(path, 0, 2).broadcast(None)


def test_a_group_that_does_not_fit_its_memory_is_refused() -> None:
    with _memory(2) as path:
        with pytest.raises(ValueError, match="not that of a group of this size"):
            SharedMemoryCollectives(path, 0, 3)
        with pytest.raises(ValueError, match="no such rank"):
            SharedMemoryCollectives(path, 2, 2)
    with pytest.raises(FileNotFoundError):
        SharedMemoryCollectives(path, 0, 2)


def test_a_group_of_too_many_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 64 ranks, not 65"):
        SharedMemory(65)


HIDDEN, INNER, VOCAB = 64, 96, 50


class _Part:
    """One rank's part of an embedding and of a map there and back, with a sum behind each."""

    def __init__(self, ops: CpuBackend | ReferenceBackend, dtype: torch.dtype) -> None:
        size, rank = ops.group.size, ops.group.rank
        table = random_tensor(VOCAB, HIDDEN, seed=1, dtype=dtype).chunk(size)
        up = random_tensor(INNER, HIDDEN, seed=2, dtype=dtype).chunk(size)
        down = random_tensor(HIDDEN, INNER, seed=3, dtype=dtype).chunk(size, dim=1)
        self.first_id = sum(map(len, table[:rank]))
        self.sizes = [len(part) for part in up]
        self.table, self.up, self.down = (
            ops.prepare_linear([DenseWeight(parts[rank].contiguous())], None, dtype)
            for parts in (table, up, down)
        )

    def graph(self, group: Collectives) -> Graph:
        """Results `out`, and `gathered` and `argmax` of the map in the middle."""
        ops = GraphBuilder(group)
        table = ops.embedding(ops.input("token_ids"), self.table, self.first_id, VOCAB)
        x = ops.all_reduce(table)
        inner = ops.linear(x, self.up)
        ops.result("gathered", ops.all_gather(inner, self.sizes))
        first = sum(self.sizes[: group.rank])
        ops.result("argmax", ops.all_gather_argmax(ops.linear_argmax(x, self.up, first)))
        ops.result("out", ops.all_reduce(ops.linear(inner, self.down)))
        return ops.build()


def _step(num_tokens: int) -> StepInput[NativeAttentionMetadata]:
    return StepInput({"token_ids": torch.arange(num_tokens) % VOCAB})


def _outputs(
    group: Collectives,
    name: str,
    dtype: torch.dtype,
    nums: list[int],
    num_threads: int,
    results: Sequence[str] = ("out",),
) -> list[Tensor]:
    """Results of a rank's compiled part, for steps of so many tokens."""
    torch.set_num_threads(num_threads)
    ops = ReferenceBackend(group) if name == "reference" else CpuBackend(name, group)
    compiled = ops.compile(_Part(ops, dtype).graph(group))
    return [out for num_tokens in nums for out in compiled(_step(num_tokens), results)]


@given(
    size=st.integers(2, 4),
    name=sets,
    dtype=dtypes,
    nums=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    num_threads=threads,
)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_programs_of_all_ranks_add_up_to_the_whole(
    size: int, name: str, dtype: torch.dtype, nums: list[int], num_threads: int
) -> None:
    def work(group: Collectives) -> list[Tensor]:
        return _outputs(group, name, dtype, nums, num_threads)

    whole = work(Alone())
    ranks = _in_group(size, work)
    for i, expected in enumerate(whole):
        scale = expected.abs().max().item()
        assert_close(ranks[0][i], expected, scale, 2 * TOLERANCE[dtype])
        assert all(torch.equal(_bits(rank[i]), _bits(ranks[0][i])) for rank in ranks)


@pytest.mark.parametrize("name", ["reference", *SETS])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_columns_of_all_ranks_and_their_argmax(name: str, size: int) -> None:
    """Shares of several sizes; every rank gets what one alone has."""

    def work(group: Collectives) -> list[Tensor]:
        return _outputs(group, name, torch.float32, [1, 30], 2, ["gathered", "argmax"])

    whole = work(Alone())
    for results in _in_group(size, work):
        for found, expected in zip(results, whole, strict=True):
            if found.dtype == torch.float32:
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
            else:
                assert torch.equal(found[:, [0, 2]], expected[:, [0, 2]])


class _Deserted:
    """A group whose other ranks are gone."""

    rank, size = 0, 2

    def all_reduce(self, x: Tensor) -> Tensor:
        raise ConnectionError(f"rank 1 is gone, {len(x)} rows were here")

    all_gather = all_reduce

    def broadcast(self, payload: bytes | None) -> bytes:
        raise ConnectionError(f"rank 1 is gone, {payload!r} was here")


@pytest.mark.parametrize("result", ["out", "argmax", "gathered"])
def test_what_a_group_raises_ends_the_step(result: str) -> None:
    ops = CpuBackend(SETS[-1], _Deserted())
    compiled = ops.compile(_Part(ops, torch.float32).graph(ops.group))
    for _ in range(2):
        with pytest.raises(ConnectionError, match="rank 1 is gone"):
            compiled(_step(40), [result])


def test_a_program_keeps_the_group_it_meets() -> None:
    def work(path: str, rank: int) -> Tensor:
        ops = CpuBackend(SETS[-1], SharedMemoryCollectives(path, rank, 2))
        compiled = ops.compile(_Part(ops, torch.float32).graph(ops.group))
        del ops
        return compiled(_step(3), ["out"])[0]

    with _memory(2) as path:
        one, other = _together(2, partial(work, path))
    assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("results", [["out"], ["argmax", "gathered", "out"]])
def test_programs_over_gloo_give_the_bits_of_those_that_share_memory(
    dtype: torch.dtype, results: list[str]
) -> None:
    size, nums = 3, [1, 40, 700]
    store = GroupStore("127.0.0.1")

    def over_gloo(rank: int) -> list[Tensor]:
        group = DistributedCollectives(store.address, rank, size, "127.0.0.1")
        return _outputs(group, SETS[-1], dtype, nums, 1, results)

    recorded = _in_group(size, lambda group: _outputs(group, SETS[-1], dtype, nums, 1, results))
    for there, here in zip(_together(size, over_gloo), recorded, strict=True):
        assert all(torch.equal(_bits(a), _bits(b)) for a, b in zip(there, here, strict=True))
