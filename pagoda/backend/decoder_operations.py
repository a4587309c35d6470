# SPDX-License-Identifier: Apache-2.0
"""Operations of few families of decoders, recorded by a `GraphBuilder`."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING

from pagoda.backend.graph import RotaryTable, Value
from pagoda.backend.operations import GraphBuilder

if TYPE_CHECKING:
    from pagoda.backend.base import KVCache


def scaled(ops: GraphBuilder, x: Value, factor: float) -> Value:
    """x [n, d] times a factor, if it is not one."""
    return x if factor == 1 else ops.scale(x, factor)


def position_scale(
    ops: GraphBuilder, positions: Value, *, period: float, factor: float, offset: float
) -> Value:
    """1 + factor log(1 + floor((position + offset) / period)) of positions [n]: [n, 1].

    Queries are scaled by it (Llama 4 with offset 1, Ministral 3 with 0; Nakanishi 2025).
    """
    attributes = {"period": period, "factor": factor, "offset": offset}
    return ops.record("position_scale", [positions], [], attributes, 1)


def alibi_attention(
    ops: GraphBuilder,
    queries: Value,
    metadata: Value,
    cache: KVCache,
    slopes: Sized,
    *,
    head_dim: int,
    scale: float,
) -> Value:
    """Attention of queries [n, heads d] over cached tokens of their sequences up to themselves: [n, heads d].

    Scores are less by a slope [heads] float32 of each token between query and key (ALiBi, Press et al. 2021).
    Raises ValueError: shapes do not fit.
    """
    if len(slopes) * head_dim != queries.width:
        raise ValueError(f"{len(slopes)} slopes are not of {queries.width // head_dim} heads.")
    weights = [cache, slopes, *ops.context]
    numbers = {"head_dim": head_dim, "scale": scale}
    return ops.record("alibi_attention", [queries, metadata], weights, numbers, queries.width)


def layer_norm_heads(
    ops: GraphBuilder, x: Value, weight: Sized, bias: Sized, *, head_dim: int, eps: float
) -> Value:
    """x [n, d] whose first heads are layer-normed, each by its own part of weight and bias: [n, d].

    These are [heads head_dim] float32. Raises ValueError: shapes do not fit.
    """
    count = len(weight)
    if len(bias) != count or count > x.width or count % head_dim:
        raise ValueError(f"Norms of {count} elements do not fit rows of {x.width}.")
    numbers = {"elements": count, "head_dim": head_dim, "eps": eps}
    return ops.record("layer_norm_heads", [x], [weight, bias], numbers, x.width)


def rotate_heads(
    ops: GraphBuilder, x: Value, table: RotaryTable, *, elements: int, head_dim: int
) -> Value:
    """x [n, d] whose first heads, of so many elements together, are rotated as `rotate_and_cache` does: [n, d].

    Raises ValueError: shapes do not fit.
    """
    rotated = 2 * table.cosines.width
    if elements > x.width or elements % head_dim or rotated > head_dim:
        raise ValueError(f"{elements} elements of rows of {x.width} are no heads of {head_dim}.")
    numbers = {"elements": elements, "head_dim": head_dim, "width": rotated}
    return ops.record("rotate_heads", [x, *table], [], numbers, x.width)


def xielu(
    ops: GraphBuilder, x: Value, *, positive: float, negative: float, beta: float, eps: float
) -> Value:
    """The activation of Apertus (Huang and Schlag 2024) of x [n, d].

    x is mapped to positive x^2 + beta x above 0, else to negative (e^min(x, eps) - 1 - x) + beta x.
    """
    numbers = {"positive": positive, "negative": negative, "beta": beta, "eps": eps}
    return ops.record("xielu", [x], [], numbers, x.width)


def clip(ops: GraphBuilder, x: Value, limit: float) -> Value:
    """x [n, d] brought between -limit and limit (OLMo, MPT)."""
    return ops.record("clip", [x], [], {"limit": limit}, x.width)
