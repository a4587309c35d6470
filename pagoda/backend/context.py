# SPDX-License-Identifier: Apache-2.0
"""Attention over contexts whose segments lie on several ranks (context parallelism, Liu et al. 2023).

All ranks have the queries of all tokens of a step. Each attends with them to the segments that it holds, and ranks
exchange what they found, round by round: one segment of each rank and sequence, which follow each other. They are
merged in the order of segments, so that no bit depends on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass

from pagoda.backend.base import KVCache
from pagoda.backend.graph import Value
from pagoda.backend.operations import GraphBuilder
from pagoda.parallel.collectives import ALONE, Collectives


@dataclass(frozen=True)
class ContextRanks:
    """The ranks over which contexts are spread; of each sequence their segments take turns."""

    group: Collectives

    def attention(
        self,
        ops: GraphBuilder,
        queries: Value,
        metadata: Value,
        cache: KVCache,
        *,
        head_dim: int,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Sized | None,
        chunk: int | None,
        causal: bool,
    ) -> Value:
        """`GraphBuilder.attention` over contexts of all ranks; block tables have -1 - *r* for blocks of rank *r*.

        Raises ValueError: attention is not causal, and contexts are spread."""
        if self.group.size == 1:
            return ops.attention(
                queries,
                metadata,
                cache,
                head_dim=head_dim,
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
                chunk=chunk,
                causal=causal,
            )
        if not causal:
            raise ValueError("Contexts of causal attention alone lie on several ranks.")
        return ops.record(
            "context_attention",
            [queries, metadata],
            [cache, self.group] if sinks is None else [cache, self.group, sinks],
            {
                "head_dim": head_dim,
                "scale": scale,
                "window": window,
                "softcap": softcap,
                "chunk": chunk,
            },
            queries.width,
        )


NOT_SPREAD = ContextRanks(ALONE.context)
"""This rank has all of every context."""
