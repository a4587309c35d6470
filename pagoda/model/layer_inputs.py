# SPDX-License-Identifier: Apache-2.0
"""Embeddings of tokens for every layer, and hidden states of several streams, as they are loaded and recorded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

import torch
from torch import Tensor

from pagoda.backend.base import LinearT
from pagoda.backend.decoder_operations import scaled
from pagoda.backend.family_operations import (
    correct_streams,
    join_columns,
    match_magnitude,
    mix_streams,
    rms_norm_heads,
)
from pagoda.backend.graph import Value
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.relative_attention import columns
from pagoda.backend.weights import DenseWeight, dequantize
from pagoda.checkpoints.layer_inputs import LayerInputs
from pagoda.model.sharding import Shard

if TYPE_CHECKING:
    from pagoda.model.loader import WeightLoader

_LEAST_SQUARE = 1e-5
"""Mean square that streams are taken to have at least."""


@dataclass(frozen=True)
class Streams(Generic[LinearT]):
    """Weights of a layer by which it predicts streams, corrects them, and adds to attention."""

    router_norm: Tensor
    """[hidden] float32."""
    router: LinearT
    predictions: LinearT
    corrections: LinearT
    laurel_in: LinearT
    laurel_out: LinearT
    laurel_norm: Tensor
    """[hidden] float32."""


@dataclass(frozen=True)
class LayerBeside(Generic[LinearT]):
    """Weights of a layer besides those of attention and MLP."""

    embedded: tuple[LinearT, LinearT, Tensor] | None
    """Map of hidden states to what a token's embedding is times, behind an activation, the map back, and the norm
    [hidden] float32 of what comes of it."""
    streams: Streams[LinearT] | None
    factor: float
    """Factor of the layer's output."""

    def named(self) -> dict[str, object]:
        """Weights by their names in traces."""
        found = {} if self.streams is None else dict(vars(self.streams))
        return found | dict(zip(("gate", "projection", "norm"), self.embedded or (), strict=False))


@dataclass(frozen=True)
class Beside(Generic[LinearT]):
    """Weights of a model that belong to none of its layers, and serve all of them."""

    spec: LayerInputs
    eps: float
    table: LinearT | None
    projection: LinearT | None
    norm: Tensor
    """[layers size] float32, of embeddings."""
    openings: list[LinearT]
    closings: list[LinearT]
    factor: float
    """Factor of embeddings in the table."""

    def open(self, ops: GraphBuilder, shard: Shard, x: Value, *, embeds_spans: bool) -> Frame:
        """Inputs of layers that come of embeddings x [n, hidden] and of tokens, recorded once for all."""
        embedded = None
        if self.table is not None and self.projection is not None:
            size, first = self.spec.size, shard.channels(self.spec.vocab_size).start
            tokens, count = ops.input("token_ids"), self.spec.vocab_size + embeds_spans
            found = ops.all_reduce(ops.embedding(tokens, self.table, first, count))
            made = ops.scale(ops.linear(x, self.projection), x.width**-0.5)
            made = rms_norm_heads(ops, made, self.norm, first=0, head_dim=size, eps=self.eps)
            embedded = ops.scale(ops.add(made, ops.scale(found, self.factor)), 2**-0.5)
        streams = x
        for opening in self.openings:
            other = match_magnitude(ops, ops.linear(x, opening), x, _LEAST_SQUARE)
            streams = join_columns(ops, streams, other)
        return Frame(self, embedded, streams if self.openings else None)


class Frame:
    """Values that go past attention and MLPs while a model's layers are recorded, one after the other."""

    def __init__(self, beside: Beside[Any], embedded: Value | None, streams: Value | None) -> None:
        """Tokens' embeddings for all layers [n, layers size], and hidden states [n, count hidden], if there are
        several."""
        self._beside = beside
        self._embedded = embedded
        self._streams = streams
        self._laurel: Value | None = None

    def enter(self, ops: GraphBuilder, layer: LayerBeside[Any], x: Value) -> Value:
        """Input of a layer: x, or the first stream as the layer predicts it."""
        if layer.streams is None or self._streams is None:
            return x
        coefficients = ops.linear(self._routed(ops, layer.streams, x), layer.streams.predictions)
        count = self._streams.width // x.width
        self._streams = mix_streams(ops, self._streams, coefficients, count)
        return columns(ops, self._streams, 0, x.width)

    def attend(self, ops: GraphBuilder, layer: LayerBeside[Any], h: Value) -> None:
        """Keeps what is added to attention's output, of its normed input h [n, hidden]."""
        if layer.streams is not None:
            low = ops.linear(h, layer.streams.laurel_in)
            out = ops.linear(low, layer.streams.laurel_out)
            out = ops.rms_norm(out, layer.streams.laurel_norm, self._beside.eps)
            self._laurel = ops.add(h, out)

    def select(self, ops: GraphBuilder, rows: Value) -> None:
        """Goes on with some rows alone."""
        for name in ("_embedded", "_streams", "_laurel"):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, ops.select_rows(value, rows))

    def attended(self, ops: GraphBuilder, x: Value) -> Value:
        """Hidden states [n, hidden] behind attention, with what is added to its output."""
        if self._laurel is None:
            return x
        return ops.scale(ops.add(x, self._laurel), math.sqrt(0.5))

    def leave(self, ops: GraphBuilder, index: int, layer: LayerBeside[Any], x: Value) -> Value:
        """Output of a layer of number `index`, of hidden states x [n, hidden] behind its MLP."""
        width = x.width
        if layer.streams is not None and self._streams is not None:
            coefficients = ops.linear(
                self._routed(ops, layer.streams, x), layer.streams.corrections
            )
            count = self._streams.width // width
            self._streams = correct_streams(ops, self._streams, x, coefficients, count)
            x = columns(ops, self._streams, 0, width)
        if self._embedded is not None and layer.embedded is not None:
            size, (gate, projection, norm) = self._beside.spec.size, layer.embedded
            own = columns(ops, self._embedded, index * size, size)
            inner = ops.mul(ops.gelu_tanh(ops.linear(x, gate)), own)
            out = ops.rms_norm(ops.linear(inner, projection), norm, self._beside.eps)
            x = self._with_embedded(ops, x, out)
        return scaled(ops, x, layer.factor)

    def _with_embedded(self, ops: GraphBuilder, x: Value, out: Value) -> Value:
        """x [n, hidden] with what comes of a token's embedding, or, in its place, all streams behind the first."""
        if self._streams is None:
            return ops.add(x, out)
        width = x.width
        behind = columns(ops, self._streams, width, self._streams.width - width)
        every = out
        while every.width < behind.width:
            every = join_columns(ops, every, out)
        self._streams = join_columns(ops, x, ops.add(behind, every))
        return x

    def close(self, ops: GraphBuilder, x: Value) -> Value:
        """Hidden states [n, hidden] behind the last layer, the mean of all streams."""
        if self._streams is None:
            return x
        first = total = columns(ops, self._streams, 0, x.width)
        for place, closing in enumerate(self._beside.closings, 1):
            own = ops.linear(columns(ops, self._streams, place * x.width, x.width), closing)
            total = ops.add(total, match_magnitude(ops, own, first, _LEAST_SQUARE))
        return ops.scale(total, 1 / (1 + len(self._beside.closings)))

    def _routed(self, ops: GraphBuilder, streams: Streams[Any], x: Value) -> Value:
        normed = ops.rms_norm(x, streams.router_norm, self._beside.eps)
        return ops.softcap(ops.linear(normed, streams.router), 1.0)


def load_beside(loader: WeightLoader[LinearT]) -> Beside[LinearT] | None:
    """Weights that serve all layers; None of a model whose layers are given hidden states alone."""
    config = loader.shard.config
    spec, hidden = config.beside, config.hidden_size
    if spec is None:
        return None
    table = projection = None
    norm = torch.empty(0)
    if spec.size:
        table, projection = (loader.linear([it]) for it in list(spec.outer_linears(hidden))[:2])
        ((name, size),) = spec.outer_vectors
        norm = loader.vector(name, size).repeat(spec.num_layers)
    openings, closings = (
        [loader.linear([it]) for it in maps]
        for maps in (spec.openings(hidden), spec.closings(hidden))
    )
    factor = torch.tensor(math.sqrt(spec.size)).to(loader.dtype).item()
    return Beside(spec, config.norm.eps, table, projection, norm, openings, closings, factor)


def load_layer_beside(loader: WeightLoader[LinearT], index: int) -> LayerBeside[LinearT] | None:
    """Weights of a layer besides those of attention and MLP; None where there are none."""
    config = loader.shard.config
    spec, hidden = config.beside, config.hidden_size
    if spec is None:
        return None
    own, sizes = spec.names, spec.layer_vectors(config.names, index, hidden)
    prefix = config.names.of_layer(index, "")
    vectors = {name.removeprefix(prefix): loader.vector(name, size) for name, size in sizes}
    maps = {
        it.name.removeprefix(prefix): it for it in spec.layer_linears(config.names, index, hidden)
    }
    streams = None
    if spec.streams is not None:
        # Inputs of the router are over their number.
        streams = Streams(
            vectors[f"{own.router_norm}.weight"] / hidden,
            loader.linear([maps[own.router]]),
            loader.linear([maps[own.predictions]]),
            loader.linear([maps[own.corrections]]),
            loader.linear([maps[own.laurel_in]]),
            loader.linear([maps[own.laurel_out]]),
            vectors[f"{own.laurel_norm}.weight"],
        )
    embedded = None
    if spec.size:
        stored = loader.weight(maps[own.gate])
        values = stored.values if isinstance(stored, DenseWeight) else dequantize(stored)
        scale = vectors.get(own.output_scale)
        if scale is not None:
            values = values.float() * scale
        gate = loader.backend.prepare_linear(
            [DenseWeight(values.to(loader.dtype))], None, loader.dtype
        )
        loader.on_loaded(values.numel() * loader.dtype.itemsize)
        projection = loader.linear([maps[own.projection]])
        embedded = gate, projection, vectors[f"{own.norm}.weight"]
    factor = vectors[own.factor].item() if spec.scaled else 1.0
    return LayerBeside(embedded, streams, factor)
