# SPDX-License-Identifier: Apache-2.0
"""The encoder of what a decoder hears or reads, which leaves keys and values in blocks (Vaswani et al. 2017).

A block has room for those of all that the encoder gives, and a sequence's first block holds them for each layer
that attends to them. So they live and die with the sequence's KV, and no scheduler knows of them.
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
from pagoda.messages.encoder_input import TOKEN_BYTES
from pagoda.model.embedding import embed
from pagoda.model.mlp import whole_mlp
from pagoda.model.recording import added, normed
from pagoda.model.sharding import Shard

if TYPE_CHECKING:
    from pagoda.model.caches import LayerCache
    from pagoda.model.loaded_layers import Layer
    from pagoda.model.loader import WeightLoader

ENCODED = -1
"""Number of the metadata of attention to what an encoder gives, beside those of KV groups."""
_ENCODED = "encoded"


def crossing(layer: int) -> str:
    """Name of the result of a stage that are the queries of a layer which attends to what an encoder gives."""
    return f"crossing_{layer}"


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

    most_kept = 16
    """Audios of which is kept what the encoder gave: pieces of two that are transcribed at a time."""

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
    most_kept = 4
    """Texts of which is kept what the encoder gave. Each step of a beam search asks for all beams anew, whose few
    tokens fill no block of the prefix cache: so many searches at a time encode each text once."""

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
        self._tracer = loader.tracer
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
        self._kept = OrderedDict[bytes, Tensor]()
        """Last outputs of the encoder [positions, hidden], by the digest of the input."""

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
                ops.result(f"keys_{index}", keys)
        self._compiled: Compiled[Any] = self._backend.compile(ops.build())

    def encode(self, batch: TokenBatch) -> None:
        """Writes keys and values of what a step's sequences are about, one after the other: how many there are
        changes no bit. The encoder is spared what it was given lately, of which several things are asked."""
        began = self._tracer.e2e() if batch.to_encode else 0
        for sequence, given in batch.to_encode:
            tables = tuple(table[sequence : sequence + 1] for table in batch.block_tables)
            metadata = self._metadata(given.num_tokens or self.positions, tables)
            encoded = self._kept.pop(given.digest, None)
            if encoded is None:
                step = StepInput(self._front.inputs(given.values), metadata)
                (encoded,) = self._compiled(step, [_ENCODED])
            known = StepInput({_ENCODED: encoded}, metadata)
            for index in self._keys_values:
                self._compiled(known, [f"layer_{index}"])
            self._kept[given.digest] = encoded
            if len(self._kept) > self._front.most_kept:
                self._kept.popitem(last=False)
        if batch.to_encode:
            self._tracer.span("encode", began)

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
        """Bytes of memory that a step takes in which the longest input is encoded before the decoder takes so
        many, with those that are kept of the last inputs."""
        table = torch.zeros((1, 1), dtype=torch.int64)
        metadata = self._metadata(self.positions, (table,) * (self._group + 1))
        step = StepInput(self._front.inputs(self._front.longest), metadata)
        taken = self._compiled.profile(step, [_ENCODED]) + self._front.taken_bytes
        kept = self.positions * self._spec.encoder.hidden_size * torch.float32.itemsize
        return max(decoder_bytes, taken) + self._front.most_kept * kept

    def _metadata(self, count: int, tables: tuple[Tensor, ...]) -> dict[int, Any]:
        """Metadata of the step of one sequence's input of so many positions."""
        places, lens = torch.arange(count), torch.tensor([count])
        batch = TokenBatch(places, places, torch.zeros_like(places), lens, lens, tables)
        heads = len(self._shard.heads)
        metadata = self._backend.attention_metadata(batch, heads, self._cache, self._group)
        return {self._group: metadata}

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
