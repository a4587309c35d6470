# SPDX-License-Identifier: Apache-2.0
"""Latent attention of a layer: its weights besides the map to what is kept, and the operations that it records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from torch import Tensor

from pagoda.backend.base import HeadLinears, LatentCache, LinearT
from pagoda.backend.graph import RotaryTable, Value
from pagoda.backend.latent_layers import head_linear, latent_attention, rotate_and_cache_latents
from pagoda.backend.operations import GraphBuilder
from pagoda.checkpoints.latent_attention import NORM_EPS


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

    def record(
        self,
        ops: GraphBuilder,
        h: Value,
        latents: Value,
        metadata: Value,
        table: RotaryTable | None,
        cache: LatentCache,
    ) -> Value:
        """Inputs of the map back to hidden states, of hidden states h and the latents made of them."""
        if self.query_down is not None and self.query_norm is not None:
            h = ops.rms_norm(ops.linear(h, self.query_down), self.query_norm, NORM_EPS)
        rotated = rotate_and_cache_latents(
            ops,
            ops.linear(h, self.query_rope),
            latents,
            metadata,
            table,
            cache,
            self.latent_norm,
            NORM_EPS,
        )
        queries = head_linear(ops, ops.linear(h, self.query_nope), self.key_up)
        attended = latent_attention(ops, queries, rotated, metadata, cache, scale=self.scale)
        return head_linear(ops, attended, self.value_up)
