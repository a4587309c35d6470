# SPDX-License-Identifier: Apache-2.0
"""Values that are bfloat16 from the start are those that only products with bfloat16 weights read."""

from __future__ import annotations

import pytest
import torch

from pagoda.backend.graph import Graph, Node, Value
from pagoda.plugins.cuda.rounded import rounded_values
from pagoda.plugins.cuda.weights import Dense, DeviceLinear

X, NORMED, OUT, GATED, OTHER = range(5)


def _graph(*nodes: Node, dtype: torch.dtype = torch.bfloat16) -> Graph:
    values = tuple(Value(index, 8) for index in range(5))
    weight = DeviceLinear((Dense(torch.zeros(8, 8, dtype=dtype)),), 8, 8, None)
    return Graph(values, nodes, {}, {}, {}, (weight,))


def _node(op: str, read: tuple[int, ...], written: int) -> Node:
    return Node(op, read, (written,), (0,), {})


NORM = _node("rms_norm", (X,), NORMED)
PRODUCT = _node("linear", (NORMED,), OUT)


def test_a_norm_in_front_of_products_is_rounded() -> None:
    again = _node("linear", (NORMED,), OTHER)
    graph = _graph(NORM, PRODUCT, again, _node("silu_and_mul", (OUT,), GATED))
    assert rounded_values(graph, graph.nodes, {X, OTHER}) == {NORMED}


@pytest.mark.parametrize("op", ["add_low_rank", "experts", "select_rows", "linear_argmax"])
def test_what_others_read_as_well_is_not(op: str) -> None:
    graph = _graph(NORM, PRODUCT, _node(op, (NORMED,), OTHER))
    assert not rounded_values(graph, graph.nodes, {X})


def test_neither_are_results_nor_what_kernels_write_as_float32_only() -> None:
    graph = _graph(NORM, PRODUCT)
    assert not rounded_values(graph, graph.nodes, {X, NORMED})
    graph = _graph(_node("mul", (X,), NORMED), PRODUCT)
    assert not rounded_values(graph, graph.nodes, {X})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nor_inputs_of_other_weights(dtype: torch.dtype) -> None:
    graph = _graph(NORM, PRODUCT, dtype=dtype)
    assert not rounded_values(graph, graph.nodes, {X})
