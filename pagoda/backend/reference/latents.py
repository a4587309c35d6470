# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention in plain PyTorch: attention of all heads over one key, which holds its value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backend.base import HeadLinears, KVCache, LatentCache, TokenBatch
from pagoda.backend.reference.attention import KEYS, AttentionMetadata, attention, plan_attention
from pagoda.backend.reference.context import context_attention
from pagoda.backend.reference.kept import write_kv
from pagoda.backend.reference.linear import Linear, linear
from pagoda.backend.reference.rows import rms_norm, rotated
from pagoda.parallel.collectives import Collectives

_TOKENS = 16
"""Tokens whose choices are copied at once."""


def as_keys_and_values(cache: LatentCache) -> KVCache:
    """The cache of one KV head whose keys are latents, and whose values begin with theirs."""
    return KVCache(cache.latents, cache.latents, cache.latent_scales, cache.latent_scales)


def head_linear(x: Tensor, weight: HeadLinears[Linear]) -> Tensor:
    heads = x.view(len(x), len(weight.heads), -1).unbind(1)
    return torch.cat([linear(own, head) for own, head in zip(heads, weight.heads, strict=True)], 1)


def rotate_and_cache_latents(
    queries: Tensor, latents: Tensor, metadata: AttentionMetadata, *rest: Any, eps: float
) -> Tensor:
    *table, cache, norm = rest
    index_key, latent, key = torch.split(latents, [cache.index_dim, cache.rank, cache.rope_dim], 1)
    queries, keys = (part.view(len(part), -1, cache.rope_dim) for part in (queries, key))
    if table:
        queries, keys = rotated(queries, (table[0], table[1])), rotated(keys, (table[0], table[1]))
    normed = rms_norm(latent, norm, eps=eps)
    vectors = torch.cat((normed, keys.flatten(1), index_key), dim=1)[:, None]
    write_kv(as_keys_and_values(cache), vectors, vectors, metadata)
    return queries.flatten(1)


def latent_attention(
    latent_queries: Tensor,
    rotary_queries: Tensor,
    metadata: AttentionMetadata,
    cache: LatentCache,
    ranks: Collectives | None = None,
    *,
    scale: float,
) -> Tensor:
    sizes = (cache.rank, cache.rope_dim)
    parts = zip((latent_queries, rotary_queries), sizes, strict=True)
    queries = torch.cat([part.view(len(part), -1, size) for part, size in parts], dim=2)
    attend = attention if ranks is None else partial(context_attention, ranks=ranks)
    out = attend(
        queries.flatten(1),
        metadata,
        as_keys_and_values(cache),
        head_dim=cache.width,
        scale=scale,
        window=None,
        softcap=None,
        chunk=None,
        causal=True,
    )
    return out.view_as(queries)[:, :, : cache.rank].flatten(1)


def indexed_latent_attention(
    latent_queries: Tensor,
    rotary_queries: Tensor,
    index_queries: Tensor,
    index_weights: Tensor,
    metadata: AttentionMetadata,
    cache: LatentCache,
    *,
    scale: float,
    most: int,
) -> Tensor:
    heads = rotary_queries.shape[1] // cache.rope_dim
    out = torch.empty_like(latent_queries)
    lens = zip(metadata.query_lens, metadata.context_lens, strict=True)
    places = [
        (sequence, length)
        for sequence, (new, total) in enumerate(lens)
        for length in range(total - new + 1, total + 1)
    ]
    for first in range(0, len(places), _TOKENS):
        tokens = slice(first, first + _TOKENS)
        chosen = [
            _chosen(cache, metadata.block_table[sequence], length, queries, weights, most)
            for (sequence, length), queries, weights in zip(
                places[tokens], index_queries[tokens], index_weights[tokens], strict=True
            )
        ]
        own, batch = _of_chosen(cache, chosen)
        plan = plan_attention(batch, heads, as_keys_and_values(own))
        out[tokens] = latent_attention(
            latent_queries[tokens], rotary_queries[tokens], plan, own, scale=scale
        )
    return out


def _chosen(
    cache: LatentCache, blocks: Tensor, length: int, queries: Tensor, weights: Tensor, most: int
) -> Tensor:
    """Rows [m] int64 in the cache of the tokens that an indexer chooses of a sequence of `length`."""
    size = cache.latents.shape[2]
    places = torch.arange(length)
    rows = blocks[places // size] * size + places % size
    if length <= most:
        return rows
    keys = cache.latents.flatten(0, 2)[rows][:, cache.width - cache.index_dim :].float()
    if cache.latent_scales is not None:
        keys *= cache.latent_scales.flatten()[rows][:, None]
    found = torch.relu(queries.view(len(weights), -1) @ keys.T)
    scores = (weights[:, None] * found).sum(0)
    return rows[scores.sort(descending=True, stable=True).indices[:most].sort().values]


def _of_chosen(cache: LatentCache, chosen: Sequence[Tensor]) -> tuple[LatentCache, TokenBatch]:
    """A cache of the chosen tokens without index keys, and a step to which those of each token are a sequence."""
    counts = torch.tensor([len(rows) for rows in chosen])
    blocks = -(-int(counts.max()) // KEYS)
    rows = torch.stack([F.pad(rows, (0, blocks * KEYS - len(rows))) for rows in chosen]).flatten()
    width = cache.width - cache.index_dim
    latents = cache.latents.flatten(0, 2)[rows][:, :width].view(-1, 1, KEYS, width)
    scales = cache.latent_scales
    if scales is not None:
        scales = scales.flatten()[rows].view(-1, 1, KEYS)
    batch = TokenBatch(
        token_ids=torch.zeros_like(counts),
        positions=counts - 1,
        sequence_ids=torch.arange(len(counts)),
        query_lens=torch.ones_like(counts),
        context_lens=counts,
        block_tables=(torch.arange(len(counts) * blocks).view(-1, blocks),),
    )
    return LatentCache(latents, cache.rank, cache.rope_dim, scales), batch


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        head_linear,
        rotate_and_cache_latents,
        latent_attention,
        indexed_latent_attention,
    )
}
"""Operations by name."""
