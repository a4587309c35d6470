# SPDX-License-Identifier: Apache-2.0
"""MLPs of layers, dense ones and mixtures of experts, as they are recorded."""

from __future__ import annotations

from pagoda.backend.base import LinearT
from pagoda.backend.decoder_operations import xielu
from pagoda.backend.graph import Value
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.own_rows import dispatched_experts, gather_rows, scatter_rows
from pagoda.backend.relative_attention import columns
from pagoda.model.adapters import AdaptedLayer
from pagoda.model.loader import DenseMlp, Layer
from pagoda.model.recording import scaled, with_adapters
from pagoda.model.sharding import Shard


def whole_mlp(
    ops: GraphBuilder,
    shard: Shard,
    layer: Layer[LinearT],
    maps: AdaptedLayer | None,
    h: Value,
    adapters: Value | None,
) -> Value:
    """The MLP's output [n, hidden], summed over all ranks, from normed hidden states h [n, hidden]."""
    if not shard.dp_attention:
        return ops.all_reduce(own_part(ops, shard, layer, maps, h, adapters))
    if shard.dispatches and not isinstance(layer.mlp, DenseMlp):
        return own_part(ops, shard, layer, maps, h, adapters)
    gathered = gather_rows(ops, h)
    return scatter_rows(ops, own_part(ops, shard, layer, maps, gathered, adapters))


def own_part(
    ops: GraphBuilder,
    shard: Shard,
    layer: Layer[LinearT],
    maps: AdaptedLayer | None,
    h: Value,
    adapters: Value | None,
) -> Value:
    """This rank's part of the MLP's output [n, hidden], from normed hidden states h [n, hidden]."""
    mlp = layer.mlp
    if mlp is None:
        raise TypeError("The layer has no MLP.")
    if isinstance(mlp, DenseMlp):
        return _dense(ops, mlp, h, maps, adapters)
    scores = ops.linear(h, mlp.router)
    if shard.dispatches:
        out = dispatched_experts(ops, h, scores, mlp.experts, shard.first_experts)
    else:
        out = ops.experts(h, scores, mlp.experts)
    if mlp.shared is None:
        return out
    shared = _dense(ops, mlp.shared, h, None, adapters)
    if mlp.shared_router is not None:
        score = ops.sigmoid(ops.linear(h, mlp.shared_router))
        shared = ops.scale_rows(shared, score)
    return ops.add(out, shared)


def _dense(
    ops: GraphBuilder,
    mlp: DenseMlp[LinearT],
    h: Value,
    maps: AdaptedLayer | None,
    adapters: Value | None,
) -> Value:
    both = ops.linear(h, mlp.gate_up)
    both = with_adapters(ops, both, h, None if maps is None else maps.gate_up, adapters)
    inner = _gated(ops, mlp, both) if mlp.gated else _activated(ops, mlp, both)
    out = ops.linear(inner, mlp.down)
    out = with_adapters(ops, out, inner, None if maps is None else maps.down, adapters)
    return scaled(ops, out, mlp.down_factor)


def _gated(ops: GraphBuilder, mlp: DenseMlp[LinearT], both: Value) -> Value:
    """Activation of gates [n, d] times what is beside them in [n, 2 d]."""
    if mlp.gate_factor != 1:
        size = both.width // 2
        gate, up = (columns(ops, both, first, size) for first in (0, size))
        return ops.mul(_activated(ops, mlp, ops.scale(gate, mlp.gate_factor)), up)
    recorded = {
        "silu": ops.silu_and_mul,
        "gelu_tanh": ops.gelu_and_mul,
        "gelu": ops.gelu_erf_and_mul,
    }
    return recorded[mlp.activation](both)


def _activated(ops: GraphBuilder, mlp: DenseMlp[LinearT], x: Value) -> Value:
    """Activation of x [n, d]."""
    if mlp.activation == "xielu":
        return xielu(ops, x, **mlp.numbers)
    if mlp.activation == "relu2":
        positive = ops.relu(x)
        return ops.mul(positive, positive)
    recorded = {"gelu": ops.gelu, "gelu_tanh": ops.gelu_tanh, "silu": ops.silu, "relu": ops.relu}
    return recorded[mlp.activation](x)
