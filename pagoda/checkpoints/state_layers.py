# SPDX-License-Identifier: Apache-2.0
"""Layers that keep one state of all tokens so far instead of K and V: their weights, and what a state takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


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
    def key_heads(self) -> int:
        """Parts that ranks share out."""
        return self.channels

    @property
    def grains(self) -> tuple[int, int, int]:
        """Outputs of each map that stay on one rank."""
        return 1, 1, 1

    def states(self, sizes: Sequence[int]) -> tuple[StateUnits, ...]:
        """States of a rank that holds so many outputs of each map, one behind the other in a block."""
        return (StateUnits(sizes[0], self.width - 1, maps=(0,)),)


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

    def states(self, sizes: Sequence[int]) -> tuple[StateUnits, ...]:
        heads, floats = sizes[2] // self.value_dim, self.key_dim * self.value_dim
        conv = StateUnits(sum(sizes), self.width - 1, maps=(0, 1, 2))
        return conv, StateUnits(heads, floats, maps=(2,))


StateSpec = ShortConvSpec | GatedDeltaSpec
