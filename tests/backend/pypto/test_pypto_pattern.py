"""The decoder that programs compute is found in graphs, and any other is refused by its first node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pagoda.backend.base import HeadNorms, KVCache, UnsupportedError
from pagoda.backend.graph import Graph, GraphBuilder
from pagoda.backend.pypto.contract import read_manifest
from pagoda.backend.pypto.pattern import choose_contract, find_decoder
from pagoda.backend.pypto.pool import stand_in
from pagoda.backend.pypto.weights import HostLinear
from pagoda.parallel.collectives import Alone

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB = 256, 4, 2, 64, 768, 960
EPS = 1e-6


def _map(outputs: int, inputs: int) -> HostLinear:
    return HostLinear(torch.zeros(outputs, inputs))


class Recorder:
    """Records a decoder of pagoda-tiny's shape; `others` replace what it is made of."""

    def __init__(self, **others: Any) -> None:
        self.layers = 4
        self.eps = EPS
        self.attention: dict[str, Any] = {"scale": HEAD_DIM**-0.5, "window": None}
        self.norms: HeadNorms | None = HeadNorms(torch.ones(HEAD_DIM), torch.ones(HEAD_DIM), EPS)
        self.scale_embedding = False
        self.activation = "silu_and_mul"
        for name, value in others.items():
            setattr(self, name, value)

    def graph(self) -> Graph:
        ops = GraphBuilder(Alone())
        ones, embedding = torch.ones(HIDDEN), _map(VOCAB, HIDDEN)
        x = ops.embedding(ops.input("token_ids"), embedding)
        if self.scale_embedding:
            x = ops.scale(x, 16.0)
        table = ops.rotary_table(ops.input("positions"), torch.ones(HEAD_DIM // 2), 1.0)
        shape = (3, KV_HEADS, 128, HEAD_DIM)
        for layer in range(self.layers):
            cache = KVCache(stand_in(shape, torch.float32), stand_in(shape, torch.float32))
            qkv = _map((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN)
            h = ops.linear(ops.rms_norm(x, ones, self.eps), qkv)
            queries = ops.rotate_and_cache(
                h,
                ops.metadata(),
                table,
                cache,
                self.norms,
                num_heads=HEADS,
                head_dim=HEAD_DIM,
            )
            h = ops.attention(queries, ops.metadata(), cache, head_dim=HEAD_DIM, **self.attention)
            if layer == self.layers - 1:
                rows = ops.input("rows")
                h, x = ops.select_rows(h, rows), ops.select_rows(x, rows)
            x = ops.add(x, ops.linear(h, _map(HIDDEN, HEADS * HEAD_DIM)))
            h = ops.linear(ops.rms_norm(x, ones, self.eps), _map(2 * INNER, HIDDEN))
            h = getattr(ops, self.activation)(h)
            x = ops.add(x, ops.linear(h, _map(HIDDEN, INNER)))
        h = ops.rms_norm(x, ones, self.eps)
        ops.result("last_hidden", h)
        head = _map(VOCAB, HIDDEN)
        ops.result("logits", ops.linear(h, head))
        ops.result("argmax", ops.linear_argmax(h, head))
        return ops.build()


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
        ({"norms": None}, "norm the queries and keys of each head"),
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
            "have no attention sinks",
        ),
        (
            {"layers": 3},
            "qwen3-14b-2l: L is 2, the model has 3; tiny-fp32: L is 4, the model has 3",
        ),
        ({"eps": 1e-5}, "norm the queries and keys of each head"),
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
