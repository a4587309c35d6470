# SPDX-License-Identifier: Apache-2.0
"""Layers of state spaces: Mamba (Gu and Dao 2023, arXiv 2312.00752) and Mamba-2 (Dao and Gu 2024, 2405.21060)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pagoda.checkpoints.linears import AttentionLinears, LinearRole, LinearSpec
from pagoda.checkpoints.state_layers import StateUnits, conv_tensors
from pagoda.checkpoints.tensor_names import StoredRows, TensorNames

MOST = 3.4028234663852886e38
"""Upper limit of steps where there is none: the greatest float32."""


class ScanLinears(NamedTuple):
    """Linear layers of a Mamba layer that hidden states go through first and last."""

    x: LinearSpec
    out: LinearSpec

    @property
    def into(self) -> tuple[LinearSpec, ...]:
        """Layers that hidden states go through."""
        return (self.x,)


@dataclass(frozen=True)
class Mamba2Spec:
    """Mamba-2: values, B and C of heads behind a convolution; neighbouring heads have B and C in common."""

    heads: int
    head_dim: int
    groups: int
    """Different B and C."""
    state_dim: int
    width: int
    """Tokens that the convolution sees, itself included."""
    bias: bool = True
    """Bias of the convolution."""
    norm: Literal["behind gate", "before gate"] | None = "behind gate"
    """RMS norm of outputs, before or behind they are times the SiLU of their gate; None has none."""
    norm_groups: int = 1
    """Parts of outputs that are normed by themselves."""
    dt_limit: tuple[float, float] = (0.0, MOST)
    """Least and greatest step."""
    factors: tuple[float, float, float, float, float] = (1.0,) * 5
    """Multipliers of gates, values, B, C and steps (Falcon-H1)."""

    @property
    def name(self) -> str:
        return f"Mamba-2 of {self.heads} heads of {self.state_dim} by {self.head_dim}"

    @property
    def inner(self) -> int:
        """Inputs of the map back to hidden states."""
        return self.heads * self.head_dim

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Outputs of the maps of hidden states to values, B and C, whose parts ranks hold."""
        keys = self.groups * self.state_dim
        return self.inner, keys, keys

    @property
    def channels(self) -> int:
        return sum(self.sizes)

    @property
    def operations(self) -> frozenset[str]:
        found = {"short_conv", "selective_scan", "silu", "mul"}
        if self.norm is not None:
            found.add("rms_norm" if self.norm_groups == 1 else "rms_norm_groups")
        return frozenset(found if self.factors == (1.0,) * 5 else {*found, "scale"})

    @property
    def limits(self) -> Mapping[str, int]:
        """Sizes by the limits of `Capabilities` that they have to keep."""
        return {"max_conv_width": self.width, "max_scan_state": self.state_dim}

    def can_share(self, ranks: int) -> bool:
        """True if so many ranks can each have as many heads; they may have B and C in common, as KV heads."""
        groups_fit = self.groups % ranks == 0 or ranks % self.groups == 0
        norms_fit = self.norm is None or self.norm_groups == 1 or self.norm_groups % ranks == 0
        return self.heads % ranks == 0 and groups_fit and norms_fit

    def states(self, sizes: Sequence[int]) -> tuple[StateUnits, ...]:
        """States of a rank that holds so many outputs of each map, one behind the other in a block."""
        conv = StateUnits(sum(sizes), self.width - 1, maps=(0, 1, 2))
        heads = StateUnits(sizes[0] // self.head_dim, self.head_dim * self.state_dim, maps=(0,))
        return conv, heads

    def linears(self, names: TensorNames, layer: int, hidden: int, *_: int) -> AttentionLinears:
        """Maps of hidden states to values, B and C, and the one back to them."""
        grains = self.head_dim, self.state_dim, self.state_dim
        x, b, c = (
            self._part(names, layer, hidden, place, LinearRole.STATE_IN, grain)
            for place, grain in enumerate(grains, start=1)
        )
        name = names.of_layer(layer, names.state_out)
        out = LinearSpec(name, hidden, self.inner, LinearRole.STATE_OUT, grain=self.head_dim)
        return AttentionLinears(x, b, c, out)

    def gates(self, names: TensorNames, layer: int, hidden: int) -> list[LinearSpec]:
        """Gate of outputs, then steps."""
        return [
            self._part(names, layer, hidden, 0, LinearRole.STATE_IN, self.head_dim),
            self._part(names, layer, hidden, 4, LinearRole.STATE_GATE, 0),
        ]

    def _part(
        self, names: TensorNames, layer: int, hidden: int, place: int, role: LinearRole, grain: int
    ) -> LinearSpec:
        """One of gates, values, B, C and steps, which lie one behind the other."""
        sizes = self.inner, *self.sizes, self.heads
        tensor, first = names.of_layer(layer, names.state_in), sum(sizes[:place])
        rows = StoredRows(tensor, (sum(sizes), hidden), first)
        name = f"{tensor}.{('z', 'x', 'b', 'c', 'dt')[place]}"
        return LinearSpec(name, sizes[place], hidden, role, rows, grain=grain)

    def vectors(self, names: TensorNames, layer: int) -> list[tuple[str, int]]:
        """Names and sizes of its tensors besides maps."""
        of_heads = names.state_decay, names.state_bias, names.state_skip
        found = [(names.of_layer(layer, name), self.heads) for name in of_heads]
        if self.norm is not None:
            found.append((f"{names.of_layer(layer, names.state_norm)}.weight", self.inner))
        return [*conv_tensors(names, layer, self.channels, self.width, bias=self.bias), *found]


@dataclass(frozen=True)
class MambaSpec:
    """Mamba: each channel behind a convolution has a state of its own, with B, C and a step that channels make.

    With heads, neighbouring channels have steps and rates in common (PLaMo 2).
    """

    channels: int
    state_dim: int
    step_rank: int
    """Numbers of which the steps of all channels are made."""
    width: int
    """Tokens that the convolution sees, itself included."""
    bias: bool = True
    """Bias of the convolution."""
    norms: Literal["weighed", "unit"] | None = None
    """RMS norms of steps' numbers, B and C: with weights (Jamba), or without (Falcon Mamba)."""
    norm_eps: float = 1e-6
    heads: int | None = None
    """Heads of as many channels, whose gates lie in front of them in files, and whose steps lie behind B and C."""

    @property
    def name(self) -> str:
        return f"Mamba of {self.channels} channels with states of {self.state_dim}"

    @property
    def head_dim(self) -> int:
        """Channels that have a step in common."""
        return 1 if self.heads is None else self.channels // self.heads

    @property
    def num_steps(self) -> int:
        return self.heads or self.channels

    @property
    def small(self) -> tuple[int, int, int]:
        """Places at which steps' numbers, B and C begin among what channels make."""
        if self.heads is None:
            return 0, self.step_rank, self.step_rank + self.state_dim
        return 2 * self.state_dim, 0, self.state_dim

    @property
    def inner(self) -> int:
        """Inputs of the map back to hidden states."""
        return self.channels

    @property
    def sizes(self) -> tuple[int]:
        """Outputs of the map of hidden states, whose parts ranks hold."""
        return (self.channels,)

    @property
    def operations(self) -> frozenset[str]:
        found = {"short_conv", "selective_scan", "columns", "silu", "mul"}
        return frozenset(found if self.norms is None else {*found, "rms_norm"})

    @property
    def limits(self) -> Mapping[str, int]:
        """Sizes by the limits of `Capabilities` that they have to keep."""
        return {"max_conv_width": self.width, "max_scan_state": self.state_dim}

    def can_share(self, ranks: int) -> bool:
        """True if so many ranks can each have some channels."""
        return ranks <= self.channels if self.heads is None else self.heads % ranks == 0

    def states(self, sizes: Sequence[int]) -> tuple[StateUnits, ...]:
        """States of a rank that holds so many outputs of the map, one behind the other in a block."""
        units, floats = sizes[0] // self.head_dim, self.head_dim * self.state_dim
        conv = StateUnits(sizes[0], self.width - 1, maps=(0,))
        return conv, StateUnits(units, floats, maps=(0,))

    def linears(self, names: TensorNames, layer: int, hidden: int, *_: int) -> ScanLinears:
        """The map of hidden states to channels, and the one back to them."""
        x, *_gates = self._in(names, layer, hidden)
        out = names.of_layer(layer, names.state_out)
        role, grain = LinearRole.STATE_OUT, self.head_dim
        return ScanLinears(x, LinearSpec(out, hidden, self.channels, role, grain=grain))

    def gates(self, names: TensorNames, layer: int, hidden: int) -> list[LinearSpec]:
        """Gate of outputs, then the map of channels to steps' numbers, B and C, and that to steps."""
        _, gate = self._in(names, layer, hidden)
        small = self.step_rank + 2 * self.state_dim
        x, dt = (names.of_layer(layer, name) for name in (names.state_x, names.state_step))
        return [
            gate,
            LinearSpec(x, small, self.channels, LinearRole.STATE_OUT, grain=self.head_dim),
            LinearSpec(
                dt,
                self.num_steps,
                self.step_rank,
                LinearRole.STATE_GATE,
                grain=1 if self.heads is None else 0,
            ),
        ]

    def _in(self, names: TensorNames, layer: int, hidden: int) -> list[LinearSpec]:
        """Maps of hidden states to channels and to gates, which lie one behind the other."""
        tensor, shape = names.of_layer(layer, names.state_in), (2 * self.channels, hidden)
        size, group = self.head_dim, 2 * self.head_dim
        places = (("x", 0, 0), ("z", self.channels, 0))
        if self.heads is not None:
            places = (("x", size, group), ("z", 0, group))
        return [
            LinearSpec(
                f"{tensor}.{what}",
                self.channels,
                hidden,
                LinearRole.STATE_IN,
                StoredRows(tensor, shape, first, group=together),
                grain=size,
            )
            for what, first, together in places
        ]

    def vectors(self, names: TensorNames, layer: int) -> list[tuple[str, int]]:
        """Names and sizes of its tensors besides maps."""
        count = self.num_steps
        found = [
            (names.of_layer(layer, names.state_decay), math.prod(self.rates)),
            (names.of_layer(layer, names.state_skip), count),
            (self.step_bias(names, layer), count),
        ]
        if self.norms == "weighed":
            found += self.norm_names(names, layer)
        return [*conv_tensors(names, layer, self.channels, self.width, bias=self.bias), *found]

    def norm_names(self, names: TensorNames, layer: int) -> list[tuple[str, int]]:
        """Names and sizes of the norms of steps' numbers, B and C."""
        sizes = self.step_rank, self.state_dim, self.state_dim
        spelled = names.state_step_norm, names.state_b_norm, names.state_c_norm
        return [
            (names.of_layer(layer, name), size) for name, size in zip(spelled, sizes, strict=True)
        ]

    @property
    def rates(self) -> tuple[int, ...]:
        """Shape of the rates at which states decay."""
        return (self.channels, self.state_dim) if self.heads is None else (self.heads,)

    def step_bias(self, names: TensorNames, layer: int) -> str:
        """Name of what is added to steps."""
        if self.heads is not None:
            return names.of_layer(layer, names.state_bias)
        return f"{names.of_layer(layer, names.state_step)}.bias"


@dataclass(frozen=True)
class LightningSpec:
    """Lightning attention: keys and values add to a state of each head, which decays at a fixed rate.

    The rates are those of ALiBi's slopes, less in later layers (MiniMax 2025, arXiv 2501.08313, part 2.2).
    """

    heads: int
    dim: int

    @property
    def name(self) -> str:
        return f"lightning attention of {self.heads} heads of {self.dim}"

    @property
    def inner(self) -> int:
        """Inputs of the map back to hidden states."""
        return self.heads * self.dim

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Outputs of the maps of hidden states to values, keys and queries, whose parts ranks hold."""
        return self.inner, self.inner, self.inner

    @property
    def operations(self) -> frozenset[str]:
        return frozenset({"silu", "columns", "selective_scan", "rms_norm", "sigmoid", "mul"})

    @property
    def limits(self) -> Mapping[str, int]:
        """Sizes by the limits of `Capabilities` that they have to keep."""
        return {"max_scan_state": self.dim}

    def can_share(self, ranks: int) -> bool:
        """True if so many ranks can each have as many heads."""
        return self.heads % ranks == 0

    def states(self, sizes: Sequence[int]) -> tuple[StateUnits, ...]:
        """States of a rank that holds so many outputs of each map."""
        return (StateUnits(sizes[0] // self.dim, self.dim * self.dim, maps=(0,)),)

    def linears(self, names: TensorNames, layer: int, hidden: int, *_: int) -> AttentionLinears:
        """Maps of hidden states to values, keys and queries, and the one back to them."""
        tensor, shape = names.of_layer(layer, names.state_in), (3 * self.inner, hidden)
        v, k, q = (
            LinearSpec(
                f"{tensor}.{what}",
                self.inner,
                hidden,
                LinearRole.STATE_IN,
                StoredRows(tensor, shape, place * self.dim, group=3 * self.dim),
                grain=self.dim,
            )
            for what, place in (("v", 2), ("k", 1), ("q", 0))
        )
        name = names.of_layer(layer, names.state_out)
        out = LinearSpec(name, hidden, self.inner, LinearRole.STATE_OUT, grain=self.dim)
        return AttentionLinears(v, k, q, out)

    def gates(self, names: TensorNames, layer: int, hidden: int) -> list[LinearSpec]:
        """Gate of outputs."""
        name = names.of_layer(layer, names.state_output_gate)
        return [LinearSpec(name, self.inner, hidden, LinearRole.STATE_IN, grain=self.dim)]

    def vectors(self, names: TensorNames, layer: int) -> list[tuple[str, int]]:
        """Names and sizes of its tensors besides maps."""
        return [(f"{names.of_layer(layer, names.state_norm)}.weight", self.inner)]
