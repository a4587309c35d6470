# SPDX-License-Identifier: Apache-2.0
"""Parts that backends of a host's processor share."""

from __future__ import annotations

import os
from abc import abstractmethod

import torch
from torch import Tensor

from pagoda.backend.base import (
    Backend,
    KVCache,
    LatentCache,
    LinearT,
    MetadataT,
    NewTensor,
    new_tensor,
)
from pagoda.ipc.heap import trim_heap
from pagoda.ipc.machine import available_memory_bytes, process_memory_bytes
from pagoda.messages.kv_formats import KV_FORMATS, format_of
from pagoda.messages.worker import Capabilities
from pagoda.parallel.collectives import Alone, Collectives, HostGroup


class HostMemory:
    """Memory of the host, of which containers may have a part."""

    on_host = True

    def free_bytes(self) -> int:
        return available_memory_bytes()

    def taken_bytes(self) -> int:
        """Resident bytes of this process, without gaps in its heap, which it gives back first."""
        trim_heap()
        return process_memory_bytes(os.getpid()) or 0


class HostBackend(Backend[LinearT, MetadataT]):
    """One rank of a group on the CPU; without a group it computes alone."""

    def __init__(self, arithmetic: str, group: Collectives | None) -> None:
        self.arithmetic = arithmetic
        self.device = torch.device("cpu")
        self.memory = HostMemory()
        self.group: Collectives = group or Alone()
        self.capabilities = Capabilities(
            # States of some models are as large as K and V of a thousand tokens.
            block_sizes=(16, 1, 2, 4, 8, 32, 64, *range(128, 4097, 128)),
            max_batch_tokens=65536,
            max_batch_seqs=4096,
            max_model_len=2**20,
            window_multiple=64,
            embeds_spans=True,
            cross_attends=True,
            streams_segments=True,
            weight_formats=("float32", "bfloat16", "float16", "int8", "int4", "fp8"),
            kv_cache_dtypes=tuple(KV_FORMATS),
        )

    def join(self, group: HostGroup) -> None:
        self.group = group

    def allocate_kv_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        new: NewTensor = new_tensor,
    ) -> KVCache:
        # Left unwritten: memory is taken from the machine as blocks come into use.
        kv_dtype, blocks = kv_dtype or dtype, (num_blocks, num_kv_heads)
        shapes = self.block_shapes(block_size, head_dim, dtype, kv_dtype)
        keys, values = (new((*blocks, *shape), kv_dtype) for shape in shapes)
        self.advise(keys, values)
        if not format_of(kv_dtype).has_scales:
            return KVCache(keys, values)
        return KVCache(keys, values, *(new((*blocks, block_size), torch.float32) for _ in range(2)))

    def allocate_latent_cache(
        self,
        num_blocks: int,
        block_size: int,
        rank: int,
        rope_dim: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        new: NewTensor = new_tensor,
        index_dim: int = 0,
    ) -> LatentCache:
        kv_dtype, blocks = kv_dtype or dtype, (num_blocks, 1)
        width = rank + rope_dim + index_dim
        _, shape = self.block_shapes(block_size, width, dtype, kv_dtype, _LATENT_SIZES)
        latents, scales = new((*blocks, *shape), kv_dtype), None
        self.advise(latents)
        if format_of(kv_dtype).has_scales:
            scales = new((*blocks, block_size), torch.float32)
        return LatentCache(latents, rank, rope_dim, scales, index_dim)

    @abstractmethod
    def block_shapes(
        self,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        what: str = "head sizes",
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of one head's keys and values in a block; latents lie as values do. Errors name `what`."""

    def advise(self, *cached: Tensor) -> None:
        """Tells the machine how the memory of K and V will be used; by default nothing."""


_LATENT_SIZES = "sums of kv_lora_rank, qk_rope_head_dim and index_head_dim"
"""Name, in errors, of the numbers that latent attention keeps of a token."""
LEAST_OWN_ROWS = 16
"""Rows of a context-parallel rank from which on it is worth sharing them out."""


def own_rows(num_rows: int, rank: int, size: int) -> range:
    """The rows of a step that a context-parallel rank computes: all of few, else its part, which no rank lacks."""
    if num_rows < size * max(size, LEAST_OWN_ROWS):
        return range(num_rows)
    most = -(-num_rows // size)
    return range(num_rows)[rank * most : (rank + 1) * most]


def rotary_table(positions: Tensor, frequencies: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions [n] times frequencies [d/2], times `scale`: two of [n, d/2] float32."""
    angles = torch.outer(positions.float(), frequencies)
    if scale == 1:
        return angles.cos(), angles.sin_()
    return angles.cos().mul_(scale), angles.sin_().mul_(scale)


def position_scale(positions: Tensor, *, period: float, factor: float, offset: float) -> Tensor:
    """Factors [n, 1] float32 of positions [n]; see `GraphBuilder.position_scale`."""
    periods = torch.floor((positions.float() + offset) / period)
    return (torch.log(periods + 1) * factor + 1)[:, None]


def check_token_ids(token_ids: Tensor, vocab_size: int) -> None:
    """Raises IndexError if an id is not from 0 to `vocab_size - 1`."""
    if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
        raise IndexError(f"A token id is not from 0 to {vocab_size - 1}.")
