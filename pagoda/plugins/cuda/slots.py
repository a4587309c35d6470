# SPDX-License-Identifier: Apache-2.0
"""Memory of a step's values: those that are never needed at the same time share it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagoda.backend.graph import Graph, Node, Value
from pagoda.backend.operations import IN_PLACE

_DTYPES = {"float32": torch.float32, "int64": torch.int64}


def shape_of(value: Value, rows: int) -> tuple[int, ...]:
    """Shape of a value of so many rows."""
    return (rows,) if value.dtype == "int64" and value.width == 1 else (rows, value.width)


def dtype_of(value: Value, rounded: Collection[int] = ()) -> torch.dtype:
    """Number format of a value; those that are `rounded` are bfloat16."""
    return torch.bfloat16 if value.index in rounded else _DTYPES[value.dtype]


@dataclass(frozen=True)
class _Slot:
    """Memory that values take in turn."""

    selected: bool
    row_bytes: int
    """Bytes of a row of the widest of its values."""


@dataclass(frozen=True)
class ValuePlan:
    """Places of the values of some nodes."""

    roots: dict[int, int]
    """Values that lie in the memory of another one, in which they are computed, and that one."""
    places: dict[int, int]
    """Slots of values that nobody gives and nobody wants."""
    slots: tuple[_Slot, ...]
    rounded: Collection[int]
    """Values that are bfloat16."""

    def root(self, value: int) -> int:
        return self.roots.get(value, value)

    def views(
        self,
        graph: Graph,
        num_tokens: int,
        num_rows: int,
        memory: Callable[[Hashable, int], Tensor],
    ) -> dict[int, Tensor]:
        """Tensors of all values in slots, for each of which `memory` gives bytes."""
        rows = {False: num_tokens, True: num_rows}
        memories = [
            memory(place, slot.row_bytes * rows[slot.selected])
            for place, slot in enumerate(self.slots)
        ]
        known: dict[tuple[int, int, torch.dtype], Tensor] = {}
        found = {}
        for index, place in self.places.items():
            value = graph.values[index]
            dtype = dtype_of(value, self.rounded)
            key = (place, value.width, dtype)
            if key not in known:
                shape = shape_of(value, rows[value.selected])
                num_bytes = torch.Size(shape).numel() * dtype.itemsize
                known[key] = memories[place][:num_bytes].view(dtype).view(shape)
            found[index] = known[key]
        return found


def plan_values(
    graph: Graph, nodes: Sequence[Node], apart: set[int], rounded: Collection[int] = ()
) -> ValuePlan:
    """Gives memory to the values that nodes compute, in their order, but to those `apart`, which have their own.

    Those that are `rounded` are bfloat16. A value is never computed in the memory of one that its node reads,
    unless the operation does so."""
    roots: dict[int, int] = {}
    for node in nodes:
        if node.op in IN_PLACE:
            (out,), first = node.outputs, node.inputs[0]
            roots[out] = roots.get(first, first)
    own_memory = apart | {roots.get(value, value) for value in apart}
    last: dict[int, int] = {}
    for place, node in enumerate(nodes):
        for value in (*node.inputs, *node.outputs):
            last[roots.get(value, value)] = place
    slots: list[_Slot] = []
    places: dict[int, int] = {}
    free: list[int] = []
    for place, node in enumerate(nodes):
        for value in node.outputs:
            if roots.get(value, value) != value or value in own_memory:
                continue
            wanted = graph.values[value]
            row_bytes = wanted.width * dtype_of(wanted, rounded).itemsize
            chosen = _best(slots, free, wanted.selected, row_bytes)
            if chosen is None:
                chosen = len(slots)
                slots.append(_Slot(wanted.selected, row_bytes))
            else:
                free.remove(chosen)
                slots[chosen] = _Slot(wanted.selected, max(row_bytes, slots[chosen].row_bytes))
            places[value] = chosen
        ends = {roots.get(value, value) for value in (*node.inputs, *node.outputs)}
        free += [places[value] for value in ends if last[value] == place and value in places]
    return ValuePlan(roots, places, tuple(slots), rounded)


def _best(
    slots: Sequence[_Slot], free: Sequence[int], selected: bool, row_bytes: int
) -> int | None:
    """The free slot that is to grow least, of these the smallest."""
    fitting = [place for place in free if slots[place].selected == selected]

    def cost(place: int) -> tuple[int, int]:
        held = slots[place].row_bytes
        return max(0, row_bytes - held), held

    return min(fitting, key=cost, default=None)
