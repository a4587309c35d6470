# SPDX-License-Identifier: Apache-2.0
"""Operations of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), recorded by a `GraphBuilder`.

The maps from a latent to a head's keys and values are absorbed: the first into the queries, the second behind the
attention. So every head attends to the latents themselves, which are read once for all of them, and prompts are
computed as later tokens are: a result does not depend on how a sequence was cut into steps.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, NamedTuple

from torch import Tensor, dtype

from pagoda.backend.base import Backend, HeadLinears, LatentCache, LinearT
from pagoda.backend.graph import RotaryTable, Value
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.weights import DenseWeight


class IndexQueries(NamedTuple):
    """Questions of an indexer."""

    queries: Value
    """[n, index heads index_dim], rotated as keys are."""
    weights: Value
    """[n, index heads], of each head's scores."""


def head_linear(ops: GraphBuilder, x: Value, weight: HeadLinears[Any]) -> Value:
    """Every head's own linear map of x [n, heads in]: [n, heads out]; rounds as `linear` does.

    Raises ValueError: shapes do not fit.
    """
    heads = len(weight.heads)
    if any((own.inputs, own.outputs) != (weight.inputs, weight.outputs) for own in weight.heads):
        raise ValueError("The maps of heads are of one shape.")
    if x.width != heads * weight.inputs:
        raise ValueError(f"Rows of {x.width} are not {heads} heads of {weight.inputs} inputs.")
    return ops.record("head_linear", [x], [weight], {}, heads * weight.outputs)


def rotate_and_cache_latents(
    ops: GraphBuilder,
    queries: Value,
    latents: Value,
    metadata: Value,
    table: RotaryTable | None,
    cache: LatentCache,
    norm: Sized,
    eps: float,
) -> Value:
    """Readies the rotary parts of queries [n, heads rope_dim], and caches latents [n, `cache.width`].

    The first `index_dim` elements of a latent are a key for an indexer, which is kept as it is. The `rank` behind
    them are normed (RMS) by a weight [rank] float32. The last `rope_dim`, and every head of queries, are rotated
    in pairs (i, i + rope_dim/2) by a table [n, rope_dim/2], or not without one. Returns the queries. Raises
    ValueError: shapes do not fit.
    """
    if latents.width != cache.width or len(norm) != cache.rank:
        raise ValueError(
            f"Latents of {latents.width} with a norm of {len(norm)} do not fit a cache of {cache.rank} and "
            f"{cache.rope_dim}."
        )
    if queries.width % cache.rope_dim:
        raise ValueError(f"Rows of {queries.width} are not heads of {cache.rope_dim}.")
    if table is not None and 2 * table.cosines.width != cache.rope_dim:
        raise ValueError(
            f"A rotary table of {2 * table.cosines.width} elements does not fit heads of {cache.rope_dim}."
        )
    return ops.record(
        "rotate_and_cache_latents",
        [queries, latents, metadata, *(table or ())],
        [cache, norm],
        {"eps": eps},
        queries.width,
    )


def latent_attention(
    ops: GraphBuilder,
    latent_queries: Value,
    rotary_queries: Value,
    metadata: Value,
    cache: LatentCache,
    *,
    scale: float,
) -> Value:
    """Causal attention over cached latents: [n, heads rank].

    A head's query is its part of `latent_queries` [n, heads rank], then that of `rotary_queries`
    [n, heads rope_dim]; values are the first `rank` elements of latents. Raises ValueError: shapes do not fit.
    """
    _check_heads(latent_queries, rotary_queries, cache)
    return ops.record(
        "latent_attention",
        [latent_queries, rotary_queries, metadata],
        [cache, *ops.context],
        {"scale": scale},
        latent_queries.width,
    )


def indexed_latent_attention(
    ops: GraphBuilder,
    latent_queries: Value,
    rotary_queries: Value,
    index: IndexQueries,
    metadata: Value,
    cache: LatentCache,
    *,
    scale: float,
    most: int,
) -> Value:
    """`latent_attention` over tokens that an indexer chooses (DeepSeek-AI 2025): [n, heads rank].

    A token scores itself and each token before it: weights of its index heads times the positive parts of products
    of their queries and the other's index key, added up. It attends to the `most` tokens of the highest scores, of
    equal ones to the first. Raises ValueError: shapes do not fit.
    """
    _check_heads(latent_queries, rotary_queries, cache)
    queries, weights = index
    if not cache.index_dim or queries.width != weights.width * cache.index_dim:
        raise ValueError(
            f"Rows of {queries.width} and {weights.width} are not queries and weights of an indexer's heads of "
            f"{cache.index_dim}."
        )
    return ops.record(
        "indexed_latent_attention",
        [latent_queries, rotary_queries, queries, weights, metadata],
        [cache],
        {"scale": scale, "most": most},
        latent_queries.width,
    )


def _check_heads(latent_queries: Value, rotary_queries: Value, cache: LatentCache) -> None:
    """Raises ValueError: queries are not of equally many heads."""
    heads, rest = divmod(latent_queries.width, cache.rank)
    if rest or rotary_queries.width != heads * cache.rope_dim:
        raise ValueError(
            f"Rows of {latent_queries.width} and {rotary_queries.width} are not queries of equally many heads of "
            f"{cache.rank} and {cache.rope_dim}."
        )


def prepare_head_linears(
    backend: Backend[LinearT, Any], weight: Tensor, dtype: dtype
) -> HeadLinears[LinearT]:
    """The maps of a weight [heads, out, in] of floats, kept in `dtype`."""
    prepared = (backend.prepare_linear([DenseWeight(head)], None, dtype) for head in weight)
    return HeadLinears(tuple(prepared))
