# SPDX-License-Identifier: Apache-2.0
"""Kinds of attention that families differ in: the formula on all backends, with the same bits in pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cpu_cases import random_tensor
from torch import Tensor

from pagoda.backend.base import HeadNorms, KVCache
from pagoda.backend.decoder_operations import alibi_attention
from pagoda.backend.graph import Value
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.relative_attention import (
    columns,
    disentangled_attention,
    relative_attention,
)
from pagoda.backend.single import compute
from pagoda.model.alibi import alibi_slopes
from pagoda.plugins.backend_check.subject import batch_of_spans

HEADS, KV_HEADS, HEAD_DIM, EPS = 4, 2, 32, 1e-6
REACH, NUM_BUCKETS = 160, 7
BUCKETS = [min(NUM_BUCKETS - 1, abs(i - 10) // 9) for i in range(-REACH, REACH + 1)]
SLOPES = alibi_slopes(HEADS)
LENGTHS = (150, 1, 70)
BLOCKS = [list(range(10 * i, 10 * i + 10)) for i in range(len(LENGTHS))]


@dataclass(frozen=True)
class _Kind:
    rotated: int = HEAD_DIM
    """Elements of a head that are rotated."""
    norms: str = ""
    """`heads` or `all` of them together."""
    softcap: float | None = None
    has_sinks: bool = False
    window: int | None = None
    chunk: int | None = None
    scale: float = 1.0
    """Factor of the rotated elements."""
    causal: bool = True
    by_distance: str = ""
    """Scores by `numbers` of distances, by `buckets` of them, or by distances times `slopes`."""

    @property
    def distances(self) -> Tensor:
        return random_tensor(HEADS, 2 * REACH + 1, seed=3)

    def numbers(self, index: int) -> tuple[Tensor, Tensor]:
        """Numbers of queries and of keys in each bucket."""
        shape = (LENGTHS[index], HEADS * NUM_BUCKETS)
        return random_tensor(*shape, seed=index + 5), random_tensor(*shape, seed=index + 9)

    @property
    def frequencies(self) -> Tensor:
        return torch.logspace(0, -3, self.rotated // 2)

    @property
    def head_norms(self) -> HeadNorms | None:
        if not self.norms:
            return None
        sizes = (HEAD_DIM, HEAD_DIM)
        if self.norms == "all":
            sizes = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
        return HeadNorms(
            *(1 + 0.2 * random_tensor(n, seed=n + i) for i, n in enumerate(sizes)), EPS
        )

    @property
    def sinks(self) -> Tensor | None:
        return torch.tensor([-3.0, 0.5, 4.0, 90.0]) if self.has_sinks else None


KINDS = {
    "partial": _Kind(rotated=8),
    "unrotated": _Kind(rotated=0),
    "normed, partial": _Kind(rotated=24, norms="heads"),
    "normed over all heads": _Kind(norms="all"),
    "soft cap": _Kind(softcap=2.5),
    "soft cap in a window": _Kind(softcap=30.0, window=20),
    "sinks": _Kind(has_sinks=True),
    "sinks in a window": _Kind(has_sinks=True, window=20),
    "chunks": _Kind(chunk=20),
    "chunks of whole key tiles": _Kind(chunk=64),
    "chunks and windows": _Kind(chunk=48, window=33),
    "partial, scaled": _Kind(rotated=24, scale=1.2),
    "both ways": _Kind(causal=False),
    "both ways, soft cap and sinks": _Kind(causal=False, softcap=2.5, has_sinks=True),
    "a window both ways": _Kind(causal=False, window=20),
    "a window both ways of a tile, with sinks": _Kind(causal=False, window=64, has_sinks=True),
    "slopes": _Kind(by_distance="slopes"),
    "slopes, unrotated": _Kind(rotated=0, by_distance="slopes"),
    "numbers of distances": _Kind(causal=False, by_distance="numbers"),
    "numbers of distances before a token": _Kind(by_distance="numbers"),
    "buckets of distances": _Kind(causal=False, by_distance="buckets"),
}


def _qkv(index: int) -> Tensor:
    return random_tensor(LENGTHS[index], (HEADS + 2 * KV_HEADS) * HEAD_DIM, seed=index)


def _attend(
    ops: Any, kind: _Kind, cache: KVCache, shares: list[tuple[int, int, int]]
) -> list[Tensor]:
    """One step over (sequence, tokens before, tokens now)."""
    batch = batch_of_spans([(done, n, BLOCKS[i]) for i, done, n in shares])
    width = HEADS * NUM_BUCKETS

    def record(
        graph: GraphBuilder, qkv: Value, positions: Value, numbers: Value, metadata: Value
    ) -> Value:
        table = (
            graph.rotary_table(positions, kind.frequencies, kind.scale) if kind.rotated else None
        )
        queries = graph.rotate_and_cache(
            qkv, metadata, table, cache, kind.head_norms, num_heads=HEADS, head_dim=HEAD_DIM
        )
        if kind.by_distance == "slopes":
            return alibi_attention(
                graph, queries, metadata, cache, SLOPES, head_dim=HEAD_DIM, scale=0.3
            )
        if kind.by_distance == "numbers":
            return relative_attention(
                graph,
                queries,
                metadata,
                cache,
                kind.distances,
                head_dim=HEAD_DIM,
                scale=0.3,
                causal=kind.causal,
            )
        if kind.by_distance == "buckets":
            parts = (columns(graph, numbers, i * width, width) for i in range(2))
            sizes = {"head_dim": HEAD_DIM, "scale": 0.3}
            return disentangled_attention(graph, queries, metadata, *parts, cache, BUCKETS, **sizes)
        return graph.attention(
            queries,
            metadata,
            cache,
            head_dim=HEAD_DIM,
            scale=0.3,
            window=kind.window,
            softcap=kind.softcap,
            sinks=kind.sinks,
            chunk=kind.chunk,
            causal=kind.causal,
        )

    qkv = torch.cat([_qkv(i)[done : done + n] for i, done, n in shares])
    numbers = torch.cat([torch.cat(kind.numbers(i), 1)[done : done + n] for i, done, n in shares])
    tensors = {"qkv": qkv, "positions": batch.positions, "numbers": numbers}
    metadata = ops.attention_metadata(batch, HEADS, cache)
    out: Tensor = compute(ops.backend, record, tensors, metadata)
    return list(out.split([n for _, _, n in shares]))


def _rotated(kind: _Kind, x: Tensor) -> Tensor:
    """Heads [n, heads, d] of the tokens from the first on."""
    angles = torch.arange(len(x))[:, None, None] * kind.frequencies.double()
    left, right, rest = x.split([kind.rotated // 2, kind.rotated // 2, HEAD_DIM - kind.rotated], -1)
    cos, sin = angles.cos() * kind.scale, angles.sin() * kind.scale
    return torch.cat((left * cos - right * sin, right * cos + left * sin, rest), dim=-1)


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def _formula(kind: _Kind, index: int) -> Tensor:
    n, norms = LENGTHS[index], kind.head_norms
    sizes = [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]
    q, k, v = _qkv(index).double().split(sizes, dim=1)
    if norms is not None and kind.norms == "all":
        q, k = _normed(q, norms.queries), _normed(k, norms.keys)
    q, k, v = (each.view(n, -1, HEAD_DIM) for each in (q, k, v))
    if norms is not None and kind.norms == "heads":
        q, k = _normed(q, norms.queries), _normed(k, norms.keys)
    q, k = _rotated(kind, q), _rotated(kind, k).repeat_interleave(HEADS // KV_HEADS, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k)
    distance = torch.arange(n)[:, None] - torch.arange(n)
    if kind.by_distance == "buckets":
        own = torch.tensor(BUCKETS)[REACH - distance]
        of_queries, of_keys = (it.view(n, HEADS, -1) for it in kind.numbers(index))
        places = torch.arange(n)
        scores += of_queries[places[:, None], :, own].permute(2, 0, 1)
        scores += of_keys[places[None], :, own].permute(2, 0, 1)
    scores *= 0.3
    if kind.by_distance == "numbers":
        scores += kind.distances[:, REACH - distance]
    if kind.by_distance == "slopes":
        scores -= SLOPES.double()[:, None, None] * distance
    if kind.softcap is not None:
        scores = kind.softcap * torch.tanh(scores / kind.softcap)
    behind = distance < 0 if kind.causal else -distance >= (kind.window or n)
    scores.masked_fill_(behind | (distance >= (kind.window or n)), -torch.inf)
    chunks = torch.arange(n) // (kind.chunk or n)
    scores.masked_fill_(chunks[:, None] != chunks, -torch.inf)
    if kind.sinks is not None:
        scores = torch.cat((scores, kind.sinks.double()[:, None, None].expand(-1, n, 1)), dim=-1)
    weights = scores.softmax(-1)[..., :n]
    out = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(HEADS // KV_HEADS, dim=1))
    return out.flatten(1).float()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_formula_and_bits_in_pieces(ops: Any, name: str, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    kind = KINDS[name]
    shape = (30, 16, KV_HEADS, HEAD_DIM, torch.float32)
    whole = _attend(
        ops, kind, ops.allocate_kv_cache(*shape), [(i, 0, n) for i, n in enumerate(LENGTHS)]
    )
    for index, result in enumerate(whole):
        torch.testing.assert_close(result, _formula(kind, index), atol=3e-5, rtol=1e-4)
    cache = ops.allocate_kv_cache(*shape)
    if not kind.causal:  # a sequence is computed in one step, in other company
        for tensor in cache.tensors.values():
            tensor.fill_(torch.nan)  # what others may leave there does no harm
        for shares in ([(0, 0, 150)], [(2, 0, 70), (1, 0, 1)]):
            for (index, *_), result in zip(shares, _attend(ops, kind, cache, shares), strict=True):
                assert torch.equal(result, whole[index])
        return
    first = _attend(ops, kind, cache, [(2, 0, 33), (0, 0, 7)])
    second = _attend(ops, kind, cache, [(0, 7, 143), (1, 0, 1), (2, 33, 1)])
    assert torch.equal(torch.cat((first[1], second[0])), whole[0])
    assert torch.equal(second[1], whole[1])
    assert torch.equal(torch.cat((first[0], second[2])), whole[2][:34])


def test_a_sink_takes_its_share_of_a_split_context(ops: Any) -> None:
    """Contexts beyond a split of the kernels, whose results are merged, have one sink."""
    kind = _Kind(rotated=0, has_sinks=True)
    n = 1300
    batch = batch_of_spans([(0, n, list(range(82)))])
    cache = ops.allocate_kv_cache(90, 16, 1, HEAD_DIM, torch.float32)
    sinks = torch.tensor([6.0])

    def record(graph: GraphBuilder, qkv: Value, metadata: Value) -> Value:
        heads = {"num_heads": 1, "head_dim": HEAD_DIM}
        queries = graph.rotate_and_cache(qkv, metadata, None, cache, kind.head_norms, **heads)
        return graph.attention(
            queries, metadata, cache, head_dim=HEAD_DIM, scale=0.2, window=None, sinks=sinks
        )

    qkv = random_tensor(n, 3 * HEAD_DIM, seed=4)
    metadata = ops.attention_metadata(batch, 1, cache)
    out = compute(ops.backend, record, {"qkv": qkv}, metadata)
    q, k, v = qkv.double().chunk(3, dim=1)
    scores = (0.2 * q @ k.t()).masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
    weights = torch.cat((scores, sinks.double().expand(n, 1)), dim=1).softmax(-1)[:, :n]
    torch.testing.assert_close(out, (weights @ v).float(), atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sinks": torch.zeros(3)}, "3 sinks are not those of 4 heads"),
        ({"softcap": -1.0}, "A softcap is above 0, not -1.0"),
        ({"chunk": 0}, "A chunk is above 0, not 0"),
        ({"window": 0}, "A window is above 0, not 0"),
        ({"chunk": 8, "causal": False}, "Chunks are of causal attention"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    ops: Any, options: dict[str, Any], message: str
) -> None:
    cache = ops.allocate_kv_cache(1, 16, KV_HEADS, HEAD_DIM, torch.float32)
    metadata = ops.attention_metadata(batch_of_spans([(0, 2, [0])]), HEADS, cache)
    queries = torch.zeros(2, HEADS, HEAD_DIM)
    with pytest.raises(ValueError, match=message):
        ops.attention(queries, cache, metadata, scale=1.0, **{"window": None} | options)
