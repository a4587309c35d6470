# SPDX-License-Identifier: Apache-2.0
"""Norms of the heads of several ranks together, recorded by a `GraphBuilder` (OLMo 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagoda.backend.graph import Attribute, Value
from pagoda.backend.operations import GraphBuilder

if TYPE_CHECKING:
    from pagoda.backend.base import HeadNorms


def sum_of_squares(ops: GraphBuilder, qkv: Value, *, queries: int, keys: int) -> Value:
    """Sums of squares of the first `queries` elements of qkv [n, d], and of the `keys` behind them: [n, 2].

    Raises ValueError: rows are not queries, keys, and as many values."""
    if queries + 2 * keys != qkv.width:
        raise ValueError(f"{queries} and twice {keys} elements are not rows of {qkv.width}.")
    return ops.record("sum_of_squares", [qkv], [], {"queries": queries, "keys": keys}, 2)


def norm_by_squares(
    ops: GraphBuilder,
    qkv: Value,
    squares: Value,
    norms: HeadNorms,
    *,
    all_queries: int,
    all_keys: int,
) -> Value:
    """RMS norms of queries, and of keys, of qkv [n, d] over the heads of all ranks together: [n, d].

    `squares` [n, 2] are `sum_of_squares`, added up over the ranks, of `all_queries` and `all_keys` elements; those
    that several ranks have count for each, all equally often. Norms are of this rank's heads. Raises ValueError:
    shapes do not fit.
    """
    queries, keys = len(norms.queries), len(norms.keys)
    if squares.width != 2 or queries + 2 * keys != qkv.width:
        raise ValueError(f"Norms of {queries} and {keys} do not fit rows of {qkv.width}.")
    attributes: dict[str, Attribute] = {
        "queries": queries,
        "keys": keys,
        "all_queries": all_queries,
        "all_keys": all_keys,
        "eps": norms.eps,
    }
    weights = [norms.queries, norms.keys]
    return ops.record("norm_by_squares", [qkv, squares], weights, attributes, qkv.width)
