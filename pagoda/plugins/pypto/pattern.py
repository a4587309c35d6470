# SPDX-License-Identifier: Apache-2.0
"""The decoder that programs compute, found in a recorded graph.

A graph is data: the nodes of a Qwen3 decoder come in one order, and their weights are what the programs take. The
graph is read node by node; the first that does not fit is named in the error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, TypeVar

from torch import Tensor

from pagoda.backend.base import KVCache, UnsupportedError
from pagoda.backend.graph import Graph
from pagoda.backend.operation import WeightNames
from pagoda.plugins.pypto.contract import Contract
from pagoda.plugins.pypto.weights import HostLinear

KindT = TypeVar("KindT")

OPERATIONS = (
    "embedding",
    "rotary_table",
    "rms_norm",
    "linear",
    "rotate_and_cache",
    "attention",
    "select_rows",
    "add",
    "silu_and_mul",
    "linear_argmax",
)
"""Operations of the decoders that programs compute."""


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """Weights of a layer, and its cache."""

    attention_norm: Tensor
    qkv: HostLinear
    q_norm: Tensor
    k_norm: Tensor
    out: HostLinear
    mlp_norm: Tensor
    gate_up: HostLinear
    down: HostLinear
    cache: KVCache


@dataclass(frozen=True, eq=False)
class FoundDecoder:
    """A decoder of the family that programs compute."""

    embedding: HostLinear
    frequencies: Tensor
    """[head_dim / 2] float32, angle per position."""
    rotary_scale: float
    layers: tuple[DecoderLayer, ...]
    final_norm: Tensor
    head: HostLinear
    sizes: Mapping[str, int]
    """Sizes by the symbols of contracts."""
    eps: float
    scale: float
    """Factor of scores of attention."""

    @property
    def linears(self) -> list[HostLinear]:
        """All linear maps, in order; the head may be the embedding."""
        maps = [self.embedding]
        for layer in self.layers:
            maps += [layer.qkv, layer.out, layer.gate_up, layer.down]
        return [*maps, self.head]


class _Nodes:
    """The nodes of a graph in turn, each of which has to be what comes next."""

    def __init__(self, graph: Graph, names: WeightNames) -> None:
        self._graph = graph
        self._names = names
        self._next = 0
        self._of_layers: dict[str, str] = {}
        """Properties of the first layer's nodes by role; see `alike`."""

    @property
    def following(self) -> str:
        """Operation of the next node; empty behind the last."""
        nodes = self._graph.nodes
        return nodes[self._next].op if self._next < len(nodes) else ""

    def take(
        self, op: str, inputs: Sequence[int], **attributes: object
    ) -> tuple[tuple[int, ...], list[object]]:
        """Outputs and weights of the next node, which has this operation, inputs and attributes.

        Raises UnsupportedError: it has not.
        """
        if self._next == len(self._graph.nodes):
            raise UnsupportedError(f"the PyPTO programs compute {op} where this model has ended.")
        node = self._graph.nodes[self._next]
        self._next += 1
        if node.op != op or list(node.inputs) != list(inputs):
            self.refuse(f"where the PyPTO programs compute {op}")
        for name, wanted in attributes.items():
            if node.attributes[name] != wanted:
                self.refuse(f"with {name} {node.attributes[name]}, not {wanted}")
        return node.outputs, [self._graph.weights[index] for index in node.weights]

    def attribute(self, name: str) -> float:
        """A number of the next node, 0 if it has none of that name."""
        value = self._graph.nodes[self._next].attributes.get(name) if self.following else None
        return float(value) if isinstance(value, int | float) else 0.0

    def refuse(self, why: str) -> NoReturn:
        """Raises UnsupportedError about the node that was taken last."""
        place = self._next - 1
        node = self._graph.nodes[place]
        known = (self._names.get(id(self._graph.weights[index])) for index in node.weights)
        name = next((name for name in known if name), "")
        of_name = f" of {name}" if name else ""
        raise UnsupportedError(
            f"this model computes {node.op}{of_name} (node {place}) {why}; choose another --backend."
        )

    def alike(self, role: str, found: str) -> None:
        """Checks what the node that was taken last has, whose role comes in each layer.

        Raises UnsupportedError: the first layer has another.
        """
        first = self._of_layers.setdefault(role, found)
        if found != first:
            self.refuse(f"with {found}, where its first layer has {first}")

    def linear(self, value: int, role: str = "") -> tuple[int, HostLinear]:
        """Output and weight of the next node, a linear map of a value, whose sizes are those of its role."""
        (out,), (weight,) = self.take("linear", [value])
        linear = _as(HostLinear, weight)
        if role:
            self.alike(role, f"{linear.inputs} inputs and {linear.outputs} outputs")
        return out, linear

    def end(self) -> None:
        """Raises UnsupportedError: there are further nodes."""
        if self.following:
            self._next += 1
            self.refuse("behind all that the PyPTO programs compute")


class _Given(NamedTuple):
    """Inputs and sizes of all layers; inputs are numbers of values."""

    metadata: int
    cosines: int
    sines: int
    rows: int
    head_dim: int
    eps: float
    """Number under the root of all norms."""


def find_decoder(graph: Graph, names: WeightNames) -> FoundDecoder:
    """The decoder that a graph records.

    Raises UnsupportedError: it is another, whose first node that does not fit is named.
    """
    nodes = _Nodes(graph, names)
    inputs = {name: value.index for name, value in graph.inputs.items()}
    for name in ("token_ids", "positions", "rows"):
        inputs.setdefault(name, -1)
    metadata = graph.metadata[0].index if 0 in graph.metadata else -1
    (x,), (table,) = nodes.take("embedding", [inputs["token_ids"]], first_id=0)
    embedding = _as(HostLinear, table)
    rotary_scale = nodes.attribute("scale")
    (cosines, sines), (frequencies,) = nodes.take("rotary_table", [inputs["positions"]])
    eps, head_dim = nodes.attribute("eps"), 2 * len(_as(Tensor, frequencies))
    given = _Given(metadata, cosines, sines, inputs["rows"], head_dim, eps)
    layers, scale, is_last = list[DecoderLayer](), 0.0, False
    while not is_last:
        x, layer, scale, is_last = _find_layer(nodes, x, given)
        layers.append(layer)
    (h,), (final_norm,) = nodes.take("rms_norm", [x], eps=eps)
    _, head = nodes.linear(h)
    if head.outputs != embedding.outputs:
        nodes.refuse(f"with {head.outputs} outputs, where its embedding has {embedding.outputs}")
    _, (chosen,) = nodes.take("linear_argmax", [h], first_id=0)
    if chosen is not head:
        nodes.refuse("of another map than its logits")
    nodes.end()
    sizes = {
        "L": len(layers),
        "H": embedding.inputs,
        "QH": layers[0].out.inputs // head_dim,
        "KVH": layers[0].cache.keys.shape[1],
        "D": head_dim,
        "I": layers[0].down.inputs,
        "REAL_V": head.outputs,
    }
    return FoundDecoder(
        embedding,
        _as(Tensor, frequencies),
        rotary_scale,
        tuple(layers),
        _as(Tensor, final_norm),
        head,
        sizes,
        eps,
        scale,
    )


def _find_layer(nodes: _Nodes, x: int, given: _Given) -> tuple[int, DecoderLayer, float, bool]:
    """A layer of hidden states `x`: what it makes of them, its weights, its scale, and True if it is the last.

    Raises UnsupportedError: a node is another, or other than in the first layer.
    """
    eps, head_dim = given.eps, given.head_dim
    (h,), (attention_norm,) = nodes.take("rms_norm", [x], eps=eps)
    h, qkv = nodes.linear(h, "qkv")
    norm_eps = nodes.attribute("eps")
    (queries,), (held, *norms) = nodes.take(
        "rotate_and_cache",
        [h, given.metadata, given.cosines, given.sines],
        head_dim=head_dim,
        norms_all_heads=False,
    )
    if len(norms) != 2:
        nodes.refuse("without norms of the queries and keys of each head")
    if norm_eps != eps:
        nodes.refuse(f"with eps {norm_eps}, not {eps}")
    cache = _as(KVCache, held)
    nodes.alike("cache", f"KV of {list(cache.keys.shape)} in {cache.keys.dtype}")
    scale = nodes.attribute("scale")
    plain = {"window": None, "softcap": None, "chunk": None, "causal": True}
    (h,), (attended, *sinks) = nodes.take(
        "attention", [queries, given.metadata], head_dim=head_dim, **plain
    )
    if sinks:
        nodes.refuse("with attention sinks")
    if attended is not cache:
        nodes.refuse("over the KV of another layer")
    nodes.alike("attention", f"scale {scale}")
    is_last = nodes.following == "select_rows"
    if is_last:
        (h,), _ = nodes.take("select_rows", [h, given.rows])
        (x,), _ = nodes.take("select_rows", [x, given.rows])
    h, out = nodes.linear(h, "out")
    (x,), _ = nodes.take("add", [x, h])
    (h,), (mlp_norm,) = nodes.take("rms_norm", [x], eps=eps)
    h, gate_up = nodes.linear(h, "gate_up")
    (h,), _ = nodes.take("silu_and_mul", [h])
    h, down = nodes.linear(h, "down")
    (x,), _ = nodes.take("add", [x, h])
    q_norm, k_norm = (_as(Tensor, norm) for norm in norms)
    layer = DecoderLayer(
        _as(Tensor, attention_norm),
        qkv,
        q_norm,
        k_norm,
        out,
        _as(Tensor, mlp_norm),
        gate_up,
        down,
        cache,
    )
    return x, layer, scale, is_last


def _as(kind: type[KindT], value: object) -> KindT:
    """A weight of a node, which is of a kind. Raises TypeError: it is of another."""
    if not isinstance(value, kind):
        raise TypeError(f"A weight is {type(value).__name__}, not {kind.__name__}.")
    return value


def choose_contract(found: FoundDecoder, contracts: Sequence[Contract]) -> Contract:
    """The contract of a decoder. Raises UnsupportedError: none is of its sizes, or it differs in a number."""
    problems = []
    for contract in contracts:
        problem = _problem(found, contract)
        if not problem:
            return contract
        problems.append(f"{contract.name}: {problem}")
    raise UnsupportedError(
        f"no PyPTO programs are of this model's shape ({'; '.join(problems)}); choose another --backend."
    )


def _problem(found: FoundDecoder, contract: Contract) -> str:
    """The first difference of a decoder from a contract; empty if there is none."""
    for symbol, size in found.sizes.items():
        if contract.sizes[symbol] != size:
            return f"{symbol} is {contract.sizes[symbol]}, the model has {size}"
    if found.eps != contract.eps:
        return f"norms have eps {contract.eps}, the model has {found.eps}"
    if abs(found.scale * found.sizes["D"] ** 0.5 - 1) > 1e-6:
        return f"scores are divided by the root of a head's elements, the model scales by {found.scale}"
    dtypes = {str(linear.dtype) for linear in found.linears}
    if dtypes != {str(contract.weight_dtype)}:
        return f"weights are {contract.weight_dtype}, the model has {', '.join(sorted(dtypes))}"
    kept = found.layers[0].cache.keys.dtype
    if kept != contract.programs["decode"].argument("keys").torch_dtype:
        return f"KV is {contract.programs['decode'].argument('keys').dtype}, the model keeps {kept}"
    return ""
