# SPDX-License-Identifier: Apache-2.0
"""The operations in plain PyTorch, on the CPU: the specification that other backends are tested against.

Every result is the same in all bits whatever else is in the batch. Library kernels choose their order of
summation by the shape they are given, so the shapes are fixed here: matrix products are made in tiles of
`ROWS` rows (`linear`), attention in tiles of `ROWS` query rows by `KEYS` cached tokens (`attention`). A step only
changes how many tiles there are. `tests/backend/test_invariance.py` checks that the kernels used here keep this
promise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from pagoda.backend.base import (
    UNNAMED,
    Compiled,
    LatentCache,
    LayerMemory,
    StateCache,
    TokenBatch,
)
from pagoda.backend.block_rounding import quantize_blocks
from pagoda.backend.graph import Graph, Node
from pagoda.backend.host import HostBackend
from pagoda.backend.interpreter import InterpretedGraph
from pagoda.backend.low_rank import LowRank, LowRankMaps
from pagoda.backend.operation import WeightNames
from pagoda.backend.reference import (
    alibi,
    attention,
    collectives,
    context,
    experts,
    family_rows,
    latents,
    linear,
    relative,
    rows,
    states,
)
from pagoda.backend.reference.attention import AttentionMetadata, plan_attention
from pagoda.backend.reference.linear import Linear, prepare_linear, set_low_rank
from pagoda.backend.reference.quantized import quantize_int4, quantize_int8
from pagoda.backend.reference.sampling import sample_rows, score_rows
from pagoda.backend.reference.states import StateMetadata, plan_states
from pagoda.backend.sampling import SampledRows, ScoredRows
from pagoda.backend.sampling_table import SamplingTable
from pagoda.backend.weights import BlockWeight, GroupedWeight, Int8Weight, LinearWeight
from pagoda.checkpoints.weight_formats import BlockFormat
from pagoda.devices import DeviceSet
from pagoda.parallel.collectives import Collectives

OPERATIONS: Mapping[str, Callable[..., Any]] = {
    **alibi.OPERATIONS,
    **attention.OPERATIONS,
    **collectives.OPERATIONS,
    **context.OPERATIONS,
    **experts.OPERATIONS,
    **family_rows.OPERATIONS,
    **latents.OPERATIONS,
    **linear.OPERATIONS,
    **relative.OPERATIONS,
    **rows.OPERATIONS,
    **states.OPERATIONS,
}
"""Functions of inputs, weights and attributes by the names of `graph.OPERATIONS`."""

_MEETINGS = frozenset({*collectives.OPERATIONS, "dispatched_experts"})
"""Operations in which ranks meet."""
_DTYPES = {"float32": torch.float32, "int64": torch.int64}


def open_backend(devices: DeviceSet) -> ReferenceBackend:  # noqa: ARG001
    """The backend, which every machine has; the worker is bound to its cores already."""
    return ReferenceBackend()


class ReferenceBackend(HostBackend[Linear, AttentionMetadata | StateMetadata]):
    def __init__(self, group: Collectives | None = None) -> None:
        super().__init__("reference on cpu", group)
        self.capabilities = msgspec.structs.replace(self.capabilities, context_parallel=True)

    def block_shapes(
        self,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,  # noqa: ARG002
        kv_dtype: torch.dtype,  # noqa: ARG002
        what: str = "",  # noqa: ARG002
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (block_size, head_dim), (block_size, head_dim)

    def quantize_int8(self, values: Tensor, *, symmetric: bool) -> Int8Weight:
        return quantize_int8(values, symmetric=symmetric)

    def quantize_int4(self, values: Tensor, group_size: int) -> GroupedWeight:
        return quantize_int4(values, group_size)

    def quantize_blocks(self, values: Tensor, stored_format: BlockFormat) -> BlockWeight:
        return quantize_blocks(values, stored_format)

    def prepare_linear(
        self, parts: Sequence[LinearWeight], bias: Tensor | None, dtype: torch.dtype
    ) -> Linear:
        return prepare_linear(parts, bias, dtype)

    def set_low_rank(
        self, maps: LowRankMaps, adapter: int, parts: Sequence[LowRank | None]
    ) -> None:
        set_low_rank(maps, adapter, parts)

    def remove_low_rank(self, maps: LowRankMaps, adapter: int) -> None:
        maps.parts.pop(adapter, None)

    def sample(self, logits: Tensor, table: SamplingTable, slots: Sequence[int]) -> SampledRows:
        return sample_rows(logits, table, slots)

    def score(self, logits: Tensor, token_ids: Tensor, num_top: int) -> ScoredRows:
        return score_rows(logits, token_ids, num_top)

    def attention_metadata(
        self, batch: TokenBatch, num_heads: int, cache: LayerMemory, group: int = 0
    ) -> AttentionMetadata | StateMetadata:
        if isinstance(cache, StateCache):
            return plan_states(batch, cache, group)
        if isinstance(cache, LatentCache):
            cache = latents.as_keys_and_values(cache)
        return plan_attention(batch, num_heads, cache, group)

    def compile(
        self, graph: Graph, names: WeightNames = UNNAMED
    ) -> Compiled[AttentionMetadata | StateMetadata]:
        def compute(node: Node, inputs: Sequence[Any]) -> Any:
            first = inputs[0]
            if first is not None and not len(first) and node.op not in _MEETINGS:
                # A rank of several that have rows of their own may have none.
                values = [graph.values[value] for value in node.outputs]
                empty = [torch.empty((0, it.width), dtype=_DTYPES[it.dtype]) for it in values]
                return tuple(empty) if len(empty) > 1 else empty[0]
            weights = [graph.weights[weight] for weight in node.weights]
            return OPERATIONS[node.op](*inputs, *weights, **node.attributes)

        return InterpretedGraph(graph, compute, names)
