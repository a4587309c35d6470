# SPDX-License-Identifier: Apache-2.0
"""The decoder that programs compute is found in graphs, and any other is refused by its first node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pypto_graphs import EPS, HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, VOCAB, Recorder

from pagoda.backend.base import HeadNorms, UnsupportedError
from pagoda.backend.graph import Graph
from pagoda.plugins.pypto.contract import read_manifest
from pagoda.plugins.pypto.pattern import choose_contract, find_decoder


def contract_of(graph: Graph) -> str:
    from pagoda_pypto_device.contracts import manifest

    contracts = read_manifest(manifest(("qwen3-14b-2l", "tiny-fp32"), 1)).contracts
    return choose_contract(find_decoder(graph, {}), contracts).name


def test_a_decoder_of_a_contracts_shape_is_found(install: Callable[..., None]) -> None:
    install()
    graph = Recorder().graph()
    found = find_decoder(graph, {})
    assert found.sizes == {
        "L": 4,
        "H": HIDDEN,
        "QH": HEADS,
        "KVH": KV_HEADS,
        "D": HEAD_DIM,
        "I": INNER,
        "REAL_V": VOCAB,
    }
    assert (found.eps, found.scale) == (EPS, HEAD_DIM**-0.5)
    assert len(found.linears) == 2 + 4 * 4
    assert len({id(layer.cache) for layer in found.layers}) == 4
    assert contract_of(graph) == "tiny-fp32"


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"scale_embedding": True}, "this model computes scale (node 1) where"),
        ({"activation": "gelu_and_mul"}, "this model computes gelu_and_mul (node 10) where"),
        (
            {"norms": None},
            "this model computes rotate_and_cache (node 4) without norms of the queries and keys of each head",
        ),
        (
            {"attention": {"scale": HEAD_DIM**-0.5, "window": 64}},
            "this model computes attention (node 5) with window 64, not None",
        ),
        (
            {"attention": {"scale": HEAD_DIM**-0.5, "window": None, "softcap": 30.0}},
            "with softcap 30.0, not None",
        ),
        (
            {"attention": {"scale": HEAD_DIM**-0.5, "window": None, "sinks": torch.zeros(HEADS)}},
            "this model computes attention (node 5) with attention sinks",
        ),
        (
            {"layers": 3},
            "qwen3-14b-2l: L is 2, the model has 3; tiny-fp32: L is 4, the model has 3",
        ),
        (
            {"eps": 1e-5},
            "this model computes rotate_and_cache (node 4) with eps 1e-06, not 1e-05",
        ),
        (
            {"attention": {"scale": 1.0, "window": None}},
            "scores are divided by the root of a head's elements, the model scales by 1.0",
        ),
    ],
)
def test_any_other_is_refused_by_what_differs(
    install: Callable[..., None], others: dict[str, Any], message: str
) -> None:
    install()
    with pytest.raises(UnsupportedError) as caught:
        contract_of(Recorder(**others).graph())
    assert message in str(caught.value)


HEAD_NORMS = HeadNorms(torch.ones(HEAD_DIM), torch.ones(HEAD_DIM), 1e-5)


@pytest.mark.parametrize(
    ("third", "message"),
    [
        ({"eps": 1e-5}, "rms_norm (node 24) with eps 1e-05, not 1e-06"),
        (
            {"heads": 3},
            "linear (node 25) with 256 inputs and 448 outputs, where its first layer has 256 inputs and 512",
        ),
        (
            {"heads": 6, "kv_heads": 1},
            "rotate_and_cache (node 26) with KV of [3, 1, 128, 64] in torch.float32, where its first layer has "
            "KV of [3, 2, 128, 64] in torch.float32",
        ),
        ({"kept": torch.bfloat16}, "(node 26) with KV of [3, 2, 128, 64] in torch.bfloat16, where"),
        ({"norms": HEAD_NORMS}, "rotate_and_cache (node 26) with eps 1e-05, not 1e-06"),
        ({"norms": None}, "rotate_and_cache (node 26) without norms of the queries and keys"),
        (
            {"attention": {"scale": 1.0}},
            "attention (node 27) with scale 1.0, where its first layer has scale 0.125",
        ),
        ({"attention": {"window": 64}}, "attention (node 27) with window 64, not None"),
        ({"cache": 1}, "attention (node 27) over the KV of another layer"),
        (
            {"heads": 6, "kv_heads": 1, "cached_heads": 2},
            "linear (node 28) with 384 inputs and 256 outputs, where its first layer has 256 inputs",
        ),
        ({"mlp_eps": 1e-5}, "rms_norm (node 30) with eps 1e-05, not 1e-06"),
        (
            {"inner": 512},
            "linear (node 31) with 256 inputs and 1024 outputs, where its first layer has 256 inputs and 1536",
        ),
    ],
)
def test_a_later_layer_that_differs_is_refused_by_its_first_node(
    third: dict[str, Any], message: str
) -> None:
    found = find_problem(Recorder(third=third).graph(), {})
    assert found.startswith("this model computes ")
    assert message in found


def test_a_head_of_another_size_than_the_embedding_is_refused() -> None:
    assert "linear (node 49) with 900 outputs, where its embedding has 960" in find_problem(
        Recorder(outputs=900).graph(), {}
    )
    assert "linear_argmax (node 50) of another map than its logits" in find_problem(
        Recorder(one_head=False).graph(), {}
    )


def test_a_node_is_named_after_its_weight() -> None:
    recorder = Recorder(norms=HeadNorms(torch.ones(256), torch.ones(128), EPS), layers=1)
    graph = recorder.graph()
    assert find_problem(graph, {id(graph.weights[4]): "layers.0.q_norm"}) == (
        "this model computes rotate_and_cache of layers.0.q_norm (node 4) with norms_all_heads True, not False; "
        "choose another --backend."
    )


def find_problem(graph: Graph, names: dict[int, str]) -> str:
    with pytest.raises(UnsupportedError) as caught:
        find_decoder(graph, names)
    return str(caught.value)


def test_a_graph_that_goes_on_is_refused() -> None:
    graph = Recorder().graph()
    *rest, last = graph.nodes
    longer = Graph(
        graph.values,
        (*rest, last, last),
        graph.inputs,
        graph.metadata,
        graph.results,
        graph.weights,
    )
    assert "behind all that the PyPTO programs compute" in find_problem(longer, {})
    shorter = Graph(
        graph.values,
        tuple(rest),
        graph.inputs,
        graph.metadata,
        graph.results,
        graph.weights,
    )
    assert "compute linear_argmax where this model has ended" in find_problem(shorter, {})
