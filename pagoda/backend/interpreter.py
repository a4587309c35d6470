"""Graphs computed node by node; a trace shows each as a span."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, cast

from torch import Tensor

from pagoda.backend.base import MetadataT, NeededInputs, StepInput
from pagoda.backend.graph import Graph, Node, group_of
from pagoda.backend.operation import Operation, OperationNamer, WeightNames
from pagoda.backend.operations import OPERATIONS
from pagoda.telemetry.tracer import Tracer


class InterpretedGraph(Generic[MetadataT]):
    def __init__(
        self,
        graph: Graph,
        compute: Callable[[Node, Sequence[Any]], Any],
        names: WeightNames,
    ) -> None:
        """`compute` takes a node and its inputs, and gives its output, or a tuple of them where it has several."""
        self._graph = graph
        self._node_outputs = compute
        self._names = names

    def operations(self, results: Sequence[str]) -> Sequence[Operation]:  # noqa: ARG002
        """None: operations have spans of their own."""
        return ()

    def __call__(self, step: StepInput[MetadataT], results: Sequence[str]) -> tuple[Tensor, ...]:
        computed = self._start(step)
        for node, ends in self._needed(step, results):
            self._compute(node, computed)
            for value in ends:
                computed.pop(value, None)
        return self._results(computed, results)

    def traced(
        self, step: StepInput[MetadataT], results: Sequence[str], tracer: Tracer
    ) -> tuple[tuple[Tensor, ...], Sequence[int]]:
        namer, computed = OperationNamer(self._names), self._start(step)
        for node, ends in self._needed(step, results):
            began = tracer.kernel()
            self._compute(node, computed)
            for value in ends:
                computed.pop(value, None)
            kind = OPERATIONS[node.op].kind
            weight = self._graph.weights[node.weights[0]] if node.weights else None
            tracer.span(namer.name(kind, weight), began, {"kind": kind})
        return self._results(computed, results), ()

    def _start(self, step: StepInput[MetadataT]) -> dict[int, object]:
        """Values by index, of which some are metadata."""
        graph = self._graph
        computed: dict[int, object] = {
            graph.inputs[name].index: tensor
            for name, tensor in step.tensors.items()
            if name in graph.inputs
        }
        computed |= {graph.results[name].index: step.tensors[name] for name in step.given(graph)}
        for name, value in graph.inputs.items():
            if value.dtype == "metadata" and group_of(name) in step.metadata:
                computed[value.index] = step.metadata[group_of(name)]
        return computed

    def _needed(
        self, step: StepInput[MetadataT], results: Sequence[str]
    ) -> Iterator[tuple[Node, list[int]]]:
        """Nodes in order, each with the values that nothing reads after it."""
        graph = self._graph
        given = step.given(graph)
        needed = graph.needed(results, given)
        NeededInputs(graph, needed, given).check(step)
        last = {value: index for index in needed for value in graph.nodes[index].inputs}
        kept = {value.index for value in (*graph.inputs.values(), *graph.results.values())}
        for index in needed:
            node = graph.nodes[index]
            yield (
                node,
                [value for value in {*node.inputs} if last[value] == index and value not in kept],
            )

    def _compute(self, node: Node, computed: dict[int, object]) -> None:
        # Steps without adapters bring no numbers of them.
        result = self._node_outputs(node, [computed.get(value) for value in node.inputs])
        outputs = result if len(node.outputs) > 1 else (result,)
        computed.update(zip(node.outputs, outputs, strict=True))

    def _results(self, computed: dict[int, object], results: Sequence[str]) -> tuple[Tensor, ...]:
        found = (computed[self._graph.results[name].index] for name in results)
        return tuple(cast("Tensor", value) for value in found)
