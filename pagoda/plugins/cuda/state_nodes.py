# SPDX-License-Identifier: Apache-2.0
"""Layers that keep a state as launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from pagoda.backend.base import StateCache, UnsupportedError
from pagoda.backend.graph import Node
from pagoda.plugins.cuda.kernels import states
from pagoda.plugins.cuda.nodes import Launch, Lowering, Values


def _halves(cache: StateCache) -> tuple[Tensor, Tensor]:
    """Both halves of all blocks from the cache's own units on, [num_blocks, floats] float32 each."""
    first, second = (half[:, cache.offset :] for half in cache.halves())
    return first, second


def _short_conv(lowering: Lowering, node: Node) -> Launch:
    (x, metadata), (out,) = node.inputs, node.outputs
    cache, weight, *bias = lowering.weights(node)
    halves, block_size = _halves(cache), cache.block_size
    gated, silu = (bool(lowering.attributes(node)[name]) for name in ("gated", "silu"))

    def launch(v: Values) -> None:
        states.short_conv(
            v[x],
            weight,
            halves,
            v[metadata].steps,
            v[out],
            block_size=block_size,
            bias=bias[0] if bias else None,
            gated=gated,
            activated=silu,
        )

    return launch


def _gated_delta(lowering: Lowering, node: Node) -> Launch:
    (qkv, gates, metadata), (out,) = node.inputs, node.outputs
    cache, decay, dt_bias = lowering.weights(node)
    halves, block_size = _halves(cache), cache.block_size
    attributes = lowering.attributes(node)
    if attributes["by_channel"]:
        raise UnsupportedError("this GPU backend has no delta rule that forgets by channels.")
    sizes = {name: attributes[name] for name in ("key_heads", "key_dim")}

    def launch(v: Values) -> None:
        states.gated_delta(
            v[qkv],
            v[gates],
            decay,
            dt_bias,
            halves,
            v[metadata].steps,
            v[out],
            block_size=block_size,
            **sizes,
        )

    return launch


LOWERED: Mapping[str, Callable[[Lowering, Node], Launch]] = {
    "short_conv": _short_conv,
    "gated_delta": _gated_delta,
}
"""Functions that make launches of these operations."""
