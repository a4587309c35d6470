# SPDX-License-Identifier: Apache-2.0
"""The encoder of what a decoder hears, which leaves keys and values in blocks (Radford et al. 2022).

A block has room for those of all that the encoder gives, and a sequence's first block holds them for each layer
that attends to audio. So they live and die with the sequence's KV, and no scheduler knows of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backend.base import Compiled, KVCache, LinearT, StepInput, TokenBatch
from pagoda.backend.family_operations import join_columns
from pagoda.backend.graph import Value
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.relative_attention import columns
from pagoda.checkpoints.audio import AudioSpec
from pagoda.model.mlp import whole_mlp
from pagoda.model.recording import normed
from pagoda.model.sharding import Shard

if TYPE_CHECKING:
    from pagoda.model.decoder import LayerCache
    from pagoda.model.loaded_layers import Layer
    from pagoda.model.loader import WeightLoader

HEARD = -1
"""Number of the metadata of attention to audio, beside those of KV groups."""
_ENCODED = "encoded"
_MOST_KEPT = 16
"""Audios of which is kept what the encoder gave: pieces of two that are transcribed at a time."""


def crossing(layer: int) -> str:
    """Name of the result of a stage that are the queries of a layer which attends to what is heard."""
    return f"crossing_{layer}"


def heard_by(batch: TokenBatch, positions: int) -> TokenBatch:
    """The step as attention sees it that goes to all of an audio: the tokens stand at the end of its positions."""
    moved = positions - batch.context_lens
    return replace(
        batch,
        positions=batch.positions + moved[batch.sequence_ids],
        context_lens=torch.full_like(batch.context_lens, positions),
        draft_lens=None,
    )


class AudioEncoder(Generic[LinearT]):
    """One rank's part of an encoder, and of the maps to keys and values that a decoder attends to."""

    def __init__(self, loader: WeightLoader[LinearT], spec: AudioSpec) -> None:
        """Loads the weights; `loader` is that of the decoder's shard."""
        shard = loader.shard
        encoder, hidden = spec.encoder, spec.encoder.hidden_size
        own = loader.of_shard(
            Shard(encoder, range(encoder.num_layers), shard.tp_rank, shard.tp_size)
        )
        self._spec, self._shard, self._backend = spec, own.shard, loader.backend
        self._tracer = loader.tracer
        self._convolutions = [
            (
                loader.vector(f"{name}.weight", (hidden, channels, 3)),
                loader.vector(f"{name}.bias", hidden),
            )
            for name, channels in spec.convolutions
        ]
        table = f"{encoder.names.positions}.weight"
        self._places = loader.vector(table, (spec.positions, hidden))
        self._layers = [own.layer(index) for index in range(encoder.num_layers)]
        self._norm = own.norm(encoder.names.norm)
        self._keys_values = {
            index: loader.linear(shard.config.plain_linears(index)[1:3], bias=True)
            for index in shard.layers
            if shard.config.layers[index].attention.crosses
        }
        self._group = 0
        self._kept = OrderedDict[bytes, Tensor]()
        """Encoded last audios [positions, hidden], by the digest of their features."""

    @property
    def positions(self) -> int:
        """Hidden states of an audio."""
        return self._spec.positions

    def use_caches(self, caches: Mapping[int, LayerCache]) -> None:
        """Writes keys and values to these caches from now on, those of the decoder's layers by number."""
        held = {index: caches[index] for index in self._keys_values}
        first = next(iter(held.values()))
        if not isinstance(first.cache, KVCache):
            raise TypeError("The cache of plain attention holds keys and values.")
        self._group, self._cache = first.group, first.cache
        ops = GraphBuilder(self._backend.group)
        x = ops.input("hidden", self._spec.encoder.hidden_size)
        for layer in self._layers:
            x = self._layer(ops, layer, x, first.cache)
        encoded = normed(ops, x, self._norm, self._spec.encoder.norm.eps)
        ops.result(_ENCODED, encoded)
        for index, weight in self._keys_values.items():
            cache = held[index].cache
            if isinstance(cache, KVCache):
                both = ops.linear(encoded, weight)
                # What is written has queries as well: keys stand for these.
                keys = columns(ops, both, 0, both.width // 2)
                written = self._written(ops, join_columns(ops, keys, both), cache)
                ops.result(f"layer_{index}", written)
                ops.result(f"keys_{index}", keys)
        self._compiled: Compiled[Any] = self._backend.compile(ops.build())

    def encode(self, batch: TokenBatch) -> None:
        """Writes keys and values of the audio of a step's sequences, one after the other: how many there are
        changes no bit. The encoder is spared audio that it was given lately, of which several things are asked."""
        began = self._tracer.e2e() if batch.audio else 0
        for heard in batch.audio:
            tables = tuple(
                table[heard.sequence : heard.sequence + 1] for table in batch.block_tables
            )
            encoded = self._kept.pop(heard.digest, None)
            metadata = self._metadata(tables)
            if encoded is None:
                step = StepInput({"hidden": self._convolved(heard.features)}, metadata)
                (encoded,) = self._compiled(step, [_ENCODED])
            known = StepInput({_ENCODED: encoded}, metadata)
            for index in self._keys_values:
                self._compiled(known, [f"layer_{index}"])
            self._kept[heard.digest] = encoded
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        if began:
            self._tracer.span("encode audio", began)

    def own_heads(self, heads: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """This rank's heads among `heads`, which name layers that attend to audio and heads of them: decoder's
        layers, and places among the rank's heads. Raises IndexError: there is no such layer."""
        layers, own = [*self._keys_values], self._shard.heads
        return [(layers[layer], head - own.start) for layer, head in heads if head in own]

    def keys(self, digest: bytes, heads: Sequence[tuple[int, int]]) -> Tensor:
        """Keys of `own_heads` [heads, positions, head_dim] of an audio that was encoded in this step.
        Raises KeyError: it was not."""
        size = self._spec.encoder.head_dim
        step: StepInput[Any] = StepInput({_ENCODED: self._kept[digest]})
        names = list(dict.fromkeys(f"keys_{layer}" for layer, _ in heads))
        found = dict(zip(names, self._compiled(step, names), strict=True)) if names else {}
        parts = [
            found[f"keys_{layer}"][:, size * head : size * (head + 1)] for layer, head in heads
        ]
        return torch.stack(parts) if parts else torch.zeros(0, self.positions, size)

    def queries(
        self, crossed: Mapping[int, Tensor], heads: Sequence[tuple[int, int]], count: int
    ) -> Tensor:
        """Scaled queries of `own_heads` [count, heads, head_dim], of those of whole layers [count, width]."""
        encoder = self._spec.encoder
        size, scale = encoder.head_dim, encoder.layers[0].attention.scale
        parts = [crossed[layer][:, size * head : size * (head + 1)] for layer, head in heads]
        return scale * torch.stack(parts, 1) if parts else torch.zeros(count, 0, size)

    def profile(self, decoder_bytes: int) -> int:
        """Bytes of memory that a step takes in which an audio is encoded before the decoder takes so many, with
        those that are kept of the last audios."""
        hidden = self._spec.encoder.hidden_size
        table = torch.zeros((1, 1), dtype=torch.int64)
        tables = (table,) * (self._group + 1)
        step = StepInput({"hidden": torch.zeros(self.positions, hidden)}, self._metadata(tables))
        encoded = hidden * self.positions * torch.float32.itemsize
        convolved = self._compiled.profile(step, [_ENCODED]) + 4 * 4 * encoded
        return max(decoder_bytes, convolved) + _MOST_KEPT * encoded

    def _metadata(self, tables: tuple[Tensor, ...]) -> dict[int, Any]:
        """Metadata of the step of one audio."""
        places = torch.arange(self.positions)
        lens = torch.tensor([self.positions])
        batch = TokenBatch(places, places, torch.zeros_like(places), lens, lens, tables)
        heads = len(self._shard.heads)
        return {
            self._group: self._backend.attention_metadata(batch, heads, self._cache, self._group)
        }

    def _convolved(self, features: Tensor) -> Tensor:
        """Hidden states [positions, hidden] in front of the first layer, of features [mel_bins * frames]."""
        x = features.view(1, self._spec.mel_bins, self._spec.frames).to(self._backend.device)
        for stride, (weight, bias) in enumerate(self._convolutions, start=1):
            x = F.gelu(F.conv1d(x, weight, bias, stride=stride, padding=1))
        return (x[0].t() + self._places).contiguous()

    def _layer(self, ops: GraphBuilder, layer: Layer[LinearT], x: Value, cache: KVCache) -> Value:
        """x [positions, hidden] behind a layer; all of them write keys and values to the same cache."""
        encoder = self._spec.encoder
        eps, attention = encoder.norm.eps, layer.spec.attention
        qkv = ops.linear(normed(ops, x, layer.attention_norm, eps), layer.qkv)
        queries = self._written(ops, qkv, cache)
        attended = ops.attention(
            queries,
            ops.metadata(self._group),
            cache,
            head_dim=encoder.head_dim,
            scale=attention.scale,
            window=None,
            causal=False,
        )
        x = ops.add(x, ops.all_reduce(ops.linear(attended, layer.attention_out)))
        h = normed(ops, x, layer.mlp_norm, eps)
        return ops.add(x, whole_mlp(ops, self._shard, layer, None, h, None, x))

    def _written(self, ops: GraphBuilder, qkv: Value, cache: KVCache) -> Value:
        """Queries of qkv, whose keys and values are written to the cache."""
        sizes = {"num_heads": len(self._shard.heads), "head_dim": self._spec.encoder.head_dim}
        metadata = ops.metadata(self._group)
        return ops.rotate_and_cache(qkv, metadata, None, cache, None, **sizes)
