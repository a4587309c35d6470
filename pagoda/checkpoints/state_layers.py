# SPDX-License-Identifier: Apache-2.0
"""Layers that keep one state of all tokens so far instead of K and V: their weights, and what a state takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pagoda.checkpoints.linears import AttentionLinears, LinearRole, LinearSpec
from pagoda.checkpoints.tensor_names import StoredRows, TensorNames, places


class StateUnits(NamedTuple):
    """States of a layer that are alike."""

    units: int
    floats: int
    """Float32 numbers of each."""
    maps: tuple[int, ...]
    """Maps of hidden states, by index, whose outputs make the units: all of one map, then those of the next.
    Other engines know units by their place among these."""

    @property
    def half_bytes(self) -> int:
        """Bytes that they take of each half of a block; see `pagoda.backend.base.StateCache`."""
        return (self.units + 1) // 2 * self.floats * 4


@dataclass(frozen=True)
class ShortConvSpec:
    """A gated convolution of each channel: `out(c * conv(b * x))`; b, c and x are maps of hidden states."""

    channels: int
    width: int
    """Tokens that it sees, itself included."""
    bias: bool = False

    @property
    def name(self) -> str:
        return f"short convolutions over {self.width} tokens"

    @property
    def parts(self) -> tuple[str, str, str]:
        """Names of the three maps of hidden states."""
        return "b", "c", "x"

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Outputs of the three maps of hidden states, whose parts ranks hold."""
        return self.channels, self.channels, self.channels

    @property
    def inner(self) -> int:
        """Inputs of the map back to hidden states."""
        return self.channels

    @property
    def grains(self) -> tuple[int, int, int]:
        """Outputs of each map that stay on one rank."""
        return 1, 1, 1

    def can_share(self, ranks: int) -> bool:
        """True if so many ranks can each have a part."""
        return ranks <= self.channels

    @property
    def operations(self) -> frozenset[str]:
        return frozenset({"short_conv"})

    @property
    def limits(self) -> Mapping[str, int]:
        """Sizes by the limits of `Capabilities` that they have to keep."""
        return {"max_conv_width": self.width}

    def states(self, sizes: Sequence[int]) -> tuple[StateUnits, ...]:
        """States of a rank that holds so many outputs of each map, one behind the other in a block."""
        return (StateUnits(sizes[0], self.width - 1, maps=(0,)),)

    def linears(self, names: TensorNames, layer: int, hidden: int, *_: int) -> AttentionLinears:
        """The three maps of hidden states, and the one back to them."""
        return _maps(self, names, layer, hidden)

    def gates(self, names: TensorNames, layer: int, hidden: int) -> list[LinearSpec]:  # noqa: ARG002
        return []

    def vectors(self, names: TensorNames, layer: int) -> list[tuple[str, int]]:
        """Names and sizes of its tensors besides maps."""
        return conv_tensors(names, layer, self.channels, self.width, bias=self.bias)


@dataclass(frozen=True)
class GatedDeltaSpec:
    """Gated delta rule behind a convolution of queries, keys and values (Yang et al. 2024, arXiv 2412.06464).

    A head of queries and keys belongs to several neighbouring heads of values, and stays with them on one rank.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    """Tokens that the convolution sees, itself included."""
    bias = False

    @property
    def name(self) -> str:
        return (
            f"a gated delta rule of {self.value_heads} heads of {self.key_dim} by {self.value_dim}"
        )

    @property
    def values_per_key(self) -> int:
        return self.value_heads // self.key_heads

    @property
    def channels(self) -> int:
        return sum(self.sizes)

    @property
    def parts(self) -> tuple[str, str, str]:
        return "query", "key", "value"

    @property
    def sizes(self) -> tuple[int, int, int]:
        keys = self.key_heads * self.key_dim
        return keys, keys, self.inner

    @property
    def inner(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def grains(self) -> tuple[int, int, int]:
        return self.key_dim, self.key_dim, self.values_per_key * self.value_dim

    def can_share(self, ranks: int) -> bool:
        """True if so many ranks can each have a part."""
        return ranks <= self.key_heads

    @property
    def operations(self) -> frozenset[str]:
        return frozenset({"short_conv", "gated_delta", "gated_head_norm"})

    @property
    def limits(self) -> Mapping[str, int]:
        return {"max_conv_width": self.width, "max_delta_key_dim": self.key_dim}

    def states(self, sizes: Sequence[int]) -> tuple[StateUnits, ...]:
        heads, floats = sizes[2] // self.value_dim, self.key_dim * self.value_dim
        conv = StateUnits(sum(sizes), self.width - 1, maps=(0, 1, 2))
        return conv, StateUnits(heads, floats, maps=(2,))

    def linears(self, names: TensorNames, layer: int, hidden: int, *_: int) -> AttentionLinears:
        q, k, v, out = _maps(self, names, layer, hidden)
        if not names.state_output_gate:
            own = self._rows(names, layer, hidden)
            q, k, v = (replace(it, rows=rows) for it, rows in zip((q, k, v), own, strict=False))
        order = self.value_order(names)
        return AttentionLinears(
            q, k, replace(v, value_order=order), replace(out, value_order=order)
        )

    def gates(self, names: TensorNames, layer: int, hidden: int) -> list[LinearSpec]:
        """Gates of outputs, then those of states: b and a."""
        grain, heads, order = self.values_per_key, self.value_heads, self.value_order(names)
        gates, shape = names.of_layer(layer, names.state_gates), (2 * heads, hidden)
        rows = self._rows(names, layer, hidden)[3]
        in_turns = [
            (f"{rows.tensor}.z", rows),
            (f"{gates}.b", StoredRows(gates, shape, 0, group=2 * grain)),
            (f"{gates}.a", StoredRows(gates, shape, grain, group=2 * grain)),
        ]
        own = (names.state_output_gate, names.state_b, names.state_a)
        placed = [
            (names.of_layer(layer, name), None) if name else turn
            for name, turn in zip(own, in_turns, strict=True)
        ]
        kinds = [(self.inner, LinearRole.STATE_IN, self.grains[2])]
        kinds += [(heads, LinearRole.STATE_GATE, grain)] * 2
        return [
            LinearSpec(name, size, hidden, role, stored, value_order=order, grain=together)
            for (name, stored), (size, role, together) in zip(placed, kinds, strict=True)
        ]

    def _rows(self, names: TensorNames, layer: int, hidden: int) -> list[StoredRows]:
        """Rows of queries, keys, values and gates, which take turns by heads of keys."""
        tensor = names.of_layer(layer, names.state_in)
        grains = (*self.grains, self.grains[2])
        shape, group = (self.key_heads * sum(grains), hidden), sum(grains)
        return [StoredRows(tensor, shape, sum(grains[:i]), group=group) for i in range(len(grains))]

    def value_order(self, names: TensorNames) -> tuple[int, ...] | None:
        """Stored heads of values in the order in which they are computed, those of one head of keys together."""
        if not names.tiled_values or self.values_per_key == 1:
            return None
        keys, turns = range(self.key_heads), range(self.values_per_key)
        return tuple(turn * self.key_heads + key for key in keys for turn in turns)

    def vectors(self, names: TensorNames, layer: int) -> list[tuple[str, int]]:
        of_heads = [
            (names.of_layer(layer, name), self.value_heads)
            for name in (names.state_decay, names.state_bias)
        ]
        norm = (f"{names.of_layer(layer, names.state_norm)}.weight", self.value_dim)
        conv = conv_tensors(names, layer, self.channels, self.width, bias=self.bias)
        return [*conv, *of_heads, norm]


@dataclass(frozen=True)
class ChannelDeltaSpec:
    """Gated delta rule that forgets by channels of keys (Kimi Delta Attention, Kimi Team 2025, arXiv 2510.26692).

    Gates of channels, and of outputs, are made of hidden states by two maps, one behind the other.
    """

    heads: int
    dim: int
    """Elements of a head's queries, keys and values, and numbers between the maps of gates."""
    width: int
    """Tokens that the convolution sees, itself included."""
    bias = False

    @property
    def name(self) -> str:
        return f"a delta rule of {self.heads} heads of {self.dim} that forgets by channels"

    @property
    def inner(self) -> int:
        """Inputs of the map back to hidden states."""
        return self.heads * self.dim

    @property
    def channels(self) -> int:
        return sum(self.sizes)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Outputs of the maps to queries, keys and values, whose parts ranks hold."""
        return self.inner, self.inner, self.inner

    def can_share(self, ranks: int) -> bool:
        """True if so many ranks can each have a part."""
        return ranks <= self.heads

    @property
    def operations(self) -> frozenset[str]:
        own = {"short_conv", "gated_delta", "rms_norm_heads", "join_columns", "sigmoid", "mul"}
        return frozenset(own)

    @property
    def limits(self) -> Mapping[str, int]:
        """Sizes by the limits of `Capabilities` that they have to keep."""
        return {"max_conv_width": self.width, "max_delta_key_dim": self.dim}

    def states(self, sizes: Sequence[int]) -> tuple[StateUnits, ...]:
        """States of a rank that holds so many outputs of each map, one behind the other in a block."""
        conv = StateUnits(sum(sizes), self.width - 1, maps=(0, 1, 2))
        return conv, StateUnits(sizes[2] // self.dim, self.dim * self.dim, maps=(2,))

    def linears(self, names: TensorNames, layer: int, hidden: int, *_: int) -> AttentionLinears:
        """Maps of hidden states to queries, keys and values, and the one back to them."""
        q, k, v = (
            self._linear(names.of_layer(layer, name), self.inner, hidden, LinearRole.STATE_IN)
            for name in (names.query, names.key, names.value)
        )
        out = names.of_layer(layer, names.attention_out)
        return AttentionLinears(
            q, k, v, self._linear(out, hidden, self.inner, LinearRole.STATE_OUT)
        )

    def gates(self, names: TensorNames, layer: int, hidden: int) -> list[LinearSpec]:
        """Both maps to gates of outputs, that to b of heads, and both maps to gates of channels."""

        def both(gate: str) -> tuple[LinearSpec, LinearSpec]:
            low, full = (
                names.of_layer(layer, names.channel_gate.format(gate=gate, part=part))
                for part in "ab"
            )
            return (
                LinearSpec(low, self.dim, hidden, LinearRole.WHOLE_MAP),
                self._linear(full, self.inner, self.dim, LinearRole.STATE_GATE),
            )

        (out_low, out), (low, channels) = both("g"), both("f")
        name = names.of_layer(layer, names.channel_b)
        b = LinearSpec(name, self.heads, hidden, LinearRole.STATE_GATE, grain=0)
        return [out_low, out, b, low, channels]

    def _linear(self, name: str, outputs: int, inputs: int, role: LinearRole) -> LinearSpec:
        return LinearSpec(name, outputs, inputs, role, grain=self.dim)

    def conv_names(self, names: TensorNames, layer: int) -> list[str]:
        """Names, without `.weight`, of the convolutions of queries, keys and values."""
        return [names.of_layer(layer, names.channel_conv.format(what=what)) for what in "qkv"]

    def vectors(self, names: TensorNames, layer: int) -> list[tuple[str, int]]:
        """Names and sizes of its tensors besides maps."""
        convs = [(f"{it}.weight", self.inner * self.width) for it in self.conv_names(names, layer)]
        decay, bias, norm = (
            names.of_layer(layer, it)
            for it in (names.state_decay, names.state_bias, names.state_norm)
        )
        return [*convs, (decay, self.heads), (bias, self.inner), (f"{norm}.weight", self.dim)]


def _maps(
    spec: ShortConvSpec | GatedDeltaSpec, names: TensorNames, layer: int, hidden: int
) -> AttentionLinears:
    tensors = [names.of_layer(layer, names.state_in)] * 3
    placed = places(tensors, dict(zip(spec.parts, spec.sizes, strict=True)), hidden, None, 0)
    q, k, v = (
        LinearSpec(name, size, hidden, LinearRole.STATE_IN, rows, grain=grain)
        for (name, rows), size, grain in zip(placed, spec.sizes, spec.grains, strict=True)
    )
    out = names.of_layer(layer, names.state_out)
    grain = spec.grains[2]
    last = LinearSpec(out, hidden, spec.inner, LinearRole.STATE_OUT, grain=grain)
    return AttentionLinears(q, k, v, last)


def conv_tensors(
    names: TensorNames, layer: int, channels: int, width: int, *, bias: bool
) -> list[tuple[str, int]]:
    """Names and sizes of the tensors of a layer's convolution."""
    name = names.of_layer(layer, names.state_conv)
    weight = (f"{name}.weight", channels * width)
    return [weight, (f"{name}.bias", channels)] if bias else [weight]
