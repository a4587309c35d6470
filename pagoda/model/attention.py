# SPDX-License-Identifier: Apache-2.0
"""Attention of a layer, or what is in its place, as it is recorded."""

from __future__ import annotations

from typing import Any

from pagoda.backend.base import KVCache, LinearT, StateCache
from pagoda.backend.decoder_operations import alibi_attention, position_scale, scaled
from pagoda.backend.family_operations import scale_heads
from pagoda.backend.graph import RotaryTable, Value
from pagoda.backend.norms_over_ranks import norm_by_squares, sum_of_squares
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.relative_attention import columns
from pagoda.model.adapters import AdaptedLayer
from pagoda.model.caches import LayerCache
from pagoda.model.cross_encoder import ENCODED, crossing
from pagoda.model.loaded_layers import Layer
from pagoda.model.recording import inner_normed, with_adapters, with_own_heads
from pagoda.model.sharding import Shard


def attend(
    ops: GraphBuilder,
    shard: Shard,
    index: int,
    layer: Layer[LinearT],
    maps: AdaptedLayer | None,
    caches: tuple[LayerCache, list[StateCache]],
    table: RotaryTable | None,
    h: Value,
    adapters: Value | None,
    beside: Value | None = None,
) -> Value | None:
    """Input of a layer's map back: values that it attended to, or its own input where a map replaces attention.

    `beside` is added to queries, keys and values. None of a layer that has nothing in the place of attention.
    """
    if layer.qkv is None:
        return _own_inputs(ops, shard, h) if layer.spec.replaced == "map" else None
    held, states = caches
    crosses = layer.spec.attention.crosses
    cache, metadata = held.cache, ops.metadata(ENCODED if crosses else held.group)
    qkv = with_adapters(
        ops, ops.linear(h, layer.qkv), h, None if maps is None else maps.qkv, adapters
    )
    if beside is not None:
        qkv = ops.add(qkv, beside)
    if layer.of_kind is not None:
        return layer.of_kind.record(ops, h, qkv, metadata, table, states or [cache])
    if not isinstance(cache, KVCache):
        raise TypeError("The cache of plain attention holds keys and values.")
    spec, head_dim, norms = layer.spec.attention, shard.config.head_dim, layer.head_norms
    _, ranks = shard.attention_ranks
    if norms is not None and spec.qk_norm == "all" and ranks > 1:
        # Queries and keys of a token are normed together with those of the other ranks.
        own = (len(norms.queries), len(norms.keys))
        squares = ops.all_reduce(sum_of_squares(ops, qkv, queries=own[0], keys=own[1]))
        qkv = norm_by_squares(
            ops, qkv, squares, norms, all_queries=ranks * own[0], all_keys=ranks * own[1]
        )
        norms = None
    is_own = qkv.own
    qkv, table = with_own_heads(ops, qkv, layer, shard, table)
    queries = ops.share_rows(qkv)
    if crosses:
        ops.result(crossing(index), queries)
    elif spec.kv_layer is None:
        sizes: dict[str, Any] = {"num_heads": len(shard.heads), "head_dim": head_dim}
        queries = ops.rotate_and_cache(queries, metadata, table, cache, norms, **sizes)
    if spec.temperature is not None:
        scales = position_scale(ops, ops.input("positions"), **vars(spec.temperature))
        queries = ops.scale_rows(queries, scales)
    sizes = {"head_dim": head_dim, "scale": spec.scale}
    if layer.distances is not None:
        return layer.distances.record(ops, qkv, queries, metadata, cache, spec.scale)
    if layer.slopes is not None:
        out = alibi_attention(ops, queries, metadata, cache, layer.slopes, **sizes)
    else:
        out = ops.attention(
            queries,
            metadata,
            cache,
            window=spec.window,
            softcap=spec.softcap,
            sinks=layer.sinks,
            chunk=spec.chunk,
            causal=spec.causal and not crosses,
            **sizes,
        )
    out = scaled(ops, out, spec.value_scale)
    if is_own:
        out = ops.own_rows(out)
    if layer.gate is None:
        return inner_normed(ops, out, layer.output_norm)
    gates = ops.sigmoid(ops.linear(h, layer.gate))
    return scale_heads(ops, out, gates, head_dim) if spec.gates_heads else ops.mul(out, gates)


def _own_inputs(ops: GraphBuilder, shard: Shard, h: Value) -> Value:
    """This rank's part of h [n, hidden], which is shared out as the heads of attention are."""
    heads, width = shard.heads, h.width // shard.config.num_heads
    if len(heads) == shard.config.num_heads:
        return h
    return columns(ops, h, heads.start * width, len(heads) * width)
