# SPDX-License-Identifier: Apache-2.0
"""Adapters of a decoder's layers: one rank's part of each, read from files and given to the backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagoda.backend.base import Backend
from pagoda.backend.low_rank import LowRank, LowRankMaps, low_rank_dtype
from pagoda.checkpoints.adapters import AdapterFiles
from pagoda.checkpoints.layer_spec import MlpSpec
from pagoda.checkpoints.linears import LinearSpec
from pagoda.errors import ConfigError
from pagoda.model.sharding import Shard
from pagoda.model.weights import in_head_order


@dataclass(frozen=True)
class AdaptedLayer:
    """Maps of all adapters for one layer; those of a layer with experts are of its attention alone."""

    qkv: LowRankMaps | None
    attention_out: LowRankMaps | None
    """None, as `qkv`, of a layer without attention."""
    gate_up: LowRankMaps | None
    down: LowRankMaps | None


class Adapters:
    """Adapters of one rank's layers, each known by a number of its own.

    Of a layer whose outputs are split among ranks, a rank holds the first matrix whole and its outputs of the
    second; of one whose inputs are split, its inputs of the first and the second whole, so that the sum over ranks
    that the layer needs anyway completes what the adapter adds.
    """

    def __init__(self, shard: Shard, backend: Backend[Any, Any], dtype: torch.dtype) -> None:
        """`dtype` is that of activations."""
        self._shard = shard
        self._backend = backend
        self._dtype = low_rank_dtype(dtype)
        self._numbers: dict[str, int] = {}
        self._next_number = 0
        self.layers = [self._layer(index) for index in shard.layers]

    def number(self, digest: str) -> int:
        """Number of a loaded adapter. Raises ValueError: it is not loaded."""
        try:
            return self._numbers[digest]
        except KeyError:
            raise ValueError(f"The adapter {digest} is not loaded.") from None

    def load(self, files: AdapterFiles) -> None:
        """Reads the rank's part of an adapter; does nothing if it is there already.
        Raises ConfigError: its file cannot be read."""
        if files.digest in self._numbers:
            return
        number, self._next_number = self._next_number, self._next_number + 1
        try:
            with safe_open(files.weights, framework="pt") as handle:
                for maps, specs in self._maps():
                    parts = [self._part(files, handle, spec) for spec in specs]
                    if any(parts):
                        self._backend.set_low_rank(maps, number, parts)
        except (SafetensorError, OSError) as error:
            self._remove(number)
            raise ConfigError(f"{files.weights} cannot be read ({error}).") from error
        self._numbers[files.digest] = number

    def unload(self, digest: str) -> None:
        """Frees an adapter's memory; unknown digests are ignored."""
        number = self._numbers.pop(digest, None)
        if number is not None:
            self._remove(number)

    def _remove(self, number: int) -> None:
        for maps, _ in self._maps():
            self._backend.remove_low_rank(maps, number)

    def _maps(self) -> list[tuple[LowRankMaps, Sequence[LinearSpec]]]:
        """All maps of the rank's layers, with the linear layers that each is of."""
        config = self._shard.config
        found: list[tuple[LowRankMaps, Sequence[LinearSpec]]] = []
        for index, layer in zip(self._shard.layers, self.layers, strict=True):
            attention = config.attention_linears(index)
            if layer.qkv is not None:
                found.append((layer.qkv, attention.into))
            if layer.attention_out is not None and attention.out is not None:
                found.append((layer.attention_out, [attention.out]))
            if layer.gate_up is not None and layer.down is not None:
                mlp = config.mlp_linears(index)
                found += [(layer.gate_up, mlp.into), (layer.down, [mlp.down])]
        return found

    def _layer(self, index: int) -> AdaptedLayer:
        config = self._shard.config
        attention = config.attention_linears(index)
        qkv = self._empty(attention.into) if attention.into else None
        out = None if attention.out is None else self._empty([attention.out])
        if not isinstance(config.layers[index].mlp, MlpSpec):
            return AdaptedLayer(qkv, out, None, None)
        mlp = config.mlp_linears(index)
        return AdaptedLayer(qkv, out, self._empty(mlp.into), self._empty([mlp.down]))

    def _empty(self, specs: Sequence[LinearSpec]) -> LowRankMaps:
        parts = [self._shard.part_of(spec) for spec in specs]
        outputs = tuple(len(part.outputs) for part in parts)
        return LowRankMaps(len(parts[0].inputs), outputs, self._dtype)

    def _part(self, files: AdapterFiles, handle: Any, spec: LinearSpec) -> LowRank | None:
        linear, part = files.linears.get(spec.name), self._shard.part_of(spec)
        if linear is None:
            return None
        inputs, outputs = part.inputs, part.outputs
        down: Tensor = handle.get_slice(linear.down)[:, inputs.start : inputs.stop]
        first, last = linear.first + outputs.start, linear.first + outputs.stop
        up: Tensor = handle.get_slice(linear.up)[first:last]
        return LowRank(down, in_head_order(up, linear.head_order), files.scale)


def adapter_bytes(files: AdapterFiles, shard: Shard, dtype: torch.dtype) -> int:
    """Bytes of the rank's part of an adapter; `dtype` is that of activations."""
    total = 0
    for spec in shard.linears():
        linear = files.linears.get(spec.name)
        if linear is not None:
            part = shard.part_of(spec)
            total += linear.rank * (len(part.inputs) + len(part.outputs))
    return total * low_rank_dtype(dtype).itemsize
