# SPDX-License-Identifier: Apache-2.0
"""Launches of the steps of a graph that want some results, and the memory that such a step computes in."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagoda.backend.base import NeededInputs, StepInput
from pagoda.backend.graph import Graph, Node, Value
from pagoda.backend.host import check_token_ids
from pagoda.plugins.cuda.adapters import AdapterTables
from pagoda.plugins.cuda.lowering import fused, launches_of
from pagoda.plugins.cuda.nodes import Launch, Lowering, StepShape, Values
from pagoda.plugins.cuda.rounded import rounded_values
from pagoda.plugins.cuda.runtime import Runtime
from pagoda.plugins.cuda.slot_mapping import DeviceSlotMapping, Layout, SlotMapping
from pagoda.plugins.cuda.slots import ValuePlan, dtype_of, plan_values, shape_of
from pagoda.plugins.cuda.staging import Parcel, Spec

NewMemory = Callable[[Hashable, int], Tensor]
"""See `StepShape.memory`."""


@dataclass(frozen=True)
class Rows:
    """Rows of a step, with and without padding."""

    num_tokens: int
    num_selected: int
    tokens: int
    """Tokens with padding."""
    selected: int
    layouts: Mapping[int, Layout]
    """Layouts of metadata by the number of its value."""

    @property
    def is_padded(self) -> bool:
        """All rows are those of a step that is filled up, so that one graph serves all steps of its size."""
        padded = any(layout.is_padded for layout in self.layouts.values())
        return padded and self.num_selected in (0, self.num_tokens)

    def captured(self, size: int) -> Rows:
        """The rows of a captured step of `size` sequences, with contexts as long as these."""
        layouts = {index: layout.captured(size) for index, layout in self.layouts.items()}
        return Rows(size, size, size, size, layouts)

    def of(self, value: Value) -> int:
        return self.selected if value.selected else self.tokens

    def without_padding(self, value: Value) -> int:
        return self.num_selected if value.selected else self.num_tokens


@dataclass(frozen=True)
class Bound:
    """A schedule over the memory of steps of one shape."""

    values: Values
    names: tuple[str, ...]
    """Inputs that are packed, with the number of tokens behind them."""
    parcel: Parcel
    packed: Tensor
    """The parcel's bytes on the device."""
    places: Mapping[int, Tensor]
    """Packed places on the device by KV group."""


class Schedule:
    """Steps that want some results and bring some along."""

    def __init__(
        self,
        graph: Graph,
        results: tuple[str, ...],
        given: tuple[str, ...],
        runtime: Runtime,
        products_of: Callable[[Any], torch.dtype],
        adapters: AdapterTables,
    ) -> None:
        needed = graph.needed(results, given)
        self._graph = graph
        self.inputs = NeededInputs(graph, needed, given)
        self.nodes: list[Node] = fused(graph, needed)
        self.computed = {name: graph.results[name] for name in results if name not in given}
        """Results that are wanted, and not brought along."""
        brought = (*graph.inputs.values(), *(graph.results[name] for name in given))
        self._named = {**graph.inputs, **{name: graph.results[name] for name in given}}
        apart = {value.index for value in (*brought, *self.computed.values())}
        rounded = rounded_values(graph, self.nodes, apart)
        self.plan: ValuePlan = plan_values(graph, self.nodes, apart, rounded)
        self.lowering = Lowering(graph, runtime, products_of, adapters, rounded)
        self.launches: list[Launch] = launches_of(self.lowering, self.nodes)
        self.vocabularies = [
            (name, int(str(node.attributes["vocab_size"])))
            for node in self.nodes
            if node.op == "embedding"
            for name, value in graph.inputs.items()
            if value.index == node.inputs[0]
        ]
        """Inputs that are ids, and how many there are."""
        self.can_be_captured = not given and bool(self.inputs.groups)
        self._maybe_absent = [
            node
            for node in self.nodes
            if node.op == "select_rows" and graph.values[node.inputs[0]].dtype == "int64"
        ]

    def rows(self, step: StepInput[SlotMapping]) -> Rows:
        """Rows of a step. Raises ValueError: inputs do not fit; IndexError: an id is of no token."""
        num_tokens, num_selected, *_ = self.inputs.check(step)
        layouts = {}
        for group in self.inputs.groups:
            places = step.metadata[group]
            if places.num_tokens != num_tokens:
                raise ValueError(f"{num_tokens} tokens do not fit metadata of {places.num_tokens}.")
            layouts[self._graph.metadata[group].index] = places.layout
        for name, vocab_size in self.vocabularies:
            check_token_ids(step.tensors[name], vocab_size)
        tokens = max((layout.tokens for layout in layouts.values()), default=num_tokens)
        selected = tokens if tokens > num_tokens == num_selected else num_selected
        return Rows(num_tokens, num_selected, tokens, selected, layouts)

    def shape_key(self, rows: Rows, step: StepInput[SlotMapping]) -> Hashable:
        """Equal for steps that one captured graph may serve."""
        present = self.inputs.names.intersection(step.tensors)
        return rows.tokens, rows.selected, tuple(rows.layouts.items()), present

    def bind(
        self, rows: Rows, step: StepInput[SlotMapping], runtime: Runtime, memory: NewMemory
    ) -> Bound:
        """Memory for a step of these rows; results that are wanted have some of their own."""
        graph, lowering = self._graph, self.lowering
        shape = StepShape(rows.tokens, rows.selected, rows.layouts, memory)
        values: Values = [None] * (lowering.valid + 1 + len(lowering.scratch))
        names, specs = [], list[Spec]()
        for name, value in self._named.items():
            if name not in self.inputs.names or name not in step.tensors:
                continue
            held = runtime.held(step.tensors[name])
            if held is not None and name in graph.results:
                values[value.index] = held.contiguous()
                continue
            names.append(name)
            specs.append((shape_of(value, rows.of(value)), dtype_of(value)))
        parcel = Parcel([*specs, ((1,), torch.int64)])
        packed = memory("inputs", parcel.num_bytes)
        *inputs, values[lowering.valid] = parcel.views(packed)
        for name, view in zip(names, inputs, strict=True):
            values[self._named[name].index] = view
        places = {}
        for group in self.inputs.groups:
            index = graph.metadata[group].index
            layout = rows.layouts[index]
            places[group] = memory(("places", group), layout.parcel.num_bytes)
            values[index] = DeviceSlotMapping.of(layout, places[group])
        for value in self.computed.values():
            key, sizes = ("result", value.index), shape_of(value, rows.of(value))
            values[self.plan.root(value.index)] = shape.tensor(key, dtype_of(value), *sizes)
        views = self.plan.views(graph, rows.tokens, rows.selected, memory)
        for index, tensor in views.items():
            values[index] = tensor
        for index, root in self.plan.roots.items():
            values[index] = values[root]
        for node in self._maybe_absent:
            if values[node.inputs[0]] is None:
                values[node.outputs[0]] = None
        values[lowering.valid + 1 :] = [new(shape) for new in lowering.scratch]
        return Bound(values, tuple(names), parcel, packed, places)


def launch_all(launches: Sequence[Launch], values: Values) -> None:
    for launch in launches:
        launch(values)
