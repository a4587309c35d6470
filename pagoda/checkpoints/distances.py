# SPDX-License-Identifier: Apache-2.0
"""Scores of tokens that depend on their distance; no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pagoda.checkpoints.linears import LinearSpec
from pagoda.checkpoints.tensor_names import TensorNames

if TYPE_CHECKING:
    from pagoda.checkpoints.model_spec import ModelSpec


@dataclass(frozen=True)
class DistanceBuckets:
    """A number of each head and bucket of distances is added to scores (Raffel et al. 2020, part 2.1; MPNet)."""

    count: int
    """Buckets, half of them of keys behind a query, if it sees any; half of those of each side are of one distance
    each, others grow."""
    farthest: int
    """Distance from which on all are in the last bucket."""


@dataclass(frozen=True)
class Disentangled:
    """Scores of a token's content with another's place, and of its place with the other's content.

    Places are rows of a table of `2 span` distances, of which each layer makes queries and keys (He et al. 2020).
    """

    span: int
    """Buckets of distances on each side."""
    farthest: int | None
    """Distance of the last bucket, where buckets grow with distances; None where each distance has its own."""
    shares_maps: bool
    """Queries and keys of places are made by the maps of tokens, else by maps of their own."""
    norms_table: bool
    """Rows of the table are normed."""


def distance_tensors(spec: ModelSpec) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a model's tables of what distances add to scores, and of their norm."""
    distances, names, size = spec.layers[0].attention.distances, spec.names, spec.hidden_size
    if distances is None:
        return []
    if isinstance(distances, DistanceBuckets):
        own = (i for i, layer in enumerate(spec.layers) if layer.attention.distances is not None)
        tables = dict.fromkeys(distance_table(names, index) for index in own)
        return [(name, (distances.count, spec.num_heads)) for name in tables]
    norm = [(f"{names.distance_norm}.{end}", (size,)) for end in ("weight", "bias")]
    table = (f"{names.distance_embeddings}.weight", (2 * distances.span, size))
    return [table, *norm * distances.norms_table]


def distance_table(names: TensorNames, layer: int) -> str:
    """Name of the table of what distances add to the scores of a layer."""
    return f"{names.distances.replace('{layer}', str(names.number_of(layer)))}.weight"


def distance_linears(spec: ModelSpec, layer: int) -> tuple[LinearSpec, LinearSpec]:
    """Maps of a layer that make queries, and keys, of embeddings of distances; they have biases."""
    query, key, _ = spec.plain_linears(layer).into
    distances, names = spec.layers[layer].attention.distances, spec.names
    if isinstance(distances, Disentangled) and distances.shares_maps:
        return query, key
    return (
        replace(query, name=names.of_layer(layer, names.distance_query)),
        replace(key, name=names.of_layer(layer, names.distance_key)),
    )
