# SPDX-License-Identifier: Apache-2.0
"""Parts of layers, as they are recorded."""

from __future__ import annotations

from collections.abc import Sequence

from pagoda.backend.base import HeadNorms, LinearT
from pagoda.backend.decoder_operations import clip, layer_norm_heads, rotate_heads, scaled
from pagoda.backend.family_operations import rms_norm_heads
from pagoda.backend.graph import RotaryTable, Value
from pagoda.backend.low_rank import LowRankMaps
from pagoda.backend.norms_over_ranks import norm_by_squares, sum_of_squares
from pagoda.backend.operations import GraphBuilder
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.model.loaded_layers import InnerNorm, Layer, Norm, VectorLayer
from pagoda.model.sharding import Shard


def normed(ops: GraphBuilder, x: Value, norm: Norm | None, eps: float) -> Value:
    """x [n, hidden] behind its norm, if there is one."""
    if norm is None:
        return x
    if norm.bias is None:
        return ops.rms_norm(x, norm.weight, eps)
    return ops.layer_norm(x, norm.weight, norm.bias, eps)


def residual(ops: GraphBuilder, layer: Layer[LinearT], place: int, x: Value, h: Value) -> Value:
    """Sum that attention, at place 0, or the MLP adds to: hidden states x, or h, which are these behind a norm."""
    factors = layer.spec.normed_residuals
    return x if factors is None else scaled(ops, h, factors[place])


def added(
    ops: GraphBuilder,
    config: ModelSpec,
    layer: Layer[LinearT],
    x: Value,
    out: Value,
    norm: Norm | None,
) -> Value:
    """x [n, hidden] with what attention or MLP adds; the norm is of that, or of the sum."""
    eps, factor = config.norm.eps, config.multipliers.residual
    if layer.spec.norms_sums:
        return normed(ops, ops.add(x, out), norm, eps)
    return ops.add(x, scaled(ops, normed(ops, out, norm, eps), factor))


def inner_normed(ops: GraphBuilder, x: Value, norm: InnerNorm | None) -> Value:
    """x [n, d], this rank's inputs of a map back, behind the norm of those of all ranks, if there is one."""
    if norm is None:
        return x
    if norm.all_inputs == x.width:
        return ops.rms_norm(x, norm.weight, norm.eps)
    squares = ops.all_reduce(sum_of_squares(ops, x, queries=x.width, keys=0))
    norms = HeadNorms(norm.weight, norm.weight[:0], norm.eps)
    return norm_by_squares(ops, x, squares, norms, all_queries=norm.all_inputs, all_keys=1)


def through(
    ops: GraphBuilder, x: Value, layers: Sequence[VectorLayer[LinearT]], eps: float
) -> Value:
    """x [n, hidden] behind layers, each with its activation and norm."""
    for layer in layers:
        x = ops.linear(x, layer.weight)
        if layer.activation == "tanh":
            x = ops.softcap(x, 1.0)
        elif layer.activation != "identity":
            x = getattr(ops, layer.activation)(x)
        x = normed(ops, x, layer.norm, eps)
    return x


def with_adapters(
    ops: GraphBuilder, out: Value, x: Value, maps: LowRankMaps | None, adapters: Value | None
) -> Value:
    """`out` [n, out] of a layer with what adapters make of its inputs x."""
    if maps is None or adapters is None:
        return out
    return ops.add_low_rank(out, x, adapters, maps)


def with_own_heads(
    ops: GraphBuilder, qkv: Value, layer: Layer[LinearT], shard: Shard, table: RotaryTable | None
) -> tuple[Value, RotaryTable | None]:
    """Queries, keys and values [n, d] as few families have them, and the table that is yet to rotate them."""
    spec, config = layer.spec.attention, shard.config
    head_dim = config.head_dim
    if spec.clip is not None:
        qkv = clip(ops, qkv, spec.clip)
    if layer.head_layer_norms is not None:
        norms, eps = layer.head_layer_norms, config.norm.eps
        qkv = layer_norm_heads(ops, qkv, *norms, head_dim=head_dim, eps=eps)
    if layer.part_norm is not None:
        weight, first, eps = layer.part_norm
        qkv = rms_norm_heads(ops, qkv, weight, first=first, head_dim=head_dim, eps=eps)
    if not (spec.norms_rotated or spec.kv_layer is not None) or table is None:
        return qkv, table
    num_heads = len(shard.heads) + (shard.num_kv_heads if spec.kv_layer is None else 0)
    elements = num_heads * head_dim
    shared = ops.share_rows(qkv)  # the table is of all rows
    return rotate_heads(ops, shared, table, elements=elements, head_dim=head_dim), None
