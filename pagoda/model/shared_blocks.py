# SPDX-License-Identifier: Apache-2.0
"""Blocks that several layers share, as they are loaded and recorded (Glorioso et al. 2024, arXiv 2411.15242)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple

from pagoda.backend.base import LinearT
from pagoda.backend.family_operations import join_columns
from pagoda.backend.graph import Value
from pagoda.backend.operations import GraphBuilder
from pagoda.checkpoints.shared_blocks import LowRankPair, SharedSpec, shared_linears

if TYPE_CHECKING:
    from pagoda.model.loaded_layers import Layer
    from pagoda.model.loader import WeightLoader


class LowRankMap(NamedTuple, Generic[LinearT]):
    """Two maps, one behind the other."""

    low: LinearT
    high: LinearT

    def record(self, ops: GraphBuilder, h: Value) -> Value:
        return ops.linear(ops.linear(h, self.low), self.high)


@dataclass(frozen=True)
class BlockUse(Generic[LinearT]):
    """Weights of one use of a block, besides those of all its uses."""

    qkv: Sequence[LowRankMap[LinearT]]
    """Maps of queries, keys and values; empty where these have none."""
    gate_up: LowRankMap[LinearT]

    def named(self) -> dict[str, object]:
        """Weights by their names in traces."""
        pairs = dict(zip(("query", "key", "value"), self.qkv, strict=False), gate_up=self.gate_up)
        return {
            f"{name}_{part}": weight
            for name, pair in pairs.items()
            for part, weight in pair._asdict().items()
        }

    def added(self, ops: GraphBuilder, h: Value) -> Value | None:
        """Addition to queries, keys and values of h [n, 2 hidden]."""
        found: Value | None = None
        for each in self.qkv:
            own = each.record(ops, h)
            found = own if found is None else join_columns(ops, found, own)
        return found


def attention_source(
    ops: GraphBuilder, layer: Layer[LinearT], x: Value, embedded: Value, given: Value | None
) -> Value:
    """Input of the norm in front of attention or a state: of a block, x [n, hidden] beside embeddings [n, hidden].

    Of a layer behind a block, x with a map of what that has given.
    """
    if layer.block is not None:
        return join_columns(ops, x, embedded)
    if layer.joined is None or given is None:
        return x
    return ops.add(x, ops.linear(given, layer.joined))


def load_block_use(
    loader: WeightLoader[LinearT], index: int, spec: SharedSpec
) -> BlockUse[LinearT]:
    """Low-rank maps of a layer that is a use of a block."""
    linears = shared_linears(loader.shard.config, index, spec)

    def load(pair: LowRankPair) -> LowRankMap[LinearT]:
        return LowRankMap(loader.linear([pair.low]), loader.linear(pair.high))

    return BlockUse([load(pair) for pair in linears.qkv], load(linears.gate_up))
