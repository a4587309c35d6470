# SPDX-License-Identifier: Apache-2.0
"""Layers that keep a state: their weights besides linear maps, and the operations that they record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from torch import Tensor

from pagoda.backend.base import KVCache, LinearT, StateCache
from pagoda.backend.graph import Value
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.state_layers import gated_delta, gated_head_norm, short_conv
from pagoda.checkpoints.state_layers import StateUnits


@dataclass(frozen=True)
class GatedConv:
    """Convolution of a layer of gated convolutions, of a rank's channels."""

    weight: Tensor
    """[width, channels] float32, that of the oldest token first."""
    bias: Tensor | None
    """[channels] float32."""

    def record(
        self,
        ops: GraphBuilder,
        h: Value,  # noqa: ARG002 - other layers need more of it
        into: Value,
        metadata: Value,
        caches: Sequence[StateCache],
    ) -> Value:
        """Inputs [n, channels] of the map back to hidden states, of b, c and x [n, 3 channels]."""
        (cache,) = caches
        return short_conv(ops, into, metadata, cache, self.weight, self.bias, gated=True)


@dataclass(frozen=True)
class DeltaRule(Generic[LinearT]):
    """Gated delta rule of a rank's heads; see `GatedDeltaSpec`."""

    conv: Tensor
    """[width, channels] float32, of queries, keys and values."""
    gates: LinearT
    """Gates of states: b of all heads of values, then a."""
    decay: Tensor
    """[heads] float32, factors within the exponent of what a state keeps."""
    dt_bias: Tensor
    """[heads] float32."""
    output_gate: LinearT
    norm: Tensor
    """[value_dim] float32, of every head's result."""
    eps: float
    key_dim: int
    key_heads: int

    def record(
        self,
        ops: GraphBuilder,
        h: Value,
        into: Value,
        metadata: Value,
        caches: Sequence[StateCache],
    ) -> Value:
        """Inputs of the map back to hidden states, of hidden states h and queries, keys and values of them."""
        of_conv, of_heads = caches
        qkv = short_conv(ops, into, metadata, of_conv, self.conv, silu=True)
        gates = ops.linear(h, self.gates)
        out = gated_delta(
            ops,
            qkv,
            gates,
            metadata,
            of_heads,
            self.decay,
            self.dt_bias,
            key_heads=self.key_heads,
            key_dim=self.key_dim,
        )
        return gated_head_norm(ops, out, ops.linear(h, self.output_gate), self.norm, self.eps)


StateLayer = GatedConv | DeltaRule[LinearT]


def state_caches(
    memory: KVCache, block_size: int, states: Sequence[StateUnits]
) -> list[StateCache]:
    """Caches of the states of a layer, one behind the other in blocks of `block_size` tokens."""
    caches: list[StateCache] = []
    offset = 0
    for state in states:
        caches.append(StateCache(memory, block_size, state.units, state.floats, offset))
        offset += caches[-1].room
    return caches
