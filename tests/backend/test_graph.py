# SPDX-License-Identifier: Apache-2.0
"""A graph is recorded with its shapes checked, and says which of its nodes a step needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda.backend import (
    decoder_operations,
    family_operations,
    latent_layers,
    norms_over_ranks,
    own_rows,
    relative_attention,
    state_layers,
)
from pagoda.backend.graph import Graph, Node, Value
from pagoda.backend.operations import OPERATIONS, GraphBuilder
from pagoda.backend.reference import backend as reference
from pagoda.parallel.collectives import Alone


@dataclass(frozen=True)
class _Weight:
    inputs: int
    outputs: int


def _builder() -> GraphBuilder:
    return GraphBuilder(Alone())


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (lambda ops, x: ops.linear(x, _Weight(7, 3)), "Rows of 8 do not fit a weight of 7 inputs"),
        (lambda ops, x: ops.rms_norm(x, [1.0] * 9, 1e-6), "Rows of 8 do not fit a weight of 9"),
        (lambda ops, x: ops.add(x, ops.input("y", 4)), "Rows of 4 do not fit"),
        (lambda ops, _: ops.silu_and_mul(ops.input("z", 5)), "not of two halves"),
        (lambda ops, x: ops.select_rows(x, ops.input("adapters")), "by the input `rows` only"),
        (
            lambda ops, x: ops.add(x, ops.select_rows(x, ops.input("rows"))),
            "have rows of the same tokens",
        ),
        (
            lambda ops, x: ops.select_rows(
                ops.select_rows(x, ops.input("rows")), ops.input("rows")
            ),
            "selected once",
        ),
        (lambda ops, x: ops.result("out", x), "The result out is not computed"),
        (
            lambda ops, _: ops.scale(ops.input("positions"), 2.0),
            "scale takes x of float32, not int64",
        ),
        (
            lambda ops, x: ops.embedding(x, _Weight(8, 3)),
            "embedding takes token_ids of int64, not float32",
        ),
        (
            lambda ops, _: ops.add(ops.metadata(), ops.metadata()),
            "add takes x of float32, not metadata",
        ),
        (
            lambda ops, _: ops.select_rows(ops.metadata(), ops.input("rows")),
            "select_rows takes x of float32, not metadata",
        ),
        (
            lambda ops, x: [ops.result(name, y) for y in [ops.gelu(x)] for name in ("one", "two")],
            "The result two has another name already",
        ),
    ],
)
def test_what_does_not_fit_is_refused_while_recording(
    record: Callable[[GraphBuilder, Value], object], message: str
) -> None:
    ops = _builder()
    with pytest.raises(ValueError, match=message):
        record(ops, ops.input("x", 8))


class _Two(Alone):
    size = 2


def test_a_value_that_was_used_up_is_not_read() -> None:
    ops = GraphBuilder(_Two())
    x = ops.linear(ops.input("x", 8), _Weight(8, 4))
    ops.all_reduce(x)
    with pytest.raises(ValueError, match="add reads a value that was used up"):
        ops.add(x, x)
    ops.result("out", x)
    with pytest.raises(ValueError, match="The result out was used up"):
        ops.build()


def test_operations_of_one_rank_have_no_collectives() -> None:
    ops = _builder()
    x = ops.linear(ops.input("x", 8), _Weight(8, 4))
    assert ops.all_reduce(x) == ops.all_gather(x, [4]) == x
    with pytest.raises(ValueError, match="A share of 4 is not that of a rank"):
        GraphBuilder(_Two()).all_gather(x, [5, 4])


def test_every_operation_has_a_reference_and_a_method_that_records_it() -> None:
    assert OPERATIONS.keys() == reference.OPERATIONS.keys()
    places = (
        *(GraphBuilder, state_layers, latent_layers, own_rows),
        *(relative_attention, decoder_operations, norms_over_ranks, family_operations),
    )
    recorded_as = {"context_attention": "attention"}
    for name in OPERATIONS:
        method = recorded_as.get(name, name)
        assert any(callable(getattr(place, method, None)) for place in places), name


@given(st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_needed_nodes_are_those_that_results_depend_on(data: st.DataObject) -> None:
    """Random graphs of sums: what is needed is closed under its inputs, and nothing of it can go."""
    ops = _builder()
    values = [ops.input("x", 2), ops.input("y", 2)]
    for _ in range(data.draw(st.integers(1, 12))):
        left, right = (data.draw(st.sampled_from(values)) for _ in range(2))
        values.append(ops.add(left, right))
    computed = values[2:]
    names = [f"r{i}" for i in range(len(computed))]
    for name, value in zip(names, computed, strict=True):
        ops.result(name, value)
    graph = ops.build()
    results = data.draw(st.lists(st.sampled_from(names), unique=True))
    given_results = data.draw(st.lists(st.sampled_from(names), unique=True))
    needed = graph.needed(results, given_results)
    assert needed == sorted(set(needed))
    known = graph.read_by(needed) & {value.index for value in graph.inputs.values()}
    known |= {graph.results[name].index for name in given_results}
    for index in needed:
        assert known.issuperset(graph.nodes[index].inputs)
        known.update(graph.nodes[index].outputs)
    assert known.issuperset(graph.results[name].index for name in results)
    read = {value for index in needed for value in graph.nodes[index].inputs}
    wanted = {graph.results[name].index for name in results}
    for index in needed:
        assert (read | wanted).intersection(graph.nodes[index].outputs)


def test_an_operation_takes_what_its_line_says() -> None:
    with pytest.raises(ValueError, match="add takes inputs x, delta, not 1 of them"):
        OPERATIONS["add"].check("add", {"inputs": 1})
    OPERATIONS["rotate_and_cache"].check("rotate_and_cache", {"inputs": 4, "weights": 1})


def test_a_graph_is_no_more_than_data() -> None:
    ops = _builder()
    ops.result("out", ops.rms_norm(ops.input("x", 2), weight := [1.0, 1.0], 1e-6))
    graph = ops.build()
    assert isinstance(graph, Graph)
    assert graph.nodes == (Node("rms_norm", (0,), (1,), (0,), {"eps": 1e-6}),)
    assert graph.weights == (weight,)
