# SPDX-License-Identifier: Apache-2.0
"""Attention over segments of contexts: the same bits wherever each of them lies."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from cpu_cases import BACKENDS, assert_close, backend_of, needs_kernels, random_tensor
from torch import Tensor

from pagoda.backend.base import ColdContexts, KVCache, LatentCache, StagedSegment
from pagoda.backend.decoder_operations import alibi_attention
from pagoda.backend.graph import Value
from pagoda.backend.latent_layers import latent_attention
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.single import compute
from pagoda.model.alibi import alibi_slopes
from pagoda.plugins.backend_check.subject import batch_of_spans

AnyCache = KVCache | LatentCache
HEADS, KV_HEADS, HEAD_DIM, RANK, ROPE_DIM = 6, 3, 32, 48, 16
FORMATS = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.int8),
]

pytestmark = needs_kernels


@dataclass(frozen=True)
class Layer:
    """A layer with random K and V, or latents, of some sequences, and queries of their last tokens."""

    ops: Any
    cache: AnyCache
    spans: list[tuple[int, int, list[int]]]
    queries: Tensor
    sinks: Tensor | None
    slopes: Tensor | None = None
    """Of scores by distance, in place of sinks and a soft cap."""

    @classmethod
    def random(
        cls,
        name: str,
        latent: bool,
        formats: tuple[Any, Any],
        block_size: int,
        seed: int,
        slopes: Tensor | None = None,
    ) -> Layer:
        ops, rng = backend_of(name), random.Random(seed)
        lengths = [2300, 450, 300, 77]
        counts = [-(-n // block_size) for n in lengths]
        ids = rng.sample(range(sum(counts)), sum(counts))
        spans = []
        for n, count in zip(lengths, counts, strict=True):
            now = rng.choice([1, 3, 40])
            spans.append((n - now, now, [ids.pop() for _ in range(count)]))
        shape = (sum(counts), block_size)
        cache = (
            ops.allocate_latent_cache(*shape, RANK, ROPE_DIM, *formats)
            if latent
            else ops.allocate_kv_cache(*shape, KV_HEADS, HEAD_DIM, *formats)
        )
        generator = torch.Generator().manual_seed(seed)
        for part in cache.tensors.values():
            if part.dtype == torch.int8:
                part.random_(-127, 128, generator=generator)
            else:
                part.normal_(generator=generator)
                part.mul_(0.02 if formats[1] == torch.int8 else 1.0)
        width = HEADS * ((RANK + ROPE_DIM) if latent else HEAD_DIM)
        queries = random_tensor(sum(now for _, now, _ in spans), width, seed=seed)
        sinks = None if latent else random_tensor(HEADS, seed=seed)
        return cls(ops, cache, spans, queries, sinks, slopes)

    def attend(self, segment: int, cold: ColdContexts | None = None) -> Tensor:
        batch = replace(batch_of_spans(self.spans), segment=segment)
        if cold is not None:
            batch = replace(batch, cold={0: cold})
        metadata = self.ops.attention_metadata(batch, HEADS, self.cache)
        cache = self.cache
        if isinstance(cache, LatentCache):
            first, rest = self.queries.split([HEADS * RANK, HEADS * ROPE_DIM], dim=1)

            def record_latents(
                ops: GraphBuilder, first: Value, rest: Value, metadata: Value
            ) -> Value:
                return latent_attention(ops, first, rest, metadata, cache, scale=0.3)

            tensors = {"first": first.contiguous(), "rest": rest.contiguous()}
            found: Tensor = compute(self.ops, record_latents, tensors, metadata)
            return found

        def record(ops: GraphBuilder, queries: Value, metadata: Value) -> Value:
            sizes: dict[str, Any] = {"head_dim": HEAD_DIM, "scale": 0.3}
            if self.slopes is not None:
                return alibi_attention(ops, queries, metadata, cache, self.slopes, **sizes)
            return ops.attention(
                *(queries, metadata, cache),
                **sizes,
                window=None,
                softcap=20.0,
                sinks=self.sinks,
            )

        out: Tensor = compute(self.ops, record, {"queries": self.queries}, metadata)
        return out

    def blocks(self, sequence: int, index: int, size: int) -> list[int]:
        """Blocks of a segment, of which each has so many."""
        return self.spans[sequence][2][index * size : (index + 1) * size]


class Elsewhere:
    """Segments in memory of their own, whose blocks lie apart and in no order; those in the cache are spoilt."""

    def __init__(self, layer: Layer, segment: int, block_size: int, counts: Sequence[int]) -> None:
        size = segment // block_size
        self._segments = [
            layer.blocks(sequence, index, size)
            for sequence, count in enumerate(counts)
            for index in range(count)
        ]
        moved = [block for blocks in self._segments for block in blocks]
        places = random.Random(5).sample(range(len(moved)), len(moved))
        self._place_of = dict(zip(moved, places, strict=True))
        tensors = layer.cache.tensors
        sizes = {kind: tensor[0].nbytes for kind, tensor in tensors.items()}
        stride = sum(sizes.values()) + 192
        memory = torch.zeros(stride * len(moved) + 64, dtype=torch.uint8)
        there, begin = {}, 64
        for kind, tensor in tensors.items():
            item = tensor.itemsize
            there[kind] = memory.view(tensor.dtype).as_strided(
                (len(moved), *tensor.shape[1:]),
                (stride // item, *tensor[0].stride()),
                begin // item,
            )
            there[kind][places] = tensor[moved]
            tensor[moved] = torch.nan if tensor.is_floating_point() else -128
            begin += sizes[kind]
        self.cache = replace(layer.cache, **there)
        self.values = (
            layer.cache.latents if isinstance(layer.cache, LatentCache) else layer.cache.values
        ).data_ptr()
        self.calls: list[int] = []

    def take(self, values: int, index: int, count: int = 1) -> StagedSegment:
        assert values == self.values
        self.calls += range(index, index + count)
        blocks = [block for own in self._segments[index : index + count] for block in own]
        return StagedSegment(self.cache, [self._place_of[block] for block in blocks])

    def release(self, values: int) -> None:
        assert values == self.values
        self.calls.append(-1)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("latent", [False, True], ids=["heads", "latents"])
@pytest.mark.parametrize("formats", FORMATS, ids=lambda formats: str(formats[1]))
@pytest.mark.parametrize(("segment", "counts"), [(128, [17, 0, 2, 0]), (1024, [2, 0, 0, 0])])
@pytest.mark.parametrize("block_size", [1, 16, 128])
def test_where_segments_lie_changes_no_bit(
    name: str, latent: bool, formats: Any, segment: int, counts: list[int], block_size: int
) -> None:
    torch.set_num_threads(1)
    layer = Layer.random(name, latent, formats, block_size, seed=segment + block_size)
    whole = layer.attend(segment)
    assert whole.isfinite().all()
    torch.set_num_threads(3)
    source = Elsewhere(layer, segment, block_size, counts)
    in_place = [number % 5 != 2 for number in range(sum(counts))]
    found = layer.attend(segment, ColdContexts(counts, source, in_place))
    assert torch.equal(found, whole)
    assert source.calls == [*range(sum(counts)), -1]


@pytest.mark.parametrize("name", BACKENDS)
def test_scores_by_distance_reach_into_segments_elsewhere(name: str) -> None:
    layer = Layer.random(name, False, FORMATS[0], 16, seed=7, slopes=alibi_slopes(HEADS))
    whole = layer.attend(128)
    assert_close(whole, layer.attend(4096))
    source = Elsewhere(layer, 128, 16, counts := [17, 0, 2, 0])
    cold = ColdContexts(counts, source, [number % 5 > 0 for number in range(sum(counts))])
    assert torch.equal(layer.attend(128, cold), whole)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("latent", [False, True], ids=["heads", "latents"])
def test_segments_only_change_the_order_of_sums(name: str, latent: bool) -> None:
    layer = Layer.random(name, latent, FORMATS[0], 16, seed=3)
    whole = layer.attend(4096)
    first = len(whole) - sum(now for _, now, _ in layer.spans[1:])
    for segment in (128, 1024):
        found = layer.attend(segment)
        assert_close(found, whole)
        assert not torch.equal(found[:first], whole[:first])
        assert torch.equal(found[-layer.spans[-1][1] :], whole[-layer.spans[-1][1] :])


class Broken:
    def take(self, values: int, index: int, count: int = 1) -> StagedSegment:  # noqa: ARG002
        raise LookupError(f"segment {index}")

    def release(self, values: int) -> None:
        """Nothing was taken."""


@pytest.mark.parametrize("name", BACKENDS)
def test_what_a_source_raises_ends_the_step(name: str) -> None:
    layer = Layer.random(name, False, FORMATS[1], 16, seed=4)
    with pytest.raises(LookupError, match="segment 0"):
        layer.attend(128, ColdContexts([2, 0, 0, 0], Broken(), [True, True]))
    assert layer.attend(128).isfinite().all()


@pytest.mark.parametrize("name", BACKENDS)
def test_cold_segments_lie_before_all_queries(name: str) -> None:
    layer = Layer.random(name, False, FORMATS[1], 16, seed=4)
    with pytest.raises(ValueError, match="3 cold segments of 128"):
        layer.attend(128, ColdContexts([0, 0, 3, 0], Broken(), [True, False, True]))
