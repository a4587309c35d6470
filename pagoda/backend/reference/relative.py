# SPDX-License-Identifier: Apache-2.0
"""Attention whose scores depend on distances of tokens, in plain PyTorch: where it is not causal, each sequence by
itself, and whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pagoda.backend.base import KVCache
from pagoda.backend.reference.attention import AttentionMetadata, attention, bmm

AddScores = Callable[[slice], Tensor]
"""Scores [heads, n, n] that are added to those of the n tokens of a step in a slice."""


def relative_attention(
    queries: Tensor,
    metadata: AttentionMetadata,
    cache: KVCache,
    distances: Tensor,
    *,
    head_dim: int,
    scale: float,
    reach: int,
    causal: bool,
) -> Tensor:
    if causal:
        if max(metadata.context_lens) > reach + 1:
            raise ValueError(f"A context is longer than the {reach + 1} tokens of all distances.")
        options: dict[str, Any] = {
            **{"head_dim": head_dim, "scale": scale, "causal": True, "distances": distances},
            **dict.fromkeys(("window", "softcap", "chunk")),
        }
        heads = torch.arange(len(distances), dtype=torch.float32)
        return attention(queries, metadata, cache, slopes=heads, **options)

    def added(tokens: slice) -> Tensor:
        return distances[:, _distances(tokens) + reach]

    return _attend(queries, metadata, cache, head_dim, scale, reach, added)


def disentangled_attention(
    queries: Tensor,
    metadata: AttentionMetadata,
    of_queries: Tensor,
    of_keys: Tensor,
    cache: KVCache,
    *,
    head_dim: int,
    scale: float,
    buckets: tuple[int, ...],
) -> Tensor:
    bucket_of, reach = torch.tensor(buckets), len(buckets) // 2
    num_heads = queries.shape[1] // head_dim

    def added(tokens: slice) -> Tensor:
        own = bucket_of[_distances(tokens) + reach].expand(num_heads, -1, -1)
        query, key = (
            part[tokens].view(len(own[0]), num_heads, -1).transpose(0, 1)
            for part in (of_queries, of_keys)
        )
        return scale * (query.gather(2, own) + key.gather(2, own.transpose(1, 2)).transpose(1, 2))

    return _attend(queries, metadata, cache, head_dim, scale, reach, added)


def _distances(tokens: slice) -> Tensor:
    """[n, n], places of keys behind queries."""
    places = torch.arange(tokens.stop - tokens.start)
    return places - places[:, None]


def _attend(
    queries: Tensor,
    metadata: AttentionMetadata,
    cache: KVCache,
    head_dim: int,
    scale: float,
    reach: int,
    added: AddScores,
) -> Tensor:
    out, first = torch.empty_like(queries), 0
    for count, length in zip(metadata.query_lens, metadata.context_lens, strict=True):
        if count < length or length > reach + 1:
            raise ValueError(
                f"{count} tokens of a context of {length} are not of a whole one of at most {reach + 1}."
            )
        tokens = slice(first, first := first + count)
        query = (queries[tokens] * scale).view(count, -1, head_dim).transpose(0, 1)
        repeats = len(query) // cache.keys.shape[1]
        place = (metadata.block_ids[tokens], slice(None), metadata.offsets[tokens])
        keys, values = (
            _kept(held[place], None if scales is None else scales[place])
            .transpose(0, 1)
            .repeat_interleave(repeats, 0)
            for held, scales in (
                (cache.keys, cache.key_scales),
                (cache.values, cache.value_scales),
            )
        )
        weights = torch.softmax(bmm(query, keys.transpose(1, 2)) + added(tokens), dim=-1)
        out[tokens] = bmm(weights, values).transpose(0, 1).flatten(1)
    return out


def _kept(rows: Tensor, scales: Tensor | None) -> Tensor:
    """Rows [n, kv_heads, d] of a cache in float32."""
    return rows.float() if scales is None else rows.float() * scales[..., None]


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    function.__name__: function for function in (relative_attention, disentangled_attention)
}
"""Operations by name."""
