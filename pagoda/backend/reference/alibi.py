# SPDX-License-Identifier: Apache-2.0
"""Attention with linear biases (ALiBi, Press et al. 2021), in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from pagoda.backend.base import KVCache
from pagoda.backend.reference.attention import AttentionMetadata, attention
from pagoda.backend.reference.context import context_attention
from pagoda.parallel.collectives import Collectives


def alibi_attention(
    queries: Tensor,
    metadata: AttentionMetadata,
    cache: KVCache,
    slopes: Tensor,
    ranks: Collectives | None = None,
    *,
    head_dim: int,
    scale: float,
) -> Tensor:
    options: dict[str, Any] = {
        **{"head_dim": head_dim, "scale": scale, "slopes": slopes, "causal": True},
        **dict.fromkeys(("window", "softcap", "chunk")),
    }
    if ranks is None:
        return attention(queries, metadata, cache, **options)
    return context_attention(queries, metadata, cache, ranks, **options)


OPERATIONS: Mapping[str, Callable[..., Any]] = {"alibi_attention": alibi_attention}
"""Operations by name."""
