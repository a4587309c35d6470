# SPDX-License-Identifier: Apache-2.0
"""Nodes of a graph as launches of kernels, made once; a step's launches read tensors by their numbers only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature

from torch import Tensor

from pagoda.backend.base import KVCache
from pagoda.backend.graph import Graph, Node
from pagoda.backend.reference import collectives
from pagoda.plugins.cuda import linear_nodes, sparse_nodes, state_nodes
from pagoda.plugins.cuda.kernels import kv, rows
from pagoda.plugins.cuda.kernels.attention import attention
from pagoda.plugins.cuda.nodes import Launch, Lowering, Values, partials_of

FUSED = "add_and_rms_norm"
"""Operation of a sum and the norm behind it, in one launch."""


def launches_of(lowering: Lowering, nodes: Sequence[Node]) -> list[Launch]:
    return [LOWERED[node.op](lowering, node) for node in nodes]


def fused(graph: Graph, needed: Sequence[int]) -> list[Node]:
    """The nodes in order, sums and the norms right behind them as one."""
    nodes: list[Node] = []
    for index in needed:
        node = graph.nodes[index]
        before = nodes[-1] if nodes else None
        if before and (before.op, node.op) == ("add", "rms_norm") and before.outputs == node.inputs:
            nodes[-1] = Node(
                FUSED,
                before.inputs,
                (*before.outputs, *node.outputs),
                node.weights,
                node.attributes,
            )
        else:
            nodes.append(node)
    return nodes


# ---- operations on rows


def _rows(function: Callable[..., None]) -> Callable[[Lowering, Node], Launch]:
    """A kernel that takes inputs, weights and outputs, and those attributes that it names."""
    names = signature(function).parameters

    def lower(lowering: Lowering, node: Node) -> Launch:
        weights, inputs, outputs = lowering.weights(node), node.inputs, node.outputs
        attributes = lowering.attributes(node)
        numbers = {name: attributes[name] for name in attributes if name in names}

        def launch(v: Values) -> None:
            function(*[v[i] for i in inputs], *weights, *[v[i] for i in outputs], **numbers)

        return launch

    return lower


def _add_and_rms_norm(lowering: Lowering, node: Node) -> Launch:
    (x, delta), (total, out) = node.inputs, node.outputs
    (weight,), eps = lowering.weights(node), lowering.attributes(node)["eps"]

    def launch(v: Values) -> None:
        rows.rms_norm(v[x], weight, v[out], eps=eps, delta=v[delta], total=v[total])

    return launch


def _select_rows(lowering: Lowering, node: Node) -> Launch:  # noqa: ARG001
    (x, chosen), (out,) = node.inputs, node.outputs

    def launch(v: Values) -> None:
        if v[x] is not None:  # steps without adapters have no numbers of them
            rows.select_rows(v[x], v[chosen], v[out])

    return launch


# ---- attention


def _rotate_and_cache(lowering: Lowering, node: Node) -> Launch:
    (qkv, metadata, *table), (out,) = node.inputs, node.outputs
    cache, *norms = lowering.weights(node)
    query_norm, key_norm = norms or (None, None)
    eps = lowering.attributes(node)["eps"]
    squares: int | None = None
    if lowering.attributes(node)["norms_all_heads"]:
        key = ("squares", "rotate_and_cache")
        squares = lowering.new_scratch(key, lambda shape: shape.floats(key, shape.num_tokens, 2))

    def launch(v: Values) -> None:
        cosines, sines = (v[table[0]], v[table[1]]) if table else (None, None)
        kv.rotate_and_cache(
            v[qkv],
            v[metadata].slots,
            cache.keys,
            cache.values,
            v[out],
            cosines=cosines,
            sines=sines,
            query_norm=query_norm,
            key_norm=key_norm,
            eps=eps,
            squares=None if squares is None else v[squares],
            key_scales=cache.key_scales,
            value_scales=cache.value_scales,
        )

    return launch


def _attention(lowering: Lowering, node: Node) -> Launch:
    (queries, metadata), (out,) = node.inputs, node.outputs
    cache, *sinks = lowering.weights(node)
    held: KVCache = cache
    options = {
        name: lowering.attributes(node)[name] for name in ("scale", "window", "chunk", "softcap")
    }
    causal = bool(lowering.attributes(node)["causal"])
    head_dim = held.keys.shape[3]
    heads = lowering.width(queries) // head_dim
    partials = partials_of(lowering, metadata, heads, head_dim)
    products = lowering.products_of(held)

    def launch(v: Values) -> None:
        attention(
            v[queries],
            held.keys,
            held.values,
            v[metadata].steps,
            v[out],
            sinks=sinks[0] if sinks else None,
            key_scales=held.key_scales,
            value_scales=held.value_scales,
            products=products,
            partials=v[partials] if causal else None,
            causal=causal,
            **options,
        )

    return launch


# ---- several ranks


def _exchange(function: Callable[..., Tensor], *names: str) -> Callable[[Lowering, Node], Launch]:
    """An exchange between ranks, whose result is copied to where the value lies, if it is not there already."""

    def lower(lowering: Lowering, node: Node) -> Launch:
        (x,), (out,), (group,) = node.inputs, node.outputs, lowering.weights(node)
        attributes = {name: lowering.attributes(node)[name] for name in names}

        def launch(v: Values) -> None:
            found = function(v[x], group, **attributes)
            if found.data_ptr() != v[out].data_ptr():
                v[out].copy_(found)

        return launch

    return lower


LOWERED: Mapping[str, Callable[[Lowering, Node], Launch]] = {
    **linear_nodes.LOWERED,
    **sparse_nodes.LOWERED,
    **state_nodes.LOWERED,
    "select_rows": _select_rows,
    **{name: _rows(function) for name, function in rows.OPERATIONS.items()},
    FUSED: _add_and_rms_norm,
    "rotate_and_cache": _rotate_and_cache,
    "attention": _attention,
    "all_reduce": _exchange(collectives.all_reduce),
    "all_gather": _exchange(collectives.all_gather, "sizes"),
    "all_gather_argmax": _exchange(collectives.all_gather_argmax),
}
"""Functions that make launches of nodes, by operation; the backend lacks others."""
