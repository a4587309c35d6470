# SPDX-License-Identifier: Apache-2.0
"""Names of weights in traces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pagoda.backend.operation import WeightNames
from pagoda.checkpoints.pooling_spec import VectorKind
from pagoda.model.loaded_layers import InputTables, Layer, Norm, VectorLayer


def weight_names(
    outer: Mapping[str, object],
    tables: InputTables[Any] | None,
    vector_layers: Mapping[VectorKind, Sequence[VectorLayer[Any]]],
    layers: Iterable[tuple[int, Layer[Any]]],
) -> WeightNames:
    """Names such as `embedding` and `layers.3.qkv` of a stage's weights; `outer` are those of no layer by name."""
    named = dict(outer)
    if tables is not None:
        named |= {
            "positions": tables.positions,
            "token_types": tables.token_types,
            "embedding_norm": tables.norm,
            "embedding_projection": tables.projection,
        }
    for kind, behind in vector_layers.items():
        named |= {f"{kind}.{place}": layer.weight for place, layer in enumerate(behind)}
    for index, layer in layers:
        named |= _of_layer(index, layer)
    return {
        id(weight.weight if isinstance(weight, Norm) else weight): name
        for name, weight in named.items()
    }


def _of_layer(index: int, layer: Layer[Any]) -> dict[str, object]:
    """Weights of a layer of number `index` by their names in traces."""
    of_mlp = {} if layer.mlp is None else vars(layer.mlp)
    of_shared = {} if of_mlp.get("shared") is None else vars(of_mlp["shared"])
    own = vars(layer) | of_mlp
    own |= {f"shared_{name}": weight for name, weight in of_shared.items()}
    own |= {} if layer.of_kind is None else vars(layer.of_kind)
    own |= {} if layer.beside is None else layer.beside.named()
    own |= {} if layer.block is None else layer.block.named()
    return {f"layers.{index}.{name}": weight for name, weight in own.items()}
