"""The decoder that programs compute, found in a recorded graph.

A graph is data: the nodes of a Qwen3 decoder come in one order, and their weights are what the programs take. The
graph is read node by node; the first that does not fit is named in the error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from pagoda.backend.base import KVCache, UnsupportedError
from pagoda.backend.graph import Graph, Node
from pagoda.backend.operation import WeightNames
from pagoda.backend.pypto.contract import Contract
from pagoda.backend.pypto.weights import HostLinear

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
        weights = [self._graph.weights[index] for index in node.weights]
        if node.op != op or list(node.inputs) != list(inputs):
            self.refuse(node, f"where the PyPTO programs compute {op}")
        for name, wanted in attributes.items():
            if node.attributes[name] != wanted:
                self.refuse(node, f"with {name} {node.attributes[name]}, not {wanted}")
        self._next += 1
        return node.outputs, weights

    def attribute(self, name: str) -> float:
        """A number of the next node, 0 if it has none of that name."""
        value = self._graph.nodes[self._next].attributes.get(name) if self.following else None
        return float(value) if isinstance(value, int | float) else 0.0

    def refuse(self, node: Node, why: str) -> None:
        """Raises UnsupportedError about a node."""
        known = (self._names.get(id(self._graph.weights[index])) for index in node.weights)
        name = next((name for name in known if name), "")
        place = f" of {name}" if name else ""
        raise UnsupportedError(
            f"this model computes {node.op}{place} (node {self._graph.nodes.index(node)}) {why}; "
            "choose another --backend."
        )

    def linear(self, value: int) -> tuple[int, HostLinear]:
        """Output and weight of the next node, a linear map of a value."""
        (out,), (weight,) = self.take("linear", [value])
        return out, _as(HostLinear, weight)

    def end(self) -> None:
        """Raises UnsupportedError: there are further nodes."""
        if self.following:
            self.refuse(self._graph.nodes[self._next], "behind all that the PyPTO programs compute")


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
    eps, layers = nodes.attribute("eps"), list[DecoderLayer]()
    head_dim, scale, is_last = 2 * len(_as(Tensor, frequencies)), 0.0, False
    while not is_last:
        (h,), (attention_norm,) = nodes.take("rms_norm", [x], eps=eps)
        h, qkv = nodes.linear(h)
        norm_eps = nodes.attribute("eps")
        (queries,), (cache, *norms) = nodes.take(
            "rotate_and_cache",
            [h, metadata, cosines, sines],
            head_dim=head_dim,
            norms_all_heads=False,
        )
        if len(norms) != 2 or norm_eps != eps:
            raise UnsupportedError(
                "the PyPTO programs norm the queries and keys of each head, this model does not."
            )
        scale = nodes.attribute("scale")
        plain = {"window": None, "softcap": None, "chunk": None, "causal": True}
        (h,), held = nodes.take("attention", [queries, metadata], head_dim=head_dim, **plain)
        if len(held) > 1:
            raise UnsupportedError("the PyPTO programs have no attention sinks, this model has.")
        is_last = nodes.following == "select_rows"
        if is_last:
            (h,), _ = nodes.take("select_rows", [h, inputs["rows"]])
            (x,), _ = nodes.take("select_rows", [x, inputs["rows"]])
        h, out = nodes.linear(h)
        (x,), _ = nodes.take("add", [x, h])
        (h,), (mlp_norm,) = nodes.take("rms_norm", [x], eps=eps)
        h, gate_up = nodes.linear(h)
        (h,), _ = nodes.take("silu_and_mul", [h])
        h, down = nodes.linear(h)
        (x,), _ = nodes.take("add", [x, h])
        q_norm, k_norm = (_as(Tensor, norm) for norm in norms)
        layers.append(
            DecoderLayer(
                _as(Tensor, attention_norm),
                qkv,
                q_norm,
                k_norm,
                out,
                _as(Tensor, mlp_norm),
                gate_up,
                down,
                _as(KVCache, cache),
            )
        )
    (h,), (final_norm,) = nodes.take("rms_norm", [x], eps=eps)
    _, head = nodes.linear(h)
    nodes.take("linear_argmax", [h], first_id=0)
    nodes.end()
    kv_heads = layers[0].cache.keys.shape[1]
    sizes = {
        "L": len(layers),
        "H": embedding.inputs,
        "QH": layers[0].out.inputs // head_dim,
        "KVH": kv_heads,
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
