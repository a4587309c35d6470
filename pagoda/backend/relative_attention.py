# SPDX-License-Identifier: Apache-2.0
"""Attention whose scores depend on distances of tokens, recorded by a `GraphBuilder`.

A token of an encoder sees all of its sequence, which is computed in one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagoda.backend.graph import Value
from pagoda.backend.operations import GraphBuilder

if TYPE_CHECKING:
    from torch import Tensor

    from pagoda.backend.base import KVCache


def columns(ops: GraphBuilder, x: Value, first: int, count: int) -> Value:
    """The `count` columns of x [n, d] from `first` on: [n, count]. Raises ValueError: x has fewer."""
    if first < 0 or count <= 0 or first + count > x.width:
        raise ValueError(f"Rows of {x.width} have no {count} columns from {first} on.")
    return ops.record("columns", [x], [], {"first": first, "count": count}, count)


def relative_attention(
    ops: GraphBuilder,
    queries: Value,
    metadata: Value,
    cache: KVCache,
    distances: Tensor,
    *,
    head_dim: int,
    scale: float,
    causal: bool = False,
) -> Value:
    """Attention of queries [n, heads d] over all tokens of their sequences: [n, heads d] (Shaw et al. 2018).

    A number of `distances` [heads, 2 reach + 1] float32 is added to the score of a query and a key: that of the
    key's place behind the query plus `reach` (T5, Raffel et al. 2020; MPNet). With `causal`, tokens see those up
    to themselves. Raises ValueError: shapes do not fit. Steps raise ValueError: a sequence is longer than
    `reach + 1` tokens, or is not whole and not causal.
    """
    heads, count = distances.shape
    if heads * head_dim != queries.width or count % 2 == 0:
        raise ValueError(
            f"Numbers of {count} distances of {heads} heads do not fit queries of {queries.width}."
        )
    return ops.record(
        "relative_attention",
        [queries, metadata],
        [cache, distances],
        {"head_dim": head_dim, "scale": scale, "reach": count // 2, "causal": causal},
        queries.width,
    )


def disentangled_attention(
    ops: GraphBuilder,
    queries: Value,
    metadata: Value,
    of_queries: Value,
    of_keys: Value,
    cache: KVCache,
    buckets: Sequence[int],
    *,
    head_dim: int,
    scale: float,
) -> Value:
    """Attention of queries [n, heads d] over all tokens of their sequences: [n, heads d] (He et al. 2020).

    `buckets` [2 reach + 1] are those of a key's place behind the query, from `-reach` on. A number of the query,
    of `of_queries` [n, heads buckets], and one of the key, of `of_keys` [n, heads buckets], in the bucket of
    their distance are added to their product, before all three are scaled. Raises ValueError: shapes do not fit.
    Steps raise ValueError: a sequence is longer than `reach + 1` tokens, or not whole.
    """
    count, rest = divmod(of_queries.width, queries.width // head_dim)
    if rest or of_keys.width != of_queries.width or not 0 <= min(buckets) <= max(buckets) < count:
        raise ValueError(
            f"Rows of {of_queries.width} and {of_keys.width} are not numbers of each head and bucket."
        )
    if len(buckets) % 2 == 0:
        raise ValueError(f"{len(buckets)} distances are not as many before a token as behind it.")
    return ops.record(
        "disentangled_attention",
        [queries, metadata, of_queries, of_keys],
        [cache],
        {"head_dim": head_dim, "scale": scale, "buckets": tuple(buckets)},
        queries.width,
    )
