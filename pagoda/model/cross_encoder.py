# SPDX-License-Identifier: Apache-2.0
"""The encoder of what a decoder hears or reads, which leaves keys and values in blocks (Vaswani et al. 2017).

A block has room for those of all that the encoder gives, and a sequence's first block holds them for each layer
that attends to them. So they live and die with the sequence's KV, and no scheduler knows of them.
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
from pagoda.messages.encoder_input import TOKEN_BYTES
from pagoda.model.embedding import embed
from pagoda.model.mlp import whole_mlp
from pagoda.model.recording import added, normed
from pagoda.model.sharding import Shard
from pagoda.telemetry.tracer import Tracer

if TYPE_CHECKING:
    from pagoda.model.caches import LayerCache
    from pagoda.model.loaded_layers import Layer
    from pagoda.model.loader import WeightLoader

ENCODED = -1
"""Number of the metadata of attention to what an encoder gives, beside those of KV groups."""
_ENCODED = "encoded"


def across(batch: TokenBatch, positions: int) -> TokenBatch:
    """The step as attention sees it that goes to all that an encoder gives, of so many positions at most: a
    sequence's tokens stand at the end of its positions."""
    lens = batch.encoded_lens
    if lens is None:
        lens = torch.full_like(batch.context_lens, positions)
    if bool((batch.query_lens > lens).any()):
        # More tokens than they see: each is a sequence of its own.
        ids = batch.sequence_ids
        return replace(
            batch,
            positions=lens[ids] - 1,
            sequence_ids=torch.arange(len(ids)),
            query_lens=torch.ones_like(ids),
            context_lens=lens[ids],
            block_tables=tuple(table[ids] for table in batch.block_tables),
            draft_lens=None,
        )
    moved = lens - batch.context_lens
    return replace(
        batch,
        positions=batch.positions + moved[batch.sequence_ids],
        context_lens=lens,
        draft_lens=None,
    )


class AudioFront:
    """Two convolutions, and learned positions, in front of an encoder's layers (Radford et al. 2022)."""

    def __init__(self, loader: WeightLoader[Any], spec: AudioSpec) -> None:
        hidden = spec.encoder.hidden_size
        self._spec, self._device = spec, loader.backend.device
        self._convolutions = [
            (
                loader.vector(f"{name}.weight", (hidden, channels, 3)),
                loader.vector(f"{name}.bias", hidden),
            )
            for name, channels in spec.convolutions
        ]
        table = f"{spec.encoder.names.positions}.weight"
        self._places = loader.vector(table, (spec.positions, hidden))

    @property
    def longest(self) -> bytes:
        return bytes(self._spec.feature_bytes)

    @property
    def taken_bytes(self) -> int:
        """Bytes of memory that convolutions take, besides the graph's."""
        return 4 * self._spec.encoder.hidden_size * 4 * self._spec.positions * 4

    def record(self, ops: GraphBuilder) -> Value:
        """Hidden states [positions, hidden] in front of the first layer."""
        return ops.input("hidden", self._spec.encoder.hidden_size)

    def inputs(self, values: bytes) -> dict[str, Tensor]:
        """Inputs of the graph, of features [mel_bins, frames] float32."""
        features = torch.frombuffer(bytearray(values), dtype=torch.float32)
        x = features.view(1, self._spec.mel_bins, self._spec.frames).to(self._device)
        for stride, (weight, bias) in enumerate(self._convolutions, start=1):
            x = F.gelu(F.conv1d(x, weight, bias, stride=stride, padding=1))
        return {"hidden": (x[0].t() + self._places).contiguous()}


class TextFront(Generic[LinearT]):
    """Embeddings of tokens and of positions in front of an encoder's layers."""

    taken_bytes = 0

    def __init__(
        self, loader: WeightLoader[LinearT], embedding: LinearT | None, multiplier: float
    ) -> None:
        """`loader` is that of the encoder; the table of tokens is the decoder's, if this stage has it."""
        self._shard = loader.shard
        self._embedding = embedding or loader.linear([loader.shard.config.embedding])
        self._tables, self._multiplier = loader.input_tables(), multiplier

    @property
    def longest(self) -> bytes:
        return bytes(TOKEN_BYTES * self._shard.config.max_position_embeddings)

    def record(self, ops: GraphBuilder) -> Value:
        """Hidden states [tokens, hidden] in front of the first layer."""
        given = self._embedding, self._tables, self._multiplier
        return embed(ops, self._shard, *given, embeds_spans=False)

    def inputs(self, values: bytes) -> dict[str, Tensor]:
        """Inputs of the graph, of ids [tokens] int32."""
        ids = torch.frombuffer(bytearray(values), dtype=torch.int32).long()
        return {"token_ids": ids, "positions": torch.arange(len(ids))}


class CrossEncoder(Generic[LinearT]):
    """One rank's part of an encoder, and of the maps to keys and values that a decoder attends to."""

    def __init__(
        self, loader: WeightLoader[LinearT], embedding: LinearT | None, multiplier: float
    ) -> None:
        """Loads the weights; `loader` is that of the shard of a decoder, whose `embedding`, if it has one, and the
        multiplier of that serve an encoder of texts as well."""
        shard, spec = loader.shard, loader.shard.config.cross_encoder
        if spec is None:
            raise TypeError("The model is a decoder alone.")
        encoder = spec.encoder
        own = loader.of_shard(
            Shard(encoder, range(encoder.num_layers), shard.tp_rank, shard.tp_size)
        )
        self._spec, self._shard, self._backend = spec, own.shard, loader.backend
        self._front: AudioFront | TextFront[LinearT] = (
            AudioFront(loader, spec)
            if isinstance(spec, AudioSpec)
            else TextFront(own, embedding, multiplier)
        )
        self._layers = [own.layer(index) for index in range(encoder.num_layers)]
        self._norm = own.norm(encoder.names.norm) if encoder.norms_output else None
        self._keys_values = {
            index: loader.linear(shard.config.plain_linears(index)[1:3], bias=attention.qkv_bias)
            for index in shard.layers
            if (attention := shard.config.layers[index].attention).crosses
        }
        self._group = 0

    @property
    def positions(self) -> int:
        """The most hidden states that the encoder gives."""
        return self._spec.positions

    def use_caches(self, caches: Mapping[int, LayerCache]) -> None:
        """Writes keys and values to these caches from now on, those of the decoder's layers by number."""
        held = {index: caches[index] for index in self._keys_values}
        first = next(iter(held.values()))
        if not isinstance(first.cache, KVCache):
            raise TypeError("The cache of plain attention holds keys and values.")
        self._group, self._cache = first.group, first.cache
        ops = GraphBuilder(self._backend.group)
        x = self._front.record(ops)
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

    def encode(self, batch: TokenBatch, tracer: Tracer) -> None:
        """Writes keys and values of what a step's sequences are about, one after the other: how many there are
        changes no bit."""
        began = tracer.e2e()
        for sequence, values in batch.to_encode:
            tables = tuple(table[sequence : sequence + 1] for table in batch.block_tables)
            step = self._step(values, tables)
            (encoded,) = self._compiled(step, [_ENCODED])
            known = StepInput({_ENCODED: encoded}, step.metadata)
            for index in self._keys_values:
                self._compiled(known, [f"layer_{index}"])
        if batch.to_encode:
            tracer.span("encode", began)

    def profile(self) -> int:
        """Bytes of memory that the longest input takes while it is encoded."""
        table = torch.zeros((1, 1), dtype=torch.int64)
        step = self._step(self._front.longest, (table,) * (self._group + 1))
        return self._compiled.profile(step, [_ENCODED]) + self._front.taken_bytes

    def _step(self, values: bytes, tables: tuple[Tensor, ...]) -> StepInput[Any]:
        """The step of one sequence's input."""
        inputs = self._front.inputs(values)
        count = len(next(iter(inputs.values())))
        places, lens = torch.arange(count), torch.tensor([count])
        batch = TokenBatch(places, places, torch.zeros_like(places), lens, lens, tables)
        heads = len(self._shard.heads)
        metadata = self._backend.attention_metadata(batch, heads, self._cache, self._group)
        return StepInput(inputs, {self._group: metadata})

    def _layer(self, ops: GraphBuilder, layer: Layer[LinearT], x: Value, cache: KVCache) -> Value:
        """x [positions, hidden] behind a layer; all of them write keys and values to the same cache."""
        encoder = self._spec.encoder
        eps, attention = encoder.norm.eps, layer.spec.attention
        qkv = ops.linear(normed(ops, x, layer.attention_norm, eps), layer.into)
        queries = self._written(ops, qkv, cache)
        metadata, scale = ops.metadata(self._group), attention.scale
        if layer.distances is not None:
            attended = layer.distances.record(ops, qkv, queries, metadata, cache, scale)
        else:
            sizes: dict[str, Any] = {"head_dim": encoder.head_dim, "scale": scale}
            attended = ops.attention(queries, metadata, cache, window=None, causal=False, **sizes)
        out = ops.all_reduce(ops.linear(attended, layer.back))
        x = added(ops, encoder, layer, x, out, layer.attention_post_norm)
        h = normed(ops, x, layer.mlp_norm, eps)
        out = whole_mlp(ops, self._shard, layer, None, h, None, x)
        return added(ops, encoder, layer, x, out, layer.mlp_post_norm)

    def _written(self, ops: GraphBuilder, qkv: Value, cache: KVCache) -> Value:
        """Queries of qkv, whose keys and values are written to the cache."""
        sizes = {"num_heads": len(self._shard.heads), "head_dim": self._spec.encoder.head_dim}
        metadata = ops.metadata(self._group)
        return ops.rotate_and_cache(qkv, metadata, None, cache, None, **sizes)
