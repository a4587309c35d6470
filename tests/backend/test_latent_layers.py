# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention with absorbed maps, against the formulas with keys and values of each head."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagoda.backend.base import HeadLinears, LatentCache, TokenBatch
from pagoda.backend.graph import RotaryTable, Value
from pagoda.backend.latent_layers import (
    IndexQueries,
    head_linear,
    indexed_latent_attention,
    latent_attention,
    prepare_head_linears,
    rotate_and_cache_latents,
)
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.reference.backend import ReferenceBackend
from pagoda.backend.single import compute

_HEADS, _RANK, _ROPE, _NOPE, _VALUE = 3, 24, 8, 20, 12
_TOKENS, _EPS, _SCALE = 37, 1e-5, 0.19


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    """x [n, heads, d] as complex numbers of elements i and i + d/2, turned by angles [n, d/2]."""
    left, right = x.chunk(2, dim=-1)
    turned = torch.complex(left, right) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)


def _batch(first: int, end: int) -> TokenBatch:
    positions = torch.arange(first, end)
    return TokenBatch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        sequence_ids=torch.zeros_like(positions),
        query_lens=torch.tensor([end - first]),
        context_lens=torch.tensor([end]),
        block_tables=(torch.tensor([[2, 0, 1]]),),
    )


def test_absorbed_maps_give_what_keys_and_values_of_each_head_give() -> None:
    nope, rope = _random(_TOKENS, _HEADS, _NOPE, seed=0), _random(_TOKENS, _HEADS, _ROPE, seed=1)
    stored = _random(_TOKENS, _RANK + _ROPE, seed=2)
    to_keys, to_values = (
        _random(_HEADS, size, _RANK, seed=size) for size in (_NOPE, _VALUE)
    )  # k = W latent, v = W latent
    norm, frequencies = 1 + 0.1 * _random(_RANK, seed=3), torch.tensor([1.0, 0.1, 0.01, 0.001])
    angles = torch.outer(torch.arange(_TOKENS).float(), frequencies)

    latent = stored[:, :_RANK]
    latent = latent * torch.rsqrt(latent.square().mean(1, keepdim=True) + _EPS) * norm
    keys = torch.cat(
        (
            torch.einsum("hdr,nr->nhd", to_keys, latent),
            _rotated(stored[:, None, _RANK:], angles).expand(-1, _HEADS, -1),
        ),
        dim=2,
    )
    values = torch.einsum("hvr,nr->nhv", to_values, latent)
    queries = torch.cat((nope, _rotated(rope, angles)), dim=2)
    scores = torch.einsum("nhd,mhd->hnm", queries, keys) * _SCALE
    seen = torch.ones(_TOKENS, _TOKENS).tril().bool()
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    expected = torch.einsum("hnm,mhv->nhv", weights, values).flatten(1)

    backend = ReferenceBackend()
    cache = backend.allocate_latent_cache(3, 16, _RANK, _ROPE, torch.float32)
    absorbed = prepare_head_linears(backend, to_keys.transpose(1, 2), torch.float32)
    back = prepare_head_linears(backend, to_values, torch.float32)

    def record(ops: GraphBuilder, metadata: Value, positions: Value, **rows: Value) -> Value:
        table = ops.rotary_table(positions, frequencies, 1.0)
        rotary = rotate_and_cache_latents(
            ops, rows["rope"], rows["stored"], metadata, table, cache, norm, _EPS
        )
        queries = head_linear(ops, rows["nope"], absorbed)
        out = latent_attention(ops, queries, rotary, metadata, cache, scale=_SCALE)
        return head_linear(ops, out, back)

    parts = []
    for first, end in ((0, 20), (20, _TOKENS)):
        batch = _batch(first, end)
        tensors = {"nope": nope.flatten(1), "rope": rope.flatten(1), "stored": stored}
        tensors = {name: rows[first:end] for name, rows in tensors.items()}
        tensors["positions"] = batch.positions
        metadata = backend.attention_metadata(batch, _HEADS, cache)
        parts.append(compute(backend, record, tensors, metadata))
    torch.testing.assert_close(torch.cat(parts), expected, atol=2e-5, rtol=2e-5)
    assert [*cache.tensors] == ["latents"]
    assert cache.latents.nbytes == 3 * 16 * (_RANK + _ROPE) * 4


def test_an_indexer_chooses_the_highest_scores_and_of_equal_ones_the_first() -> None:
    """Against scores of whole matrices, and a mask. Every third key is the same, of the highest scores."""
    heads, dim, most = 4, 12, 7
    queries, rope = (
        _random(_TOKENS, _HEADS * _RANK, seed=0),
        _random(_TOKENS, _HEADS * _ROPE, seed=1),
    )
    stored = _random(_TOKENS, dim + _RANK + _ROPE, seed=2)
    index, weights = (
        _random(_TOKENS, heads * dim, seed=3).abs(),
        _random(_TOKENS, heads, seed=4).abs(),
    )
    keys = stored[:, :dim]
    keys[::3] = 5.0
    norm = torch.ones(_RANK)

    products = torch.einsum("nhd,md->nhm", index.view(-1, heads, dim), keys).relu()
    scores = torch.einsum("nh,nhm->nm", weights, products)
    scores = scores.masked_fill(~torch.ones(_TOKENS, _TOKENS).tril().bool(), -torch.inf)
    order = scores.sort(descending=True, stable=True).indices[:, :most]
    chosen = torch.zeros(_TOKENS, _TOKENS).scatter(1, order, 1.0).bool() & (scores > -torch.inf)
    latents = stored[:, dim:].clone()
    latents[:, :_RANK] *= torch.rsqrt(latents[:, :_RANK].square().mean(1, keepdim=True) + _EPS)
    both = torch.cat((queries.view(_TOKENS, _HEADS, -1), rope.view(_TOKENS, _HEADS, -1)), 2)
    attention = torch.einsum("nhd,md->nhm", both, latents) * _SCALE
    shares = attention.masked_fill(~chosen[:, None], -torch.inf).softmax(-1)
    expected = torch.einsum("nhm,mr->nhr", shares, latents[:, :_RANK]).flatten(1)

    backend = ReferenceBackend()
    cache = backend.allocate_latent_cache(3, 16, _RANK, _ROPE, torch.float32, index_dim=dim)

    def record(ops: GraphBuilder, metadata: Value, **rows: Value) -> Value:
        rotary = rotate_and_cache_latents(
            ops, rows["rope"], rows["stored"], metadata, None, cache, norm, _EPS
        )
        asked = IndexQueries(rows["index"], rows["weights"])
        return indexed_latent_attention(
            ops, rows["queries"], rotary, asked, metadata, cache, scale=_SCALE, most=most
        )

    batch = _batch(0, _TOKENS)
    tensors = {"queries": queries, "rope": rope, "stored": stored, "index": index}
    metadata = backend.attention_metadata(batch, _HEADS, cache)
    found = compute(backend, record, {**tensors, "weights": weights}, metadata)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


class _Recorded:
    """Values of a graph whose cache has 3 heads of a rank of 24 and 8 rotated elements."""

    def __init__(self) -> None:
        backend = ReferenceBackend()
        self.ops = GraphBuilder(backend.group)
        self.cache: LatentCache = backend.allocate_latent_cache(1, 16, _RANK, _ROPE, torch.float32)
        self.norm = torch.ones(_RANK)
        self.metadata = self.ops.metadata()
        self.maps = prepare_head_linears(backend, torch.ones(3, 5, 7), torch.float32)

    def cached(self, queries: int, latents: int, norm: int, pairs: int | None) -> None:
        table = None
        if pairs is not None:
            table = RotaryTable(self.ops.input("cosines", pairs), self.ops.input("sines", pairs))
        queried, stored = self.ops.input("queries", queries), self.ops.input("stored", latents)
        rotate_and_cache_latents(
            self.ops, queried, stored, self.metadata, table, self.cache, torch.ones(norm), _EPS
        )


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((24, 30, 24, None), "Latents of 30 with a norm of 24 do not fit a cache of 24 and 8."),
        ((24, 32, 25, None), "Latents of 32 with a norm of 25 do not fit a cache of 24 and 8."),
        ((25, 32, 24, None), "Rows of 25 are not heads of 8."),
        ((24, 32, 24, 3), "A rotary table of 6 elements does not fit heads of 8."),
    ],
)
def test_latents_that_do_not_fit_the_cache_are_refused(
    sizes: tuple[int, int, int, int | None], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _Recorded().cached(*sizes)


@pytest.mark.parametrize(("latent", "rotary"), [(71, 24), (72, 16)])
def test_queries_of_other_heads_are_refused(latent: int, rotary: int) -> None:
    own = _Recorded()
    queries = own.ops.input("latent", latent), own.ops.input("rotary", rotary)
    with pytest.raises(ValueError, match=f"Rows of {latent} and {rotary} are not queries of"):
        latent_attention(own.ops, *queries, own.metadata, own.cache, scale=1.0)


def test_rows_of_other_heads_are_refused() -> None:
    own = _Recorded()
    with pytest.raises(ValueError, match=r"Rows of 20 are not 3 heads of 7 inputs\."):
        head_linear(own.ops, own.ops.input("x", 20), own.maps)


def test_heads_of_several_shapes_are_refused() -> None:
    own = _Recorded()
    (wide,) = prepare_head_linears(ReferenceBackend(), torch.ones(1, 6, 7), torch.float32).heads
    maps = HeadLinears((*own.maps.heads, wide))
    with pytest.raises(ValueError, match=r"The maps of heads are of one shape\."):
        head_linear(own.ops, own.ops.input("x", 28), maps)
