# SPDX-License-Identifier: Apache-2.0
"""Values that share memory are never needed at the same time."""

from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pagoda.backend.graph import Graph as RecordedGraph
from pagoda.backend.graph import Node, Value
from pagoda.plugins.cuda.slots import plan_values

ROWS, SELECTED = 5, 3


def _graph(rng: random.Random, length: int) -> RecordedGraph:
    """Nodes of one to three inputs, one or two outputs, some of them in the memory of their first input."""
    values = [Value(0, 8), Value(1, 4, selected=True), Value(2, 2, dtype="int64")]
    given, used_up = {0, 1, 2}, set[int]()
    nodes = []
    for _ in range(length):
        known = [value.index for value in values if value.index not in used_up]
        inputs = tuple(rng.sample(known, rng.randint(1, min(3, len(known)))))
        fresh = [each for each in inputs if each not in given]
        if fresh and rng.random() < 0.3:
            first = values[fresh[0]]
            used_up.add(first.index)
            out = Value(len(values), first.width, first.selected)
            rest = tuple(each for each in inputs if each != first.index)
            nodes.append(Node("all_reduce", (first.index, *rest), (out.index,), (), {}))
            values.append(out)
            continue
        outs = [
            Value(len(values) + place, rng.choice([2, 4, 8]), rng.random() < 0.5)
            for place in range(rng.randint(1, 2))
        ]
        nodes.append(Node("add", inputs, tuple(out.index for out in outs), (), {}))
        values += outs
    return RecordedGraph(tuple(values), tuple(nodes), {}, {}, {}, ())


@given(st.integers(0, 2**32), st.integers(1, 25))
def test_no_value_is_overwritten_while_it_is_needed(seed: int, length: int) -> None:
    """Each node marks its outputs by its number; what it reads must be marked as it was written last."""
    rng = random.Random(seed)
    graph = _graph(rng, length)
    apart = {0, 1, 2, *rng.sample(range(len(graph.values)), min(2, len(graph.values)))}
    in_place = {
        value
        for node in graph.nodes
        if node.op == "all_reduce"
        for value in (*node.inputs, *node.outputs)
    }
    alone = [value.index for value in graph.values if value.index not in apart | in_place]
    rounded = rng.sample(alone, len(alone) // 2)
    plan = plan_values(graph, graph.nodes, apart, rounded)

    def memory(key: object, num_bytes: int) -> Tensor:
        assert isinstance(key, int)
        return torch.zeros(num_bytes, dtype=torch.uint8)

    tensors = plan.views(graph, ROWS, SELECTED, memory)
    for value in graph.values:
        if value.index not in tensors and plan.root(value.index) == value.index:
            dtype = torch.int64 if value.dtype == "int64" else torch.float32
            tensors[value.index] = torch.zeros(
                SELECTED if value.selected else ROWS, value.width, dtype=dtype
            )
    assert all(tensors[index].dtype == torch.bfloat16 for index in rounded if index in tensors)
    for index in plan.roots:
        tensors[index] = tensors[plan.root(index)]
    marks: dict[int, int] = {value.index: 0 for value in graph.values}
    for number, node in enumerate(graph.nodes, start=1):
        for index in node.inputs:
            if node.op == "add" or index == node.inputs[0]:
                assert bool((tensors[index] == marks[index]).all()), (node, index)
        for index in node.outputs:
            tensors[index].fill_(number)
            marks[index] = number
    sizes = sum(tensor.nbytes for index, tensor in tensors.items() if index in plan.places)
    slots = sum(slot.row_bytes * (SELECTED if slot.selected else ROWS) for slot in plan.slots)
    assert slots <= max(1, sizes)
