# SPDX-License-Identifier: Apache-2.0
"""Kinds of layers besides plain attention: a line for each, by its specification."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pagoda.backend.graph import RotaryTable, Value
from pagoda.backend.operations import GraphBuilder
from pagoda.checkpoints.latent_attention import LatentSpec
from pagoda.checkpoints.state_layers import GatedDeltaSpec, ShortConvSpec
from pagoda.model.latent_attention import load_latent_attention
from pagoda.model.state_layers import load_conv, load_delta_rule

if TYPE_CHECKING:
    from pagoda.model.loader import WeightLoader


class LayerWeights(Protocol):
    """Weights of a layer besides the map of hidden states to what is kept, and that back to them."""

    def record(
        self,
        ops: GraphBuilder,
        h: Value,
        into: Value,
        metadata: Value,
        table: RotaryTable | None,
        caches: Sequence[Any],
    ) -> Value:
        """Inputs of the map back, of hidden states h and what the first map makes of them; `caches` are those of
        the layer's states, or the one of what it keeps of each token."""


KINDS: Mapping[type, Callable[[Any, int, Any], LayerWeights]] = {
    LatentSpec: load_latent_attention,
    ShortConvSpec: load_conv,
    GatedDeltaSpec: load_delta_rule,
}
"""Functions that load a layer of a specification with a loader, by its number."""


def load_kind(loader: WeightLoader[Any], index: int) -> LayerWeights | None:
    """The weights of a layer that has none of plain attention, else None."""
    kind = loader.shard.config.layers[index].kind
    return None if kind is None else KINDS[type(kind)](loader, index, kind)
