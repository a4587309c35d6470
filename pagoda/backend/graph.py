# SPDX-License-Identifier: Apache-2.0
"""The forward pass as data: values, nodes that compute them, and the graph that a backend runs.

A model records its graph once, through a `GraphBuilder`. The `reference` backend computes a graph node by node and
says what each operation means; other backends translate it. `pagoda.backend.operations` names all operations and
records most: a new one is a line and a method there, a function of the reference, and a kernel of other backends.
Operations of layers with a state, and of latent attention, are recorded by functions of modules of their own.

Activations are flat: the tokens of every sequence in the step, one after the other, with no padding between
sequences. They are float32 between operations: a product of bfloat16 rounds its activations to bfloat16, and
one of integers to integers; nothing else rounds them, so what layers add to hidden states is summed in float32.

The result for a token must not depend, not in a single bit, on what else is in the batch nor on how its sequence
was cut into steps: this is what makes an answer repeatable (invariant 10 of the scheduler). A graph may do without
(`Graph.batch_invariant`), where a backend is quicker then.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

Attribute = float | tuple[int, ...] | None
"""Number of a node, several of them, or none where that has a meaning."""


Dtype = Literal["float32", "int64", "metadata", "counts"]
"""Dtype of rows; `counts` are [ranks] int64, each rank's number of rows."""


@dataclass(frozen=True)
class Value:
    """Activations: a row for each token of the step, or for each selected one."""

    index: int
    width: int
    """Elements of a row; 0 of the metadata and of counts, which have no rows."""
    selected: bool = False
    """True where rows are those of `select_rows`."""
    dtype: Dtype = "float32"
    own: bool = False
    """True where rows are those that a context-parallel rank computes."""
    gathered: bool = False
    """True where rows are those of all ranks, of which each has its own (`gather_rows`)."""

    @property
    def row_kind(self) -> int:
        """Number of the kind of rows (`Rows` in csrc/program.h)."""
        if self.own:
            return 2
        return self.selected + 3 * self.gathered


@dataclass(frozen=True)
class Node:
    op: str
    inputs: tuple[int, ...]
    """Indices of values."""
    outputs: tuple[int, ...]
    weights: tuple[int, ...]
    """Indices into `Graph.weights`."""
    attributes: Mapping[str, Attribute]


@dataclass(frozen=True, eq=False)
class Graph:
    """Nodes in an order in which each follows those that it needs."""

    values: tuple[Value, ...]
    nodes: tuple[Node, ...]
    inputs: Mapping[str, Value]
    """Tensors by name that steps bring along."""
    metadata: Mapping[int, Value]
    """Metadata of attention by KV group, which steps bring along too."""
    results: Mapping[str, Value]
    """Results by name: a step says which of them it wants."""
    weights: tuple[object, ...]
    batch_invariant: bool = True
    """False if a token's bits may depend on what else is in the batch."""

    def needed(self, results: Collection[str], given: Collection[str] = ()) -> list[int]:
        """Indices of the nodes that `results` need, in order, where the step brings the results `given` along."""
        known = {self.results[name].index for name in given}
        open_values = {self.results[name].index for name in results} - known
        found: list[int] = []
        for index in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[index]
            if open_values.intersection(node.outputs):
                found.append(index)
                open_values.update(set(node.inputs) - known)
        return found[::-1]

    def read_by(self, nodes: Sequence[int]) -> set[int]:
        """Indices of the values that some nodes read."""
        return {value for index in nodes for value in self.nodes[index].inputs}


class LinearShape(Protocol):
    """A weight of linear maps as some backend prepared it."""

    @property
    def inputs(self) -> int: ...

    @property
    def outputs(self) -> int: ...


class RotaryTable(NamedTuple):
    """Cosines and sines of the tokens' positions, each [n, d/2]."""

    cosines: Value
    sines: Value
