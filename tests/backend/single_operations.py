# SPDX-License-Identifier: Apache-2.0
"""Operations of a backend, each computed as a graph of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagoda.backend.base import Experts, HeadNorms, KVCache, StepInput
from pagoda.backend.graph import Graph, Value
from pagoda.backend.interpreter import InterpretedGraph
from pagoda.backend.low_rank import LowRankMaps
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.single import compute, compute_node


def one_by_one(backend: Any, graph: Graph, step: StepInput[Any], result: str = "out") -> Tensor:
    """A result of a graph, each of whose nodes the backend computes as a graph of its own."""
    interpreted: InterpretedGraph[Any] = InterpretedGraph(
        graph, lambda node, inputs: compute_node(backend, graph, node, inputs), {}
    )
    (out,) = interpreted(step, [result])
    return out


class SingleOperations:
    """A backend with a method for each operation; all else is the backend's."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def rows(self, op: str, *inputs: Tensor, **options: Any) -> Any:
        """An operation on rows [n, d] of a few inputs."""
        tensors = {f"x{place}": each for place, each in enumerate(inputs)}

        def record(ops: GraphBuilder, **values: Value) -> Any:
            return getattr(ops, op)(*values.values(), **options)

        return compute(self.backend, record, tensors)

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        return self.rows("linear", x, weight=weight)  # type: ignore[no-any-return]

    def linear_argmax(self, x: Tensor, weight: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Index, value and flag of each row."""
        found = self.rows("linear_argmax", x, weight=weight)
        return found[:, 0], found[:, 1].int().view(torch.float32), found[:, 2].bool()

    def embedding(
        self, token_ids: Tensor, weight: Any, first_id: int = 0, vocab_size: int | None = None
    ) -> Tensor:
        def record(ops: GraphBuilder, token_ids: Value) -> Value:
            return ops.embedding(token_ids, weight, first_id, vocab_size)

        out: Tensor = compute(self.backend, record, {"token_ids": token_ids})
        return out

    def add_low_rank(self, out: Tensor, x: Tensor, maps: LowRankMaps, adapters: Tensor) -> Tensor:
        def record(ops: GraphBuilder, **values: Value) -> Value:
            return ops.add_low_rank(**values, maps=maps)

        tensors = {"out": out, "x": x, "adapters": adapters}
        # `out` may be used up.
        added: Tensor = compute(self.backend, record, tensors | {"out": out.clone()})
        return added

    def gated_linear(
        self,
        x: Tensor,
        weight: Any,
        maps: LowRankMaps | None = None,
        adapters: Tensor | None = None,
    ) -> Tensor:
        """What a MLP begins with; kernels may compute it as one."""

        def record(ops: GraphBuilder, x: Value, adapters: Value | None = None) -> Value:
            both = ops.linear(x, weight)
            if maps is not None and adapters is not None:
                both = ops.add_low_rank(both, x, adapters, maps)
            return ops.silu_and_mul(both)

        tensors = {"x": x} if adapters is None else {"x": x, "adapters": adapters}
        gated: Tensor = compute(self.backend, record, tensors)
        return gated

    def experts(self, x: Tensor, logits: Tensor, experts: Experts[Any]) -> Tensor:
        return self.rows("experts", x, logits, experts=experts)  # type: ignore[no-any-return]

    def add(self, x: Tensor, delta: Tensor) -> Tensor:
        return self.rows("add", x, delta)  # type: ignore[no-any-return]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.rows("rms_norm", x, weight=weight, eps=eps)  # type: ignore[no-any-return]

    def add_rms_norm(
        self, x: Tensor, delta: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """A sum and its norm, which kernels compute as one."""

        def record(ops: GraphBuilder, x: Value, delta: Value) -> list[Value]:
            total = ops.add(x, delta)
            return [total, ops.rms_norm(total, weight, eps)]

        total, normed = compute(self.backend, record, {"x": x, "delta": delta})
        return total, normed

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return self.rows("silu_and_mul", gate_up)  # type: ignore[no-any-return]

    def rotate_and_cache(
        self,
        qkv: Tensor,
        cache: KVCache,
        metadata: Any,
        positions: Tensor,
        frequencies: Tensor,
        norms: HeadNorms | None,
        num_heads: int,
    ) -> Tensor:
        def record(ops: GraphBuilder, qkv: Value, positions: Value, metadata: Value) -> Value:
            table = ops.rotary_table(positions, frequencies, 1.0)
            head_dim = 2 * len(frequencies)
            return ops.rotate_and_cache(
                qkv, metadata, table, cache, norms, num_heads=num_heads, head_dim=head_dim
            )

        tensors = {"qkv": qkv, "positions": positions}
        queries: Tensor = compute(self.backend, record, tensors, metadata)
        return queries.view(len(qkv), num_heads, -1)

    def attention(
        self,
        queries: Tensor,
        cache: KVCache,
        metadata: Any,
        *,
        scale: float,
        window: int | None,
        **more: Any,
    ) -> Tensor:
        """`more` are soft cap and sinks."""
        head_dim = queries.shape[-1]

        def record(ops: GraphBuilder, queries: Value, metadata: Value) -> Value:
            return ops.attention(
                queries, metadata, cache, head_dim=head_dim, scale=scale, window=window, **more
            )

        out: Tensor = compute(self.backend, record, {"queries": queries}, metadata)
        return out.view_as(queries)
