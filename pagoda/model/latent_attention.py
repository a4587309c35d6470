# SPDX-License-Identifier: Apache-2.0
"""Latent attention of a layer: its weights besides the map to what is kept, and the operations that it records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

from torch import Tensor

from pagoda.backend.base import HeadLinears, LatentCache, LinearT
from pagoda.backend.decoder_operations import layer_norm_heads, position_scale, rotate_heads
from pagoda.backend.graph import RotaryTable, Value
from pagoda.backend.latent_layers import (
    IndexQueries,
    head_linear,
    indexed_latent_attention,
    latent_attention,
    prepare_head_linears,
    rotate_and_cache_latents,
)
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.weights import DenseWeight, dequantize
from pagoda.checkpoints.latent_attention import NORM_EPS, LatentLinears, LatentSpec
from pagoda.checkpoints.linears import LinearSpec
from pagoda.checkpoints.rope import TemperatureSpec

if TYPE_CHECKING:
    from pagoda.model.loader import WeightLoader


@dataclass(frozen=True)
class Indexer(Generic[LinearT]):
    """Weights of an indexer, whole on every rank, besides those of its keys."""

    query: LinearT
    weights: LinearT
    key_norm: tuple[Tensor, Tensor]
    """Weight and bias of the norm of keys, each [dim] float32."""
    dim: int
    most: int

    def queries(
        self, ops: GraphBuilder, h: Value, latent: Value, table: RotaryTable | None
    ) -> IndexQueries:
        """Queries and weights of hidden states h, and of the latent vectors of queries made of them."""
        queries = ops.share_rows(ops.linear(latent, self.query))
        if table is not None:
            queries = rotate_heads(ops, queries, table, elements=queries.width, head_dim=self.dim)
        return IndexQueries(queries, ops.share_rows(ops.linear(h, self.weights)))

    def keyed(self, ops: GraphBuilder, latents: Value, table: RotaryTable | None) -> Value:
        """Latents [n, dim + ...] whose first elements, keys for the indexer, are normed and rotated."""
        latents = layer_norm_heads(ops, latents, *self.key_norm, head_dim=self.dim, eps=NORM_EPS)
        if table is None:
            return latents
        return rotate_heads(ops, latents, table, elements=self.dim, head_dim=self.dim)


@dataclass(frozen=True)
class LatentAttention(Generic[LinearT]):
    """Weights of this rank's heads, absorbed: queries are brought to the latent vectors, which are the values.

    Keys and values of heads are never computed, of a prompt neither (Liu et al. 2024, part 2.1.2). So a result
    does not depend on how a sequence was cut into steps.
    """

    latent_norm: Tensor
    """[rank] float32."""
    query_down: LinearT | None
    query_norm: Tensor | None
    """[query_rank] float32."""
    query_nope: LinearT
    query_rope: LinearT
    key_up: HeadLinears[LinearT]
    """Maps the part of a head's query that is not rotated, [nope_dim], to [rank]."""
    value_up: HeadLinears[LinearT]
    """Maps what a head attended to, [rank], to [value_dim]."""
    scale: float
    temperature: TemperatureSpec | None
    """Scale of queries by their positions."""
    indexer: Indexer[LinearT] | None

    def record(
        self,
        ops: GraphBuilder,
        h: Value,
        latents: Value,
        metadata: Value,
        table: RotaryTable | None,
        caches: Sequence[Any],
    ) -> Value:
        """Inputs of the map back to hidden states, of hidden states h and the latents made of them."""
        cache = caches[0]
        if not isinstance(cache, LatentCache):
            raise TypeError(f"A layer with latent attention has a {type(cache).__name__}.")
        states, indexer = h, self.indexer
        if self.query_down is not None and self.query_norm is not None:
            h = ops.rms_norm(ops.linear(h, self.query_down), self.query_norm, NORM_EPS)
        latents = ops.share_rows(latents)
        if indexer is not None:
            latents = indexer.keyed(ops, latents, table)
        rotated = rotate_and_cache_latents(
            ops,
            ops.share_rows(ops.linear(h, self.query_rope)),
            latents,
            metadata,
            table,
            cache,
            self.latent_norm,
            NORM_EPS,
        )
        queries = ops.share_rows(head_linear(ops, ops.linear(h, self.query_nope), self.key_up))
        if self.temperature is not None:
            scales = position_scale(ops, ops.input("positions"), **vars(self.temperature))
            queries, rotated = (ops.scale_rows(it, scales) for it in (queries, rotated))
        if indexer is None:
            attended = latent_attention(ops, queries, rotated, metadata, cache, scale=self.scale)
        else:
            index = indexer.queries(ops, states, h, table)
            attended = indexed_latent_attention(
                ops, queries, rotated, index, metadata, cache, scale=self.scale, most=indexer.most
            )
        if h.own:
            attended = ops.own_rows(attended)
        return head_linear(ops, attended, self.value_up)


def load_latent_attention(
    loader: WeightLoader[LinearT], index: int, spec: LatentSpec
) -> LatentAttention[LinearT]:
    """Weights of a layer besides the map to what is kept of a token."""
    config = loader.shard.config
    names = config.names
    linears = spec.linears(names, index, config.hidden_size, config.num_heads)
    down, down_norm = linears.query_down, names.of_layer(index, names.query_down_norm)
    latent_norm = names.of_layer(index, names.latent_norm)
    return LatentAttention(
        loader.norm_weight(latent_norm, linears.value_up.inputs) * spec.latent_factor,
        None if down is None else loader.linear([down]),
        None if down is None else loader.norm_weight(down_norm, down.outputs) * spec.query_factor,
        loader.linear([linears.query_nope]),
        loader.linear([linears.query_rope]),
        _head_linears(loader, linears.key_up, is_transposed=not names.key_up),
        _head_linears(loader, linears.value_up, is_transposed=False),
        config.layers[index].attention.scale,
        config.layers[index].attention.temperature,
        _indexer(loader, index, spec, linears),
    )


def _indexer(
    loader: WeightLoader[LinearT], layer: int, spec: LatentSpec, linears: LatentLinears
) -> Indexer[LinearT] | None:
    index, query, weights = spec.index, linears.index_query, linears.index_weights
    if index is None or query is None or weights is None:
        return None
    names = loader.shard.config.names
    norm = names.of_layer(layer, names.index_norm)
    order = list(index.order(spec.rope_dim) or range(index.dim))
    weight, bias = (
        loader.vector(f"{norm}.{part}", index.dim)[order] for part in ("weight", "bias")
    )
    return Indexer(
        loader.linear([query]), loader.linear([weights]), (weight, bias), index.dim, index.most
    )


def _head_linears(
    loader: WeightLoader[LinearT], linear: LinearSpec, *, is_transposed: bool
) -> HeadLinears[LinearT]:
    """The maps of this rank's heads, of a weight [heads out, in], or [heads in, out]."""
    weight = loader.weight(linear)
    values = weight.values if isinstance(weight, DenseWeight) else dequantize(weight)
    heads = values.to(loader.dtype).view(len(loader.shard.heads), -1, values.shape[1])
    if is_transposed:
        heads = heads.transpose(1, 2)
    loader.on_loaded(heads.nbytes)
    return prepare_head_linears(loader.backend, heads.contiguous(), loader.dtype)
