# SPDX-License-Identifier: Apache-2.0
"""Memory for what a rank's layers with attention keep of sequences."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from pagoda.backend.base import Backend, KVCache, LatentCache, NewTensor, new_tensor
from pagoda.model.sharding import Shard


class LayerCache(NamedTuple):
    """The KV cache of a layer, of which it uses the blocks in the table of its KV group."""

    group: int
    cache: KVCache | LatentCache
    block_size: int = 0
    """Tokens of a block, of layers with a state."""


def allocate_cache(
    backend: Backend[Any, Any],
    shard: Shard,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    new: NewTensor = new_tensor,
) -> KVCache | LatentCache:
    """The cache of one of the shard's layers; dtypes are as for `Backend.allocate_kv_cache`."""
    latent = shard.config.latent
    if latent is None:
        heads, head_dim = shard.num_kv_heads, shard.config.head_dim
        return backend.allocate_kv_cache(
            num_blocks, block_size, heads, head_dim, dtype, kv_dtype, new
        )
    sizes = latent.rank, latent.rope_dim
    return backend.allocate_latent_cache(
        num_blocks, block_size, *sizes, dtype, kv_dtype, new, latent.index_dim
    )
