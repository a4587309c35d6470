# SPDX-License-Identifier: Apache-2.0
"""Cases that the tests of the CPU kernels share."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from block_weights import OTHER_BLOCKS, make_blocks, whole_rows
from hypothesis import settings
from hypothesis import strategies as st
from single_operations import SingleOperations
from torch import Tensor

from pagoda.backend.base import HeadNorms, KVCache
from pagoda.backend.cpu import native
from pagoda.backend.cpu.backend import CpuBackend
from pagoda.backend.host import rotary_table
from pagoda.backend.reference.attention import rotated
from pagoda.backend.reference.backend import ReferenceBackend
from pagoda.backend.weights import DenseWeight, GroupedWeight, Int8Weight, LinearWeight
from pagoda.checkpoints.gguf.config import BLOCKS
from pagoda.checkpoints.weight_formats import GROUP_SIZES
from pagoda.devices import BackendUnavailableError
from pagoda.plugins.backend_check.subject import batch_of_spans

try:
    SETS = [*native.available_instruction_sets(), *native.emulated_instruction_sets()]
except BackendUnavailableError:
    SETS = []
needs_kernels = pytest.mark.skipif(
    not SETS, reason="the kernels are not built, or not for this CPU"
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {
    **{torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.int8: 5e-3},
    torch.float8_e4m3fn: 4e-2,
}
REFERENCE = SingleOperations(ReferenceBackend())
BACKENDS = ("reference", *SETS)

sets = st.sampled_from(SETS or [""])
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**20)
threads = st.integers(1, 4)
examples = settings(max_examples=60, deadline=None, derandomize=True)


def backend_of(name: str) -> Any:
    """One of `BACKENDS`."""
    return REFERENCE if name == "reference" else kernels(name)


def kernels(instruction_set: str) -> SingleOperations:
    return SingleOperations(CpuBackend(instruction_set))


def random_tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(
    actual: Tensor, expected: Tensor, scale: float = 1.0, tolerance: float | None = None
) -> None:
    assert actual.dtype == expected.dtype
    tolerance = tolerance or TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance * scale, rtol=tolerance)


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    window: int | None
    normed: bool
    dtype: torch.dtype
    kv_dtype: torch.dtype

    @property
    def tolerance(self) -> float:
        return max(TOLERANCE[self.dtype], TOLERANCE[self.kv_dtype])


class Sequences:
    """Random sequences in a cache, attended to in any order, by the kernels or by the reference."""

    def __init__(self, shape: Shape, lengths: list[int], seed: int) -> None:
        self.shape = shape
        self.lengths = lengths
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.qkv = [
            random_tensor(n, width, seed=seed + i, dtype=shape.dtype).float()
            for i, n in enumerate(lengths)
        ]
        self.norms = None
        if shape.normed:
            q, k = (1 + 0.2 * random_tensor(shape.head_dim, seed=seed - i) for i in range(2))
            self.norms = HeadNorms(q, k, 1e-6)
        self.num_blocks = 3 + sum(-(-n // shape.block_size) for n in lengths)
        ids = list(range(self.num_blocks))
        random.Random(seed).shuffle(ids)
        self.blocks = [[ids.pop() for _ in range(-(-n // shape.block_size))] for n in lengths]
        self.frequencies = torch.logspace(0, -3, shape.head_dim // 2)

    def cache(self, ops: Any) -> KVCache:
        shape = self.shape
        cache = ops.allocate_kv_cache(
            self.num_blocks,
            shape.block_size,
            shape.kv_heads,
            shape.head_dim,
            shape.dtype,
            shape.kv_dtype,
        )
        # What ended requests may have left.
        for part in cache.tensors.values():
            part.fill_(torch.nan if part.is_floating_point() else -128)
        return cache

    def attend(
        self,
        ops: Any,
        cache: KVCache,
        shares: list[tuple[int, int, int]],
    ) -> list[Tensor]:
        """One step over (sequence, tokens before, tokens now)."""
        shape = self.shape
        batch = batch_of_spans([(done, n, self.blocks[i]) for i, done, n in shares])
        qkv = torch.cat([self.qkv[i][done : done + n] for i, done, n in shares])
        plan = ops.attention_metadata(batch, shape.heads, cache)
        rotary = (batch.positions, self.frequencies, self.norms, shape.heads)
        queries = ops.rotate_and_cache(qkv, cache, plan, *rotary)
        scale = shape.head_dim**-0.5
        out = ops.attention(queries, cache, plan, scale=scale, window=shape.window)
        return list(out.split([n for _, _, n in shares]))

    def formula(self, index: int) -> Tensor:
        """What a sequence attends to, all at once in plain words; for sequences without norms."""
        shape, n = self.shape, self.lengths[index]
        sizes = [shape.heads, shape.kv_heads, shape.kv_heads]
        q, k, v = self.qkv[index].view(n, -1, shape.head_dim).split(sizes, dim=1)
        table = rotary_table(torch.arange(n), self.frequencies, scale=1.0)
        group = shape.heads // shape.kv_heads
        keys = rotated(k, table).repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", rotated(q, table), keys)
        distance = torch.arange(n)[:, None] - torch.arange(n)
        hidden = (distance < 0) | (distance >= (shape.window or n))
        weights = (scores * shape.head_dim**-0.5).masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, dim=1))

    def everything(self) -> list[tuple[int, int, int]]:
        return [(i, 0, n) for i, n in enumerate(self.lengths)]

    def pieces(self, ops: Any, seed: int, longest: int) -> list[Tensor]:
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


@dataclass(frozen=True)
class Format:
    """Format of a weight; see `GroupedWeight`. Dense without bits, without group size `Int8Weight`."""

    bits: int | None = None
    group_size: int | None = None
    offsets: bool = False
    ordered: bool = False


DENSE, INT8 = Format(), Format(8)
grouped = st.builds(
    Format, st.sampled_from([4, 8]), st.sampled_from(GROUP_SIZES), st.booleans(), st.booleans()
)


def make_weight(stored_format: Format, outputs: int, inputs: int, seed: int) -> LinearWeight:
    generator = torch.Generator().manual_seed(seed)
    if stored_format.bits is None:
        return DenseWeight(torch.randn(outputs, inputs, generator=generator))
    if stored_format.group_size is None:
        codes = torch.randint(-127, 128, (outputs, inputs), generator=generator).to(torch.int8)
        scales = torch.randn(outputs, generator=generator)
        zero_points = torch.randint(-128, 128, (outputs,), generator=generator, dtype=torch.int32)
        return Int8Weight(codes, scales, zero_points if stored_format.offsets else None)
    codes = torch.randint(0, 2**stored_format.bits, (outputs, inputs), generator=generator)
    shape = (outputs, inputs // stored_format.group_size)
    scales, offsets = (torch.randn(shape, generator=generator).half() for _ in range(2))
    return GroupedWeight(
        codes.to(torch.uint8),
        scales,
        4 * offsets if stored_format.offsets else None,
        stored_format.bits,
        stored_format.group_size,
        torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))
        if stored_format.ordered
        else None,
    )


def quantized(ops: Any, kind: str, values: Tensor) -> LinearWeight:
    """The weight [out, in] as `dense`, `int8` or, in groups of 32, `int4`."""
    if kind == "dense":
        return DenseWeight(values)
    weight: LinearWeight = (
        ops.quantize_int8(values, symmetric=False)
        if kind == "int8"
        else ops.quantize_int4(values, 32)
    )
    return weight


QUANTIZED: dict[str, LinearWeight] = {
    "int8": make_weight(INT8, 333, 96, 1),
    "int8-long": make_weight(INT8, 33, 3000, 1),
    "int8-zeros": make_weight(Format(8, offsets=True), 70, 96, 1),
    "int4": make_weight(Format(4, 32), 70, 96, 1),
    "int4-offsets": make_weight(Format(4, 128, offsets=True), 70, 256, 1),
    "int4-order": make_weight(Format(4, 64, offsets=True, ordered=True), 70, 192, 1),
    "int8-groups": make_weight(Format(8, 128, offsets=True, ordered=True), 333, 256, 1),
    **{name: make_blocks(it, 70, 512, 1) for name, it in (BLOCKS | OTHER_BLOCKS).items()},
    **{f"int{b}-rows": make_blocks(whole_rows(b, 576), 70, 576, 1) for b in (4, 5, 8)},
}
