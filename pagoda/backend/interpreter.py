# SPDX-License-Identifier: Apache-2.0
"""Graphs computed node by node; a trace shows each as a span."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, cast

from torch import Tensor

from pagoda.backend.base import MetadataT, NeededInputs, StepInput
from pagoda.backend.graph import Graph, Node
from pagoda.backend.operation import Operation, OperationNamer, WeightNames
from pagoda.backend.operations import OPERATIONS
from pagoda.telemetry.tracer import Tracer

_ITEM_BYTES = {"float32": 4, "int64": 8, "metadata": 0, "counts": 0}


@dataclass(frozen=True)
class _Schedule:
    """Nodes of steps that want some results and bring some along."""

    inputs: NeededInputs
    nodes: tuple[tuple[Node, Sequence[int]], ...]
    """Nodes in order, each with the values that nothing reads after it."""


class InterpretedGraph(Generic[MetadataT]):
    def __init__(
        self,
        graph: Graph,
        compute: Callable[[Node, Sequence[Any]], Any],
        names: WeightNames,
    ) -> None:
        """`compute` takes a node and its inputs, and gives its output, or a tuple of them where it has several."""
        self._graph = graph
        self._compute = compute
        self._names = names
        self._schedules: dict[tuple[tuple[str, ...], tuple[str, ...]], _Schedule] = {}

    def operations(self, results: Sequence[str]) -> Sequence[Operation]:  # noqa: ARG002
        """None: operations have spans of their own."""
        return ()

    def __call__(self, step: StepInput[MetadataT], results: Sequence[str]) -> tuple[Tensor, ...]:
        return self._run(step, results, None)

    def traced(
        self, step: StepInput[MetadataT], results: Sequence[str], tracer: Tracer
    ) -> tuple[tuple[Tensor, ...], Sequence[int]]:
        return self._run(step, results, tracer), ()

    def profile(self, step: StepInput[MetadataT], results: Sequence[str]) -> int:
        """Bytes of the values that are there at once, at most; what functions take inside is not seen."""
        graph, given = self._graph, step.given(self._graph)
        schedule = self._schedule(tuple(results), tuple(given))
        rows = schedule.inputs.check(step)
        sizes = [rows.of(value) * value.width * _ITEM_BYTES[value.dtype] for value in graph.values]
        known: set[int] = set()
        most = 0
        for node, ends in schedule.nodes:
            known.update(node.outputs)
            most = max(most, sum(sizes[value] for value in known))
            known.difference_update(ends)
        return most

    def _run(
        self, step: StepInput[MetadataT], results: Sequence[str], tracer: Tracer | None
    ) -> tuple[Tensor, ...]:
        graph, given = self._graph, step.given(self._graph)
        schedule = self._schedule(tuple(results), tuple(given))
        schedule.inputs.check(step)
        values: dict[int, object] = {
            value.index: step.tensors[name]
            for name, value in graph.inputs.items()
            if name in step.tensors
        }
        values |= {graph.results[name].index: step.tensors[name] for name in given}
        values |= {
            value.index: step.metadata[group]
            for group, value in graph.metadata.items()
            if group in step.metadata
        }
        namer = OperationNamer(self._names)
        for node, ends in schedule.nodes:
            began = 0 if tracer is None else tracer.kernel()
            # Steps without adapters bring no numbers of them.
            computed = self._compute(node, [values.get(value) for value in node.inputs])
            outputs = computed if len(node.outputs) > 1 else (computed,)
            values.update(zip(node.outputs, outputs, strict=True))
            for value in ends:
                values.pop(value, None)
            if tracer is not None:
                kind = OPERATIONS[node.op].kind
                weight = graph.weights[node.weights[0]] if node.weights else None
                tracer.span(namer.name(kind, weight), began, {"kind": kind})
        return tuple(cast("Tensor", values[graph.results[name].index]) for name in results)

    def _schedule(self, results: tuple[str, ...], given: tuple[str, ...]) -> _Schedule:
        schedule = self._schedules.get((results, given))
        if schedule is None:
            schedule = self._schedules[results, given] = self._new_schedule(results, given)
        return schedule

    def _new_schedule(self, results: tuple[str, ...], given: tuple[str, ...]) -> _Schedule:
        graph = self._graph
        needed = graph.needed(results, given)
        last = {value: index for index in needed for value in graph.nodes[index].inputs}
        kept = {graph.results[name].index for name in results}
        nodes = []
        for index in needed:
            node = graph.nodes[index]
            ends = [value for value in {*node.inputs} - kept if last[value] == index]
            nodes.append((node, ends))
        return _Schedule(NeededInputs(graph, needed, given), tuple(nodes))
