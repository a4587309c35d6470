# SPDX-License-Identifier: Apache-2.0
"""MLPs of layers, dense ones and mixtures of experts, as they are recorded."""

from __future__ import annotations

from pagoda.backend.base import LinearT
from pagoda.backend.decoder_operations import clip, scaled, xielu
from pagoda.backend.family_operations import above_deviations, expert_weights, sparse_mixing
from pagoda.backend.graph import Value
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.own_rows import dispatched_experts, gather_rows, scatter_rows
from pagoda.backend.relative_attention import columns
from pagoda.checkpoints.layer_spec import ExpertsSpec
from pagoda.model.adapters import AdaptedLayer
from pagoda.model.loaded_layers import ApartMlp, DenseMlp, Layer, SparseMlp
from pagoda.model.recording import inner_normed, normed, with_adapters
from pagoda.model.sharding import Shard


def whole_mlp(
    ops: GraphBuilder,
    shard: Shard,
    layer: Layer[LinearT],
    maps: AdaptedLayer | None,
    h: Value,
    adapters: Value | None,
    x: Value,
    given: Value | None = None,
) -> Value:
    """The MLP's output [n, hidden], summed over all ranks, from hidden states x [n, hidden], normed in h.

    Experts of a layer that has `early_input` are `given` that.
    """
    if isinstance(layer.mlp, SparseMlp) and layer.mlp.apart is not None:
        return _apart(ops, shard, layer.mlp, layer.mlp.apart, h, x)
    if not shard.dp_attention:
        return ops.all_reduce(own_part(ops, shard, layer, maps, h, adapters, given))
    if shard.dispatches and not isinstance(layer.mlp, DenseMlp):
        return own_part(ops, shard, layer, maps, h, adapters, given)
    gathered = gather_rows(ops, h)
    given = None if given is None else gather_rows(ops, given)
    return scatter_rows(ops, own_part(ops, shard, layer, maps, gathered, adapters, given))


def early_input(ops: GraphBuilder, layer: Layer[LinearT], x: Value, eps: float) -> Value | None:
    """Input of experts, of the layer's x [n, hidden], where they have attention's; None of other layers."""
    if not isinstance(layer.mlp, SparseMlp) or layer.mlp.early_norm is None:
        return None
    return normed(ops, x, layer.mlp.early_norm, eps)


def _apart(
    ops: GraphBuilder, shard: Shard, mlp: SparseMlp[LinearT], apart: ApartMlp, h: Value, x: Value
) -> Value:
    """The sum of what the shared MLP makes of h and experts of x [n, hidden], each normed."""
    routing, eps = mlp.experts.routing, shard.config.norm.eps
    logits = ops.linear(ops.rms_norm(x, apart.router_norm, eps), mlp.router)
    weights = expert_weights(
        ops,
        logits,
        apart.factors,
        per_token=routing.experts_per_token,
        renormalize=True,
        kept=routing.num_experts,
    )
    own = ops.experts(ops.rms_norm(x, apart.experts_norm, eps), weights, mlp.experts)
    own = ops.rms_norm(ops.all_reduce(own), apart.experts_post_norm, eps)
    if mlp.shared is None:
        return own
    shared = ops.all_reduce(_dense(ops, mlp.shared, h, None, None))
    return ops.add(ops.rms_norm(shared, apart.shared_post_norm, eps), own)


def carried_part(ops: GraphBuilder, layer: Layer[LinearT], h: Value) -> Value | None:
    """Outputs [n, hidden] of experts that count behind the next layer, of the normed h; None of other layers.

    It is summed over all ranks.
    """
    mlp, spec = layer.mlp, layer.spec.mlp
    if not isinstance(mlp, SparseMlp) or not isinstance(spec, ExpertsSpec) or not spec.carried:
        return None
    scores = ops.linear(h, mlp.router)
    out = ops.all_reduce(ops.experts(h, scores, mlp.experts))
    if mlp.identity is None:
        return out
    kept = spec.num_stored
    weights = expert_weights(
        ops,
        scores,
        mlp.identity,
        mlp.experts.correction,
        per_token=spec.routing.experts_per_token,
        renormalize=False,
        kept=kept,
    )
    return ops.add(out, ops.scale_rows(h, columns(ops, weights, kept, 1)))


def own_part(
    ops: GraphBuilder,
    shard: Shard,
    layer: Layer[LinearT],
    maps: AdaptedLayer | None,
    h: Value,
    adapters: Value | None,
    early: Value | None = None,
) -> Value:
    """This rank's part of the MLP's output [n, hidden], from normed hidden states h [n, hidden].

    Experts are given `early` where that is not None.
    """
    mlp = layer.mlp
    if mlp is None:
        raise TypeError("The layer has no MLP.")
    if isinstance(mlp, DenseMlp):
        return _dense(ops, mlp, h, maps, adapters)
    if (
        isinstance(layer.spec.mlp, ExpertsSpec)
        and layer.spec.mlp.carried
        and mlp.shared is not None
    ):
        return _dense(ops, mlp.shared, h, None, adapters)
    given = h if early is None else early
    scores = ops.linear(given, mlp.router)
    if mlp.jitter is not None:
        scores = sparse_mixing(ops, scores, mlp.jitter)
    given = given if mlp.latent is None else ops.linear(given, mlp.latent)
    if shard.dispatches:
        out = dispatched_experts(ops, given, scores, mlp.experts, shard.first_experts)
    else:
        out = ops.experts(given, scores, mlp.experts)
    out = out if mlp.latent_back is None else ops.linear(out, mlp.latent_back)
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
    if mlp.added is not None:
        both = ops.add(both, mlp.added.record(ops, h))
    inner = _gated(ops, mlp, both) if mlp.gated else _activated(ops, mlp, both)
    inner = inner_normed(ops, inner, mlp.inner_norm)
    out = ops.linear(inner, mlp.down)
    out = with_adapters(ops, out, inner, None if maps is None else maps.down, adapters)
    return scaled(ops, out, mlp.down_factor)


def _gated(ops: GraphBuilder, mlp: DenseMlp[LinearT], both: Value) -> Value:
    """Activation of gates [n, d] times what is beside them in [n, 2 d], or of this rank's ones of all gates."""
    if mlp.sparse is not None:
        deviations, own, count = mlp.sparse
        gates = above_deviations(ops, columns(ops, both, 0, count), deviations)
        gates = ops.gelu_tanh(columns(ops, gates, own.start, len(own)))
        return ops.mul(gates, columns(ops, both, count, len(own)))
    if mlp.limit is not None:
        return clamped(ops, both, mlp.limit)
    if mlp.gate_factor != 1 or mlp.activation == "relu2":
        size = both.width // 2
        gate, up = (columns(ops, both, first, size) for first in (0, size))
        return ops.mul(_activated(ops, mlp, scaled(ops, gate, mlp.gate_factor)), up)
    recorded = {
        "silu": ops.silu_and_mul,
        "gelu_tanh": ops.gelu_and_mul,
        "gelu": ops.gelu_erf_and_mul,
    }
    return recorded[mlp.activation](both)


def clamped(ops: GraphBuilder, both: Value, limit: float) -> Value:
    """SiLU of gates [n, d], at most the limit, times ups beside them in [n, 2 d], from its negative to it.

    The limit is 1 or more: a SiLU is above -0.28.
    """
    size = both.width // 2
    gate, up = (columns(ops, both, first, size) for first in (0, size))
    return ops.mul(clip(ops, ops.silu(gate), limit), clip(ops, up, limit))


def _activated(ops: GraphBuilder, mlp: DenseMlp[LinearT], x: Value) -> Value:
    """Activation of x [n, d]."""
    if mlp.activation == "xielu":
        return xielu(ops, x, **mlp.numbers)
    if mlp.activation == "relu2":
        positive = ops.relu(x)
        return ops.mul(positive, positive)
    recorded = {"gelu": ops.gelu, "gelu_tanh": ops.gelu_tanh, "silu": ops.silu, "relu": ops.relu}
    return recorded[mlp.activation](x)
