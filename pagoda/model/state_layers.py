# SPDX-License-Identifier: Apache-2.0
"""Layers that keep a state: their weights besides linear maps, and the operations that they record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

import torch
from torch import Tensor

from pagoda.backend.base import KVCache, LatentCache, LinearT, StateCache
from pagoda.backend.family_operations import join_columns, rms_norm_heads
from pagoda.backend.graph import RotaryTable, Value
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.state_layers import gated_delta, gated_head_norm, short_conv
from pagoda.checkpoints.scan_layers import Mamba2Spec, MambaSpec
from pagoda.checkpoints.state_layers import (
    ChannelDeltaSpec,
    GatedDeltaSpec,
    ShortConvSpec,
    StateUnits,
)
from pagoda.model.weights import in_value_order

if TYPE_CHECKING:
    from pagoda.model.loader import WeightLoader


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
        table: RotaryTable | None,  # noqa: ARG002
        caches: Sequence[Any],
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
        table: RotaryTable | None,  # noqa: ARG002 - of attention
        caches: Sequence[Any],
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


@dataclass(frozen=True)
class ChannelDelta(Generic[LinearT]):
    """Delta rule of a rank's heads that forgets by channels; see `ChannelDeltaSpec`."""

    conv: Tensor
    """[width, channels] float32, of queries, keys and values."""
    output_low: LinearT
    output_gate: LinearT
    b: LinearT
    low: LinearT
    channels: LinearT
    """Map of numbers between to gates of channels."""
    decay: Tensor
    """[heads] float32, factors within the exponent of what a state keeps."""
    dt_bias: Tensor
    """[heads dim] float32."""
    norm: Tensor
    """[heads dim] float32, of every head's result."""
    eps: float
    dim: int

    def record(
        self,
        ops: GraphBuilder,
        h: Value,
        into: Value,
        metadata: Value,
        table: RotaryTable | None,  # noqa: ARG002 - of attention
        caches: Sequence[Any],
    ) -> Value:
        """Inputs of the map back to hidden states, of hidden states h and queries, keys and values of them."""
        of_conv, of_heads = caches
        qkv = short_conv(ops, into, metadata, of_conv, self.conv, silu=True)
        gates = ops.linear(ops.linear(h, self.low), self.channels)
        gates = join_columns(ops, ops.linear(h, self.b), gates)
        sizes = {"key_heads": len(self.decay), "key_dim": self.dim}
        out = gated_delta(ops, qkv, gates, metadata, of_heads, self.decay, self.dt_bias, **sizes)
        out = rms_norm_heads(ops, out, self.norm, first=0, head_dim=self.dim, eps=self.eps)
        gate = ops.linear(ops.linear(h, self.output_low), self.output_gate)
        return ops.mul(out, ops.sigmoid(gate))


def state_caches(
    memory: KVCache | LatentCache, block_size: int, states: Sequence[StateUnits]
) -> list[StateCache]:
    """Caches of the states of a layer, one behind the other in blocks of `block_size` tokens."""
    caches: list[StateCache] = []
    offset = 0
    for state in states:
        caches.append(StateCache(memory, block_size, state.units, state.floats, offset))
        offset += caches[-1].room
    return caches


def load_conv(loader: WeightLoader[Any], index: int, spec: ShortConvSpec) -> GatedConv:
    """Weights of a layer besides its maps, of this rank's channels."""
    channels, *_ = loader.shard.config.attention_linears(index).into
    return GatedConv(
        *load_conv_weights(loader, index, spec, [*loader.shard.part_of(channels).outputs])
    )


def load_delta_rule(
    loader: WeightLoader[LinearT], index: int, spec: GatedDeltaSpec
) -> DeltaRule[LinearT]:
    """Weights of a layer besides its maps of queries, keys and values, of this rank's heads."""
    config = loader.shard.config
    names = config.names
    parts = [loader.shard.part_of(it).outputs for it in config.attention_linears(index).into]
    firsts = (0, spec.sizes[0], 2 * spec.sizes[0])
    rows = [first + row for first, part in zip(firsts, parts, strict=True) for row in part]
    order = spec.value_order(names)
    channels = torch.arange(spec.channels)
    channels[firsts[2] :] = in_value_order(channels[firsts[2] :], order)
    weight, _ = load_conv_weights(loader, index, spec, channels[rows].tolist())
    output_gate, *gates = config.gate_linears(index)
    heads = loader.shard.part_of(gates[0]).outputs
    decay, bias = (
        in_value_order(loader.vector(names.of_layer(index, name), spec.value_heads), order)[
            heads.start : heads.stop
        ].clone()
        for name in (names.state_decay, names.state_bias)
    )
    norm = f"{names.of_layer(index, names.state_norm)}.weight"
    return DeltaRule(
        weight,
        loader.linear(gates),
        -decay.exp() if names.log_decay else decay,
        bias,
        loader.linear([output_gate]),
        loader.vector(norm, spec.value_dim),
        config.norm.eps,
        spec.key_dim,
        len(parts[0]) // spec.key_dim,
    )


def load_channel_delta(
    loader: WeightLoader[LinearT], index: int, spec: ChannelDeltaSpec
) -> ChannelDelta[LinearT]:
    """Weights of a layer besides its maps of queries, keys and values, of this rank's heads."""
    config, names = loader.shard.config, loader.shard.config.names
    own = loader.shard.part_of(config.attention_linears(index).into[0]).outputs
    heads = range(own.start // spec.dim, own.stop // spec.dim)
    convs = [
        loader.vector(f"{name}.weight", (spec.inner, 1, spec.width))[own.start : own.stop, 0]
        for name in spec.conv_names(names, index)
    ]
    decay = loader.vector(names.of_layer(index, names.state_decay), (1, 1, spec.heads, 1)).flatten()
    bias = loader.vector(names.of_layer(index, names.state_bias), spec.inner)
    norm = loader.vector(f"{names.of_layer(index, names.state_norm)}.weight", spec.dim)
    out_low, out, b, low, channels = (loader.linear([it]) for it in config.gate_linears(index))
    return ChannelDelta(
        torch.cat(convs).t().contiguous(),
        out_low,
        out,
        b,
        low,
        channels,
        (-decay.exp() if names.log_decay else decay)[heads.start : heads.stop].clone(),
        bias[own.start : own.stop].clone(),
        norm.repeat(len(heads)),
        config.norm.eps,
        spec.dim,
    )


def load_conv_weights(
    loader: WeightLoader[Any],
    index: int,
    spec: ShortConvSpec | GatedDeltaSpec | Mamba2Spec | MambaSpec,
    own: Sequence[int],
) -> tuple[Tensor, Tensor | None]:
    """Weight [width, own] and bias [own] of some channels of a layer's convolution."""
    names, channels = loader.shard.config.names, spec.channels
    name = names.of_layer(index, names.state_conv)
    shape = (channels, spec.width) if names.flat_convolutions else (channels, 1, spec.width)
    weight = torch.empty(shape, dtype=torch.float32, device=loader.backend.device)
    loader.source.read_into(f"{name}.weight", weight)
    weight = weight.view(channels, spec.width)[own].t().contiguous()
    return weight, loader.vector(f"{name}.bias", channels)[own] if spec.bias else None
