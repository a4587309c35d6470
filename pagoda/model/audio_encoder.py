# SPDX-License-Identifier: Apache-2.0
"""The encoder of what a decoder hears, which leaves keys and values in blocks (Radford et al. 2022).

A block has room for those of all that the encoder gives, and a sequence's first block holds them for each layer
that attends to audio. So they live and die with the sequence's KV, and no scheduler knows of them.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    from pagoda.model.caches import LayerCache
    from pagoda.model.loaded_layers import Layer
    from pagoda.model.loader import WeightLoader

HEARD = -1
"""Number of the metadata of attention to audio, beside those of KV groups."""
_ENCODED = "encoded"


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
        self._compiled: Compiled[Any] = self._backend.compile(ops.build())

    def encode(self, batch: TokenBatch) -> None:
        """Writes keys and values of the audio of a step's sequences, one after the other: how many there are
        changes no bit."""
        for sequence, features in batch.audio:
            tables = tuple(table[sequence : sequence + 1] for table in batch.block_tables)
            step = self._step(self._convolved(features), tables)
            (encoded,) = self._compiled(step, [_ENCODED])
            known = StepInput({_ENCODED: encoded}, step.metadata)
            for index in self._keys_values:
                self._compiled(known, [f"layer_{index}"])

    def profile(self) -> int:
        """Bytes of memory that an audio takes while it is encoded."""
        hidden = self._spec.encoder.hidden_size
        table = torch.zeros((1, 1), dtype=torch.int64)
        step = self._step(torch.zeros(self.positions, hidden), (table,) * (self._group + 1))
        convolved = 4 * hidden * 4 * self.positions * torch.float32.itemsize
        return self._compiled.profile(step, [_ENCODED]) + convolved

    def _step(self, x: Tensor, tables: tuple[Tensor, ...]) -> StepInput[Any]:
        """The step of one audio, whose hidden states [positions, hidden] go into the first layer."""
        places = torch.arange(self.positions)
        lens = torch.tensor([self.positions])
        batch = TokenBatch(places, places, torch.zeros_like(places), lens, lens, tables)
        heads = len(self._shard.heads)
        metadata = self._backend.attention_metadata(batch, heads, self._cache, self._group)
        return StepInput({"hidden": x}, {self._group: metadata})

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
        qkv = ops.linear(normed(ops, x, layer.attention_norm, eps), layer.into)
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
        x = ops.add(x, ops.all_reduce(ops.linear(attended, layer.back)))
        h = normed(ops, x, layer.mlp_norm, eps)
        return ops.add(x, whole_mlp(ops, self._shard, layer, None, h, None, x))

    def _written(self, ops: GraphBuilder, qkv: Value, cache: KVCache) -> Value:
        """Queries of qkv, whose keys and values are written to the cache."""
        sizes = {"num_heads": len(self._shard.heads), "head_dim": self._spec.encoder.head_dim}
        metadata = ops.metadata(self._group)
        return ops.rotate_and_cache(qkv, metadata, None, cache, None, **sizes)
