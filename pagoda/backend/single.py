# SPDX-License-Identifier: Apache-2.0
"""Operations computed one at a time, as graphs of their own: for what is done once, and for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, int64

from pagoda.backend.base import Backend, StepInput
from pagoda.backend.graph import Graph, Node, Value
from pagoda.backend.operations import GraphBuilder


def compute(
    backend: Backend[Any, Any],
    record: Callable[..., Value | Sequence[Value]],
    tensors: Mapping[str, Tensor],
    metadata: object = None,
) -> Any:
    """Results of a few operations: one tensor, or several where `record` gives several values; see `bind`."""
    return bind(backend, record, tensors, metadata)()


def bind(
    backend: Backend[Any, Any],
    record: Callable[..., Value | Sequence[Value]],
    tensors: Mapping[str, Tensor],
    metadata: object = None,
) -> Callable[[], Any]:
    """A few operations on some tensors, compiled; each call computes them once more.

    `record` takes a builder and, by name, a value for each tensor [n, ...], and `metadata` where there is some.
    Integers are inputs of such names as `token_ids` only; `token_counts` are those of `pagoda.backend.own_rows`.
    """
    builder = GraphBuilder(backend.group)
    values = {
        name: builder.input(name, _width(tensor))
        for name, tensor in tensors.items()
        if not name.endswith("_counts")
    }
    if metadata is not None:
        values["metadata"] = builder.metadata()
    outputs = record(builder, **values)
    several = [outputs] if isinstance(outputs, Value) else outputs
    names = [f"result {place}" for place in range(len(several))]
    for name, value in zip(names, several, strict=True):
        builder.result(name, value)
    known = {} if metadata is None else {0: metadata}
    compiled, step = backend.compile(builder.build()), StepInput(tensors, known)

    def run() -> Any:
        results = compiled(step, names)
        return results[0] if isinstance(outputs, Value) else results

    return run


def compute_node(
    backend: Backend[Any, Any], graph: Graph, node: Node, arguments: Sequence[object]
) -> Any:
    """Outputs of a node of a graph, by any backend; `arguments` are its inputs."""
    names = {value.index: name for name, value in graph.inputs.items()}
    groups = {value.index: group for group, value in graph.metadata.items()}
    tensors, metadata = {}, {}
    inputs: dict[str, Value] = {}
    for index, argument in zip(node.inputs, arguments, strict=True):
        if index in groups:
            metadata[groups[index]] = argument
            continue
        name = names.get(index, f"value {index}")
        inputs[name] = graph.values[index]
        if isinstance(argument, Tensor):
            tensors[name] = argument
    results = {f"result {value}": graph.values[value] for value in node.outputs}
    weights = tuple(graph.weights[weight] for weight in node.weights)
    own = replace(node, weights=tuple(range(len(weights))))
    of_groups = {group: graph.metadata[group] for group in metadata}
    alone = Graph(graph.values, (own,), inputs, of_groups, results, weights)
    found = backend.compile(alone)(StepInput(tensors, metadata), [*results])
    return found if len(found) > 1 else found[0]


def _width(tensor: Tensor) -> int:
    return 1 if tensor.dtype == int64 else tensor.shape[1:].numel()
