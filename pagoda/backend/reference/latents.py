# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention in plain PyTorch: attention of all heads over one key, which holds its value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pagoda.backend.base import HeadLinears, KVCache, LatentCache
from pagoda.backend.reference.attention import AttentionMetadata, attention
from pagoda.backend.reference.context import context_attention
from pagoda.backend.reference.kept import write_kv
from pagoda.backend.reference.linear import Linear, linear
from pagoda.backend.reference.rows import rms_norm, rotated
from pagoda.parallel.collectives import Collectives


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
    queries, keys = (
        part.view(len(part), -1, cache.rope_dim) for part in (queries, latents[:, cache.rank :])
    )
    if table:
        queries, keys = rotated(queries, (table[0], table[1])), rotated(keys, (table[0], table[1]))
    normed = rms_norm(latents[:, : cache.rank], norm, eps=eps)
    vectors = torch.cat((normed, keys.flatten(1)), dim=1)[:, None]
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


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (head_linear, rotate_and_cache_latents, latent_attention)
}
"""Operations by name."""
