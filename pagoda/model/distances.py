# SPDX-License-Identifier: Apache-2.0
"""Scores that depend on distances of tokens: weights of a layer, and what it records."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backend.base import HeadLinears, KVCache, LinearT
from pagoda.backend.graph import Value
from pagoda.backend.latent_layers import head_linear, prepare_head_linears
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.relative_attention import (
    columns,
    disentangled_attention,
    relative_attention,
)
from pagoda.backend.weights import DenseWeight, dequantize
from pagoda.checkpoints.distances import (
    Disentangled,
    DistanceBuckets,
    distance_linears,
    distance_table,
    distance_tensors,
)
from pagoda.checkpoints.linears import LinearSpec

if TYPE_CHECKING:
    from pagoda.model.loader import WeightLoader


@dataclass(frozen=True)
class Distances:
    numbers: Tensor
    """[heads, 2 longest - 1] float32."""
    causal: bool

    def record(
        self,
        ops: GraphBuilder,
        qkv: Value,  # noqa: ARG002 - keys count by their distance alone
        queries: Value,
        metadata: Value,
        cache: KVCache,
        scale: float,
    ) -> Value:
        """Values of what queries [n, heads d] attended to."""
        return relative_attention(
            ops,
            queries,
            metadata,
            cache,
            self.numbers,
            head_dim=queries.width // len(self.numbers),
            scale=scale,
            causal=self.causal,
        )


@dataclass(frozen=True)
class DisentangledMaps(Generic[LinearT]):
    keys: HeadLinears[LinearT]
    """Keys of places: a head's query times these are its numbers of each bucket."""
    queries: HeadLinears[LinearT]
    """Queries of places, for keys."""
    buckets: tuple[int, ...]

    def record(
        self,
        ops: GraphBuilder,
        qkv: Value,
        queries: Value,
        metadata: Value,
        cache: KVCache,
        scale: float,
    ) -> Value:
        """Values of what queries [n, heads d] attended to; keys are those of qkv [n, 3 heads d]."""
        keys = columns(ops, qkv, queries.width, queries.width)
        return disentangled_attention(
            ops,
            queries,
            metadata,
            head_linear(ops, queries, self.keys),
            head_linear(ops, keys, self.queries),
            cache,
            self.buckets,
            head_dim=queries.width // len(self.keys.heads),
            scale=scale,
        )


def load_distances(
    loader: WeightLoader[LinearT], index: int, spec: DistanceBuckets | Disentangled | None
) -> Distances | DisentangledMaps[LinearT] | None:
    """Weights of what distances add to the scores of a layer, for this rank's heads."""
    if spec is None:
        return None
    config, heads = loader.shard.config, loader.shard.heads
    longest = config.max_position_embeddings
    behind = torch.arange(1 - longest, longest)
    if isinstance(spec, DistanceBuckets):
        name, shape = distance_table(config.names, index), (spec.count, config.num_heads)
        table = _table(loader, name, shape)[:, heads.start : heads.stop]
        causal = config.layers[index].attention.causal
        numbers = table[_growing_buckets(behind, spec, causal=causal)].t().contiguous()
        return Distances(numbers.to(loader.backend.device), causal)
    query, key = distance_linears(config, index)
    places = _places(loader, spec)
    buckets = _buckets(behind, spec)
    return DisentangledMaps(
        _of_heads(loader, key, places), _of_heads(loader, query, places), tuple(buckets.tolist())
    )


def _growing_buckets(behind: Tensor, spec: DistanceBuckets, *, causal: bool) -> Tensor:
    """Buckets of keys so many tokens behind a query, in float32 as transformers computes them."""
    half = spec.count if causal else spec.count // 2
    exact, place = half // 2, behind.clamp(max=0).abs() if causal else behind.abs()
    grown = torch.log(place.clamp(min=1).float() / exact) / math.log(spec.farthest / exact)
    bucket = exact + (grown * (half - exact)).long()
    bucket = torch.where(place < exact, place, bucket.clamp(max=half - 1))
    return bucket if causal else bucket + half * (behind > 0)


def _buckets(behind: Tensor, spec: Disentangled) -> Tensor:
    """Rows of the table for keys so many tokens behind a query, in float32 as transformers computes them."""
    before = -behind
    if spec.farthest is not None:
        middle = spec.span // 2
        place = before.abs().clamp(min=middle)
        growth = torch.log(torch.tensor((spec.farthest - 1) / middle))
        grown = torch.ceil(torch.log(place / middle) / growth * (middle - 1)) + middle
        far = (grown * before.sign()).long()
        before = torch.where(before.abs() <= middle, before, far)
    return (before + spec.span).clamp(0, 2 * spec.span - 1)


def _table(loader: WeightLoader[LinearT], name: str, shape: tuple[int, ...]) -> Tensor:
    out = torch.empty(shape)
    loader.source.read_into(name, out)
    return out


def _places(loader: WeightLoader[LinearT], spec: Disentangled) -> Tensor:
    """Rows of the table of distances [2 span, hidden] float32, normed if they are."""
    config, names = loader.shard.config, loader.shard.config.names
    (name, shape), *_ = distance_tensors(config)
    table = _table(loader, name, shape)
    if not spec.norms_table:
        return table
    size = config.hidden_size
    weight, bias = (
        loader.vector(f"{names.distance_norm}.{end}", size) for end in ("weight", "bias")
    )
    return F.layer_norm(table, [size], weight.cpu(), bias.cpu(), config.norm.eps)


def _of_heads(
    loader: WeightLoader[LinearT], linear: LinearSpec, places: Tensor
) -> HeadLinears[LinearT]:
    """Maps of this rank's heads by places [2 span, hidden], behind a layer's map."""
    weight = loader.weight(linear)
    values = weight.values if isinstance(weight, DenseWeight) else dequantize(weight)
    mapped = F.linear(places, values.float().cpu(), loader.bias(linear).float().cpu())
    heads = mapped.view(len(places), len(loader.shard.heads), -1).transpose(0, 1)
    loader.on_loaded(heads.nbytes)
    return prepare_head_linears(loader.backend, heads.contiguous().to(loader.dtype), loader.dtype)
