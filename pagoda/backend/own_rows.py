# SPDX-License-Identifier: Apache-2.0
"""Operations of ranks that have rows of their own, those of requests that they attend to.

A step brings `token_counts` and `row_counts` [ranks] int64, the numbers of each rank's tokens and selected rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagoda.backend.base import Experts
from pagoda.backend.graph import LinearShape, Value
from pagoda.backend.operations import GraphBuilder


def gather_rows(ops: GraphBuilder, x: Value) -> Value:
    """The rows of all ranks, in order of rank, from those x [n, d] that this one has: [all n, d]."""
    return _exchange(ops, "gather_rows", x, gathered=True)


def scatter_rows(ops: GraphBuilder, x: Value) -> Value:
    """The sum over all ranks of x [all n, d], of which each rank has its own rows: [n, d]."""
    return _exchange(ops, "scatter_rows", x, gathered=False)


def _exchange(ops: GraphBuilder, op: str, x: Value, *, gathered: bool) -> Value:
    """Raises ValueError: x has the rows of the result already."""
    if x.gathered == gathered:
        raise ValueError(f"{op} takes rows of {'one rank' if gathered else 'all ranks'}.")
    return ops.record(op, [x, ops.counts(x)], [ops.group], {}, x.width, gathered=gathered)


def dispatched_experts(
    ops: GraphBuilder,
    x: Value,
    logits: Value,
    experts: Experts[LinearShape],
    first_experts: Sequence[int],
) -> Value:
    """`GraphBuilder.experts` of all ranks, for this rank's x [n, hidden]: [n, hidden].

    `first_experts` has the first expert of each rank; a token goes to those ranks that hold one of its experts.
    What these give is summed in order of rank. Tokens are counted where they come from.
    Raises ValueError: the weights are of other widths.
    """
    if (x.width, logits.width) != (experts.gate[0].inputs, experts.routing.num_experts):
        raise ValueError(f"Rows of {x.width} and logits of {logits.width} do not fit the experts.")
    attributes = {"first_experts": tuple(first_experts)}
    inputs, weights = [x, logits, ops.counts(x)], [experts, ops.group]
    return ops.record("dispatched_experts", inputs, weights, attributes, x.width)
