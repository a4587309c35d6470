# SPDX-License-Identifier: Apache-2.0
"""Layers of Mamba and Mamba-2: their weights besides maps of hidden states, and what they record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Generic

import torch
from torch import Tensor

from pagoda.backend.base import HeadNorms, LinearT
from pagoda.backend.decoder_operations import scaled
from pagoda.backend.graph import RotaryTable, Value
from pagoda.backend.norms_over_ranks import norm_by_squares, sum_of_squares
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.relative_attention import columns
from pagoda.backend.state_layers import Columns, rms_norm_groups, selective_scan, short_conv
from pagoda.checkpoints.latent_attention import NORM_EPS
from pagoda.checkpoints.scan_layers import MOST, LightningSpec, Mamba2Spec, MambaSpec
from pagoda.model.state_layers import load_conv_weights

if TYPE_CHECKING:
    from pagoda.model.loader import WeightLoader


_LITTLE = 1e-5
"""Part of its rate that a last layer of lightning attention decays by."""


@dataclass(frozen=True)
class Mamba2(Generic[LinearT]):
    """Mamba-2 of a rank's heads; see `Mamba2Spec`."""

    spec: Mamba2Spec
    conv: Tensor
    """[width, channels] float32, of values, B and C."""
    conv_bias: Tensor | None
    """[channels] float32."""
    decay: Tensor
    """[heads] float32, factors within the exponent of what a state keeps."""
    dt_bias: Tensor
    """[heads] float32."""
    skip: Tensor
    """[heads] float32, of what goes past the state."""
    output_gate: LinearT
    steps: LinearT
    norm: Tensor | None
    """[inner] float32."""
    eps: float
    groups: int
    """Groups of this rank's heads."""
    ranks: int
    """Ranks that share out the heads."""

    def record(
        self,
        ops: GraphBuilder,
        h: Value,
        into: Value,
        metadata: Value,
        table: RotaryTable | None,  # noqa: ARG002 - of attention
        caches: Sequence[Any],
    ) -> Value:
        """Inputs of the map back to hidden states, of hidden states h, and of values, B and C of them."""
        of_conv, of_heads = caches
        spec = self.spec
        xbc = short_conv(ops, into, metadata, of_conv, self.conv, self.conv_bias, silu=True)
        keys = self.groups * spec.state_dim
        dt, gate = (
            scaled(ops, ops.linear(h, it), factor)
            for it, factor in ((self.steps, spec.factors[4]), (self.output_gate, spec.factors[0]))
        )
        out = selective_scan(
            ops,
            xbc,
            Columns(xbc, xbc.width - 2 * keys),
            Columns(xbc, xbc.width - keys),
            dt,
            metadata,
            of_heads,
            self.decay,
            self.dt_bias,
            self.skip,
            groups=self.groups,
            head_dim=spec.head_dim,
            dt_limit=spec.dt_limit,
        )
        gate = ops.silu(gate)
        if spec.norm == "before gate":
            return ops.mul(self._normed(ops, out), gate)
        out = ops.mul(out, gate)
        return out if spec.norm is None else self._normed(ops, out)

    def _normed(self, ops: GraphBuilder, x: Value) -> Value:
        """x [n, inner] of this rank's heads behind its norm, which may be of the heads of all ranks together."""
        if self.norm is None:
            raise TypeError("The layer has no norm.")
        groups = self.spec.norm_groups
        if groups == 1:
            return _normed_together(ops, x, self.norm, self.eps, self.ranks)
        return rms_norm_groups(ops, x, self.norm, groups // self.ranks, self.eps)


@dataclass(frozen=True)
class Mamba(Generic[LinearT]):
    """Mamba of a rank's channels; see `MambaSpec`."""

    spec: MambaSpec
    conv: Tensor
    """[width, channels] float32."""
    conv_bias: Tensor | None
    """[channels] float32."""
    decay: Tensor
    """[state_dim, channels] or [heads] float32, factors within the exponent of what a state keeps."""
    dt_bias: Tensor
    """[channels] or [heads] float32."""
    skip: Tensor
    """[channels] or [heads] float32, of what goes past the state."""
    output_gate: LinearT
    small: LinearT
    """Map of channels to steps' numbers, B and C, of which each rank has the inputs that are its channels."""
    steps: LinearT
    norms: tuple[Tensor, ...]
    """[step_rank] and twice [state_dim] float32 of steps' numbers, B and C; empty where these are not normed."""
    ranks: int
    """Ranks that share out the channels."""

    def record(
        self,
        ops: GraphBuilder,
        h: Value,
        into: Value,
        metadata: Value,
        table: RotaryTable | None,  # noqa: ARG002 - of attention
        caches: Sequence[Any],
    ) -> Value:
        """Inputs of the map back to hidden states, of hidden states h and channels of them."""
        of_conv, of_channels = caches
        spec = self.spec
        x = short_conv(ops, into, metadata, of_conv, self.conv, self.conv_bias, silu=True)
        small = ops.linear(x, self.small)
        if self.ranks > 1:
            small = ops.all_reduce(small)
        rank, size = spec.step_rank, spec.state_dim
        first, of_b, of_c = spec.small
        step = columns(ops, small, first, rank)
        b, c = Columns(small, of_b), Columns(small, of_c)
        if self.norms:
            eps, (of_step, *of_both) = spec.norm_eps, self.norms
            step = ops.rms_norm(step, of_step, eps)
            b, c = (
                Columns(ops.rms_norm(columns(ops, small, it.first, size), norm, eps))
                for it, norm in zip((b, c), of_both, strict=True)
            )
        out = selective_scan(
            ops,
            x,
            b,
            c,
            ops.linear(step, self.steps),
            metadata,
            of_channels,
            self.decay,
            self.dt_bias,
            self.skip,
            groups=1,
            head_dim=spec.head_dim,
            by_element=spec.heads is None,
            dt_limit=(0.0, MOST),
        )
        return ops.mul(out, ops.silu(ops.linear(h, self.output_gate)))


@dataclass(frozen=True)
class Lightning(Generic[LinearT]):
    """Lightning attention of a rank's heads; see `LightningSpec`."""

    decay: Tensor
    """[heads] float32, factors within the exponent of what a state keeps."""
    nothing: Tensor
    """[heads] float32, zeros."""
    output_gate: LinearT
    norm: Tensor
    """[heads dim] float32, of the heads of all ranks together."""
    ranks: int

    def record(
        self,
        ops: GraphBuilder,
        h: Value,
        into: Value,
        metadata: Value,
        table: RotaryTable | None,  # noqa: ARG002 - of attention
        caches: Sequence[Any],
    ) -> Value:
        """Inputs of the map back to hidden states, of hidden states h, and of values, keys and queries of them."""
        vkq, heads = ops.silu(into), len(self.decay)
        width = vkq.width // 3
        out = selective_scan(
            ops,
            vkq,
            Columns(vkq, width),
            Columns(vkq, 2 * width),
            columns(ops, vkq, 0, heads),  # steps are one, whatever they are made of
            metadata,
            caches[0],
            self.decay,
            self.nothing,
            self.nothing,
            groups=heads,
            head_dim=width // heads,
            dt_limit=(1.0, 1.0),
        )
        out = _normed_together(ops, out, self.norm, NORM_EPS, self.ranks)
        return ops.mul(out, ops.sigmoid(ops.linear(h, self.output_gate)))


def _normed_together(ops: GraphBuilder, x: Value, norm: Tensor, eps: float, ranks: int) -> Value:
    """x [n, inner] of this rank's heads behind an RMS norm of the heads of all ranks together."""
    if ranks == 1:
        return ops.rms_norm(x, norm, eps)
    squares = ops.all_reduce(sum_of_squares(ops, x, queries=x.width, keys=0))
    norms = HeadNorms(norm, norm[:0], eps)
    return norm_by_squares(ops, x, squares, norms, all_queries=ranks * x.width, all_keys=1)


def load_mamba2(loader: WeightLoader[LinearT], index: int, spec: Mamba2Spec) -> Mamba2[LinearT]:
    """Weights of a layer besides its maps of values, B and C, of this rank's heads."""
    shard, config = loader.shard, loader.shard.config
    names, bias = config.names, config.layers[index].attention.qkv_bias
    parts = [shard.part_of(it).outputs for it in config.attention_linears(index).into]
    firsts = accumulate(spec.sizes, initial=0)
    rows = [first + row for first, part in zip(firsts, parts, strict=False) for row in part]
    conv, conv_bias = load_conv_weights(loader, index, spec, rows)
    _, of_x, of_b, of_c, _ = spec.factors
    for part, factor in zip(
        torch.split(conv, [*map(len, parts)], 1), (of_x, of_b, of_c), strict=True
    ):
        part.mul_(factor)  # a multiplier of what the convolution is given
    gate, steps = config.gate_linears(index)
    heads, own = shard.part_of(steps).outputs, parts[0]
    decay, dt_bias, skip = (
        loader.vector(names.of_layer(index, name), spec.heads)[heads.start : heads.stop].clone()
        for name in (names.state_decay, names.state_bias, names.state_skip)
    )
    norm = None
    if spec.norm is not None:
        whole = loader.vector(f"{names.of_layer(index, names.state_norm)}.weight", spec.inner)
        norm = whole[own.start : own.stop].clone()
    return Mamba2(
        spec,
        conv,
        conv_bias,
        -decay.exp() if names.log_decay else decay,
        dt_bias,
        skip,
        loader.linear([gate], bias=bias),
        loader.linear([steps], bias=bias),
        norm,
        config.norm.eps,
        len(parts[1]) // spec.state_dim,
        shard.attention_ranks[1],
    )


def load_mamba(loader: WeightLoader[LinearT], index: int, spec: MambaSpec) -> Mamba[LinearT]:
    """Weights of a layer besides its map of channels, of this rank's channels."""
    shard, config = loader.shard, loader.shard.config
    names, bias = config.names, config.layers[index].attention.qkv_bias
    own = shard.part_of(config.attention_linears(index).into[0]).outputs
    conv, conv_bias = load_conv_weights(loader, index, spec, [*own])
    gate, small, steps = config.gate_linears(index)
    steps_of = slice(own.start // spec.head_dim, own.stop // spec.head_dim)
    decay = loader.vector(names.of_layer(index, names.state_decay), spec.rates)[steps_of]
    decay = decay.t().contiguous() if spec.heads is None else decay.clone()
    dt_bias, skip = (
        loader.vector(name, spec.num_steps)[steps_of].clone()
        for name in (spec.step_bias(names, index), names.of_layer(index, names.state_skip))
    )
    norms: tuple[Tensor, ...] = ()
    if spec.norms is not None:
        of_norms = spec.norm_names(names, index)
        norms = tuple(
            torch.ones(size, device=loader.backend.device)
            if spec.norms == "unit"
            else loader.vector(name, size)
            for name, size in of_norms
        )
    return Mamba(
        spec,
        conv,
        conv_bias,
        -decay.exp() if names.log_decay else decay,
        dt_bias,
        skip,
        loader.linear([gate], bias=bias),
        loader.linear([small]),
        loader.linear([steps]),
        norms,
        shard.attention_ranks[1],
    )


def load_lightning(
    loader: WeightLoader[LinearT], index: int, spec: LightningSpec
) -> Lightning[LinearT]:
    """Weights of a layer besides its maps of values, keys and queries, and rates of this rank's heads."""
    shard, config = loader.shard, loader.shard.config
    own = shard.part_of(config.attention_linears(index).into[0]).outputs
    heads = slice(own.start // spec.dim, own.stop // spec.dim)
    part = 1 - index / (config.num_layers - 1 + _LITTLE) + _LITTLE
    rates = 2 ** (-8 / spec.heads * torch.arange(1, spec.heads + 1, dtype=torch.float32)) * part
    (gate,) = config.gate_linears(index)
    norm = f"{config.names.of_layer(index, config.names.state_norm)}.weight"
    decay = -rates[heads].to(loader.backend.device)
    return Lightning(
        decay,
        torch.zeros_like(decay),
        loader.linear([gate]),
        loader.vector(norm, spec.inner)[own.start : own.stop].clone(),
        shard.attention_ranks[1],
    )
