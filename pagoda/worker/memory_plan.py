# SPDX-License-Identifier: Apache-2.0
"""The plan of a worker's memory: what it will load, and the bytes that this takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from pagoda.backend.base import Backend, KVCache, LatentCache
from pagoda.checkpoints.adapters import AdapterFiles
from pagoda.checkpoints.weight_formats import Quantization
from pagoda.messages.kv_formats import KV_FORMATS
from pagoda.messages.kv_groups import KVGroup, KVKind
from pagoda.messages.worker import most_sampled
from pagoda.messages.worker_config import WorkerConfig
from pagoda.model.adapters import adapter_bytes
from pagoda.model.caches import LayerCache
from pagoda.model.sharding import Shard
from pagoda.worker.drafting.drafter import MOST_BEHIND
from pagoda.worker.input_batch import input_batch_bytes
from pagoda.worker.kv.staging import part_room
from pagoda.worker.memory import sampling_bytes
from pagoda.worker.number_formats import torch_dtype


class LayerPlace(NamedTuple):
    """The KV of a layer: that of its group, in the blocks of the group."""

    group: int
    place: int
    """Number of the layer in the group; layers of several groups with one place share its tensors."""


@dataclass(frozen=True)
class WorkerMemoryPlan:
    """Plan of what a worker will load, made before it takes any memory."""

    config: WorkerConfig
    shard: Shard
    quantization: Quantization | None
    dtype_name: str
    kv_dtype_name: str
    kv_groups: tuple[KVGroup, ...]
    max_model_len: int
    backend: Backend[Any, Any]
    """Backend that the model will be loaded with, once."""
    backend_summary: str
    """Line about the backend for the operator."""
    available_bytes: int
    """Memory that this worker might take before it took any."""
    taken_bytes: int
    """Memory that its process had taken by then."""
    num_blocks: int = 0
    """Blocks of the largest KV cache that would fit into memory, if all takes what is planned."""
    adapters: tuple[AdapterFiles, ...] = ()
    drafter: WorkerMemoryPlan | None = None
    """Plan of a drafter's weights, steps, and KV in each block; counted here too."""

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self.dtype_name)

    @property
    def kv_dtype(self) -> torch.dtype:
        return torch_dtype(self.kv_dtype_name)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model's weights, and of adapters and a drafter that are loaded with it."""
        own = self.shard.weight_bytes(self.quantization, self.dtype.itemsize)
        own += sum(adapter_bytes(files, self.shard, self.dtype) for files in self.adapters)
        return own if self.drafter is None else own + self.drafter.weight_bytes

    @property
    def step_tokens(self) -> int:
        """Tokens of the largest step."""
        config, most = self.config, self.backend.capabilities.max_batch_tokens
        tokens = min(config.max_num_batched_tokens, config.max_num_seqs * self.max_model_len)
        if self.computes_whole_prompts:
            tokens = max(tokens, self.max_model_len)
        if (beside := self.shard.config.cross_encoder) is not None:
            tokens = max(tokens, beside.positions)
        return min(tokens, most)

    @property
    def streamed_groups(self) -> dict[int, int]:
        """Tokens of a block of each KV group whose cold segments may be streamed; empty where none can be.

        Drafters have parts of blocks, which nobody streams, ranks with pools of their own know no tiers, and an
        indexer may choose any token. Tensors of a block follow one another outside of the cache, and their numbers
        have to be aligned there.
        """
        config, kinds = self.config, (KVKind.FULL, KVKind.LATENT)
        numbers = self.block_size * self.shard.kv_vectors[1]
        groups = enumerate(self.kv_groups)
        found = {i: group.block_size for i, group in groups if group.kind in kinds}
        if (
            not self.backend.capabilities.streams_segments
            or self.drafter is not None
            or self.shard.config.cross_encoder is not None
            or config.parallel.num_pools > 1
            or (self.shard.config.latent is not None and self.shard.config.latent.index is not None)
            or not (config.kv_host_bytes or config.kv_tiers)
            or any(config.segment_tokens % size for size in found.values())
            or numbers * KV_FORMATS[self.kv_dtype_name].element_bytes % torch.float32.itemsize
        ):
            return {}
        return found

    @property
    def streaming_bytes(self) -> int:
        """Bytes that streaming takes: two staged segments of tiers, and what tokens have found in segments."""
        groups, config = self.streamed_groups, self.config
        if not groups:
            return 0
        shape = self.shard.config
        values = shape.head_dim if shape.latent is None else shape.latent.rank
        found = self.step_tokens * len(self.shard.heads) * (values + 2) * torch.float32.itemsize
        if not config.kv_tiers:
            return found
        room = part_room(self.block_size * self._layer_bytes)
        return found + 2 * (config.segment_tokens // min(groups.values())) * room

    @property
    def step_bytes(self) -> int:
        """Bytes of the activations of the largest step, about: in each layer all outputs, of all rows twice on the
        last stage, which selects them. What streaming takes counts too."""
        rows = self.step_tokens * (1 + self.shard.is_last)
        numbers = rows * self.shard.activation_width()
        if self.shard.is_first and self.backend.capabilities.embeds_spans:
            # Embeddings that are given, and their sum with those of tokens.
            numbers += 2 * self.step_tokens * self.shard.config.hidden_size
        own = numbers * torch.float32.itemsize + self.kept_hidden_bytes + self.streaming_bytes
        return own if self.drafter is None else own + self.drafter.step_bytes

    @property
    def kept_hidden_bytes(self) -> int:
        """Bytes of the model's hidden states for a head: of a step, and of tokens that it has not computed yet."""
        if self.shard.config.draft_head is None:
            return 0
        rows = self.step_tokens + self.config.max_num_seqs * MOST_BEHIND
        return rows * self.shard.config.hidden_size * torch.float32.itemsize

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """Layers whose inputs a drafter takes."""
        draft = None if self.drafter is None else self.drafter.shard.config.draft_head
        return () if draft is None else draft.fused_layers

    @property
    def computes_whole_prompts(self) -> bool:
        """True of encoders, in which nothing goes on from step to step."""
        return any(group.kind is KVKind.STEP for group in self.kv_groups)

    def total_bytes(self, weight_bytes: int, step_bytes: int, num_blocks: int) -> int:
        """Bytes that the worker takes in all, with so many for its weights and its largest step."""
        config = self.config
        batch = input_batch_bytes(config.max_num_seqs, self.max_model_len, self.block_sizes)
        kv = num_blocks * self.bytes_per_block + config.kv_host_bytes
        return weight_bytes + step_bytes + self.sampling_bytes + batch + kv

    @property
    def block_sizes(self) -> list[int]:
        """Tokens of a block of each KV group."""
        return [group.block_size for group in self.kv_groups]

    @property
    def segment_tokens(self) -> int:
        """Tokens of a segment of KV that steps can read below the device; 0 if they cannot."""
        may_stream = self.streamed_groups and self.config.kv_handoff is None
        return self.config.segment_tokens if may_stream else 0

    @property
    def block_size(self) -> int:
        """Tokens of a block, in the group where they are fewest."""
        return min(group.block_size for group in self.kv_groups)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that a token takes in all layers of the shard that see it."""
        layers = (self.shard.config.layers[layer] for layer in self.shard.layers)
        kept = (it.state is None and it.keeps for it in layers)
        return sum(kept) * self._layer_bytes

    @property
    def layer_places(self) -> list[LayerPlace]:
        """Place of each of the shard's layers; that of any other one for a layer that keeps nothing."""
        found: dict[int, LayerPlace] = {}
        for number, group in enumerate(self.kv_groups):
            held = [layer for layer in group.layers if layer in self.shard.layers]
            passing = group.kind is KVKind.STEP  # each layer writes what it reads
            places = [0] * len(held) if passing else range(len(held))
            found |= {layer: LayerPlace(number, at) for at, layer in zip(places, held, strict=True)}
        read = {
            layer: self.shard.config.layers[layer].attention.kv_layer for layer in self.shard.layers
        }
        some = next(iter(found.values()))
        return [found.get(layer if other is None else other, some) for layer, other in read.items()]

    def layer_caches(self, caches: Sequence[KVCache | LatentCache]) -> list[LayerCache]:
        """The cache of each of the shard's layers, from those of all places."""
        return [
            LayerCache(group, caches[place], self.kv_groups[group].block_size)
            for group, place in self.layer_places
        ]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block of the pool: that of the group with the most layers on this stage."""
        own = max(map(self._bytes_in_block, self.kv_groups))
        return own if self.drafter is None else own + self.drafter.bytes_per_block

    @property
    def num_places(self) -> int:
        """Caches of the model's layers: layers of several groups share them."""
        return 1 + max(place for _, place in self.layer_places)

    def _bytes_in_block(self, group: KVGroup) -> int:
        held = len(set(group.layers).intersection(self.shard.layers))
        if group.kind is KVKind.STEP:
            held = min(held, 1)
        return held * self.block_size * self._layer_bytes

    @property
    def _layer_bytes(self) -> int:
        """Bytes that one layer keeps of a token."""
        vectors, numbers = self.shard.kv_vectors
        return vectors * KV_FORMATS[self.kv_dtype_name].vector_bytes(numbers)

    @property
    def sampling_bytes(self) -> int:
        """Bytes that sampling takes at most, on each rank of the last stage: all of them gather logits."""
        if not (self.shard.is_last and self.shard.config.gives_logits):
            return 0
        vocab_size, ranks = self.shard.config.vocab_size, self.config.parallel.tensor_parallel_size
        rows = most_sampled(self.config.max_num_seqs)
        return sampling_bytes(rows, vocab_size, ranks, torch.get_num_threads())
