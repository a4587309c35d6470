# SPDX-License-Identifier: Apache-2.0
"""Operations of the forward pass by name, what goes in and out of each, and the builder that records them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import TYPE_CHECKING

from pagoda.backend.family_operations import SPECS
from pagoda.backend.graph import Attribute, Dtype, Graph, LinearShape, Node, RotaryTable, Value
from pagoda.backend.operation import OperationSpec
from pagoda.backend.state_operations import STATE_OPERATIONS

if TYPE_CHECKING:
    from pagoda.backend.base import Experts, HeadNorms, KVCache
    from pagoda.backend.low_rank import LowRankMaps
    from pagoda.parallel.collectives import Collectives

_SCORES = ("head_dim", "scale", "window", "softcap", "chunk", "causal")
OPERATIONS: Mapping[str, OperationSpec] = {
    "embedding": OperationSpec("embedding", ("token_ids",), ("table",), ("first_id", "vocab_size")),
    "linear": OperationSpec("linear", ("x",), ("weight",)),
    "linear_argmax": OperationSpec("linear", ("x",), ("weight",), ("first_id",)),
    "add_low_rank": OperationSpec("low_rank", ("out", "x", "adapters"), ("maps",)),
    "all_reduce": OperationSpec("all_reduce", ("x",), ("group",)),
    "gather_rows": OperationSpec("all_gather", ("x", "counts"), ("group",)),
    "scatter_rows": OperationSpec("all_reduce", ("x", "counts"), ("group",)),
    "all_gather": OperationSpec("all_gather", ("x",), ("group",), ("sizes",)),
    "all_gather_argmax": OperationSpec("all_gather", ("found",), ("group",)),
    "select_rows": OperationSpec("select", ("x", "rows"), any_rows=True),
    "own_rows": OperationSpec("select", ("x",), ("ranks",)),
    "share_rows": OperationSpec("all_gather", ("x", "positions"), ("ranks",)),
    "add": OperationSpec("add", ("x", "delta")),
    "rms_norm": OperationSpec("norm", ("x",), ("weight",), ("eps",)),
    "silu_and_mul": OperationSpec("activation", ("gate_up",)),
    "gelu_and_mul": OperationSpec("activation", ("gate_up",)),
    "gelu_erf_and_mul": OperationSpec("activation", ("gate_up",)),
    "swiglu_oai": OperationSpec("activation", ("gate_up",), (), ("alpha", "limit")),
    "gelu": OperationSpec("activation", ("x",)),
    "gelu_tanh": OperationSpec("activation", ("x",)),
    "silu": OperationSpec("activation", ("x",)),
    "relu": OperationSpec("activation", ("x",)),
    "columns": OperationSpec("select", ("x",), (), ("first", "count")),
    "xielu": OperationSpec("activation", ("x",), (), ("positive", "negative", "beta", "eps")),
    "clip": OperationSpec("activation", ("x",), (), ("limit",)),
    "sigmoid": OperationSpec("activation", ("x",)),
    "mul": OperationSpec("add", ("x", "factor")),
    "scale": OperationSpec("add", ("x",), (), ("factor",)),
    "softcap": OperationSpec("activation", ("x",), (), ("cap",)),
    "scale_rows": OperationSpec("add", ("x", "factors")),
    "position_scale": OperationSpec("rotary", ("positions",), (), ("period", "factor", "offset")),
    "sum_of_squares": OperationSpec("norm", ("qkv",), (), ("queries", "keys")),
    "norm_by_squares": OperationSpec(
        "norm",
        ("qkv", "squares"),
        ("query_norm", "key_norm"),
        ("queries", "keys", "all_queries", "all_keys", "eps"),
    ),
    "layer_norm_heads": OperationSpec(
        "norm", ("x",), ("weight", "bias"), ("elements", "head_dim", "eps")
    ),
    "rotate_heads": OperationSpec(
        "rotary", ("x", "cosines", "sines"), (), ("elements", "head_dim", "width")
    ),
    "layer_norm": OperationSpec("norm", ("x",), ("weight", "bias"), ("eps",)),
    "experts": OperationSpec("experts", ("x", "logits"), ("experts",)),
    "dispatched_experts": OperationSpec(
        "experts", ("x", "logits", "counts"), ("experts", "group"), ("first_experts",)
    ),
    "rotary_table": OperationSpec(
        "rotary", ("positions",), ("frequencies",), ("scale",), ("cosines", "sines")
    ),
    "rotate_and_cache": OperationSpec(
        "rotary",
        ("qkv", "metadata", "cosines?", "sines?"),
        ("cache", "query_norm?", "key_norm?"),
        ("head_dim", "eps", "norms_all_heads"),
    ),
    "attention": OperationSpec("attention", ("queries", "metadata"), ("cache", "sinks?"), _SCORES),
    "context_attention": OperationSpec(
        "attention", ("queries", "metadata"), ("cache", "ranks", "sinks?"), _SCORES
    ),
    "alibi_attention": OperationSpec(
        "attention", ("queries", "metadata"), ("cache", "slopes", "ranks?"), ("head_dim", "scale")
    ),
    "relative_attention": OperationSpec(
        "attention",
        ("queries", "metadata"),
        ("cache", "distances"),
        ("head_dim", "scale", "reach", "causal"),
    ),
    "disentangled_attention": OperationSpec(
        "attention",
        ("queries", "metadata", "of_queries", "of_keys"),
        ("cache",),
        ("head_dim", "scale", "buckets"),
    ),
    "head_linear": OperationSpec("linear", ("x",), ("weight",)),
    "rotate_and_cache_latents": OperationSpec(
        "rotary",
        ("queries", "latents", "metadata", "cosines?", "sines?"),
        ("cache", "norm"),
        ("eps",),
    ),
    "indexed_latent_attention": OperationSpec(
        "attention",
        ("latent_queries", "rotary_queries", "index_queries", "index_weights", "metadata"),
        ("cache",),
        ("scale", "most"),
    ),
    "latent_attention": OperationSpec(
        "attention",
        ("latent_queries", "rotary_queries", "metadata"),
        ("cache", "ranks?"),
        ("scale",),
    ),
    **STATE_OPERATIONS,
    **SPECS,
}
"""Operations by name. Inputs, then weights are the arguments of the reference's method of that name."""

IN_PLACE = frozenset({"all_reduce", "add_low_rank"})
"""Operations whose output may take the memory of their first input, which nothing else uses."""


class GraphBuilder:
    """Records operations, and checks shapes, once for all backends.

    Methods raise ValueError where values or weights do not fit each other.
    """

    def __init__(
        self,
        group: Collectives,
        *,
        batch_invariant: bool = True,
        context: Collectives | None = None,
    ) -> None:
        """`group` adds up and gathers results, `context` shares contexts; see `Graph.batch_invariant`."""
        self.group = group
        self.context: Sequence[Collectives] = () if context is None else (context,)
        self._batch_invariant = batch_invariant
        self._values: list[Value] = []
        self._nodes: list[Node] = []
        self._inputs: dict[str, Value] = {}
        self._metadata: dict[int, Value] = {}
        self._results: dict[str, Value] = {}
        self._weights: list[object] = []
        self._known_weights: dict[int, int] = {}
        self._used_up: set[int] = set()

    # ---- what goes in and out

    def input(self, name: str, width: int = 0, *, gathered: bool = False) -> Value:
        """An input of the graph, declared once: `token_ids`, `token_types`, `positions`, `adapters` [n] int64,
        `rows` [m] int64; any other name is [n, width] float32. Its rows are this rank's, or those of all ranks.
        """
        known = self._inputs.get(name)
        if known is not None:
            return known
        if name in ("token_ids", "token_types", "positions", "adapters", "rows"):
            value = self._value(1, selected=name == "rows", dtype="int64", gathered=gathered)
        else:
            value = self._value(width, gathered=gathered)
        self._inputs[name] = value
        return value

    def metadata(self, group: int = 0) -> Value:
        """Metadata of attention of a KV group, an input that is declared once."""
        if group not in self._metadata:
            self._metadata[group] = self._value(0, dtype="metadata")
        return self._metadata[group]

    def result(self, name: str, value: Value) -> None:
        """Makes a value a result of the graph, under one name."""
        if value in self._inputs.values():
            raise ValueError(f"The result {name} is not computed.")
        if value in self._results.values():
            raise ValueError(f"The result {name} has another name already.")
        self._results[name] = value

    def build(self) -> Graph:
        """The graph of what was recorded. Raises ValueError: a result was used up."""
        for name, value in self._results.items():
            if value.index in self._used_up:
                raise ValueError(f"The result {name} was used up.")
        return Graph(
            tuple(self._values),
            tuple(self._nodes),
            dict(self._inputs),
            dict(self._metadata),
            dict(self._results),
            tuple(self._weights),
            self._batch_invariant,
        )

    # ---- linear layers

    def embedding(
        self, token_ids: Value, table: LinearShape, first_id: int = 0, vocab_size: int | None = None
    ) -> Value:
        """Rows of a weight [outputs, hidden] that is an embedding table, without its bias: [n, hidden].

        The weight has the rows from `first_id` on of a table of `vocab_size`; None means that it ends the table.
        Rows that it does not have are zeros, so that those of all ranks add up to the table's.
        Steps raise IndexError: a token id is not from 0 to `vocab_size - 1`."""
        size = first_id + table.outputs if vocab_size is None else vocab_size
        return self.record(
            "embedding",
            [token_ids],
            [table],
            {"first_id": first_id, "vocab_size": size},
            table.inputs,
        )

    def linear(self, x: Value, weight: LinearShape) -> Value:
        """x [n, in] times the weight, plus the bias: [n, out].

        For a weight in bfloat16, x is rounded to bfloat16; for a quantized one, to integers.
        """
        _expect(x, weight.inputs)
        return self.record("linear", [x], [weight], {}, weight.outputs)

    def linear_argmax(self, x: Value, weight: LinearShape, first_id: int = 0) -> Value:
        """The highest output of `linear` for each row of x, without storing the others: [n, 3] int64.

        Its index plus `first_id`, the lowest of equal ones; the bits of its value in float32; and 1 if all outputs
        of the row are finite, without which the other two mean nothing.
        """
        _expect(x, weight.inputs)
        (out,) = self._node(
            "linear_argmax", [x], [weight], {"first_id": first_id}, [3], dtype="int64"
        )
        return out

    def add_low_rank(self, out: Value, x: Value, adapters: Value, maps: LowRankMaps) -> Value:
        """`out` [n, out] plus what each row's adapter makes of x [n, in]; `out` is not used after.

        Rows whose number in `adapters` [n] is below 0, or has no maps here, stay as they are. With maps in
        bfloat16, x and the scaled product of the first matrix are rounded to bfloat16.
        """
        _expect(x, maps.inputs)
        _expect(out, sum(maps.outputs))
        return self.record("add_low_rank", [out, x, adapters], [maps], {}, out.width)

    def experts(self, x: Value, logits: Value, experts: Experts[LinearShape]) -> Value:
        """Sends rows of x [n, hidden] through the experts with the highest of logits [n, num_experts].

        Of equal ones the first is taken. Gives [n, hidden], the sum in float32 of what they compute, in the
        order of their numbers, each times its weight by `ExpertRouting`. Experts that are not held here add
        nothing.
        """
        _expect(x, experts.gate[0].inputs)
        if logits.width != experts.routing.num_experts:
            raise ValueError(
                f"Logits of {logits.width} are not those of {experts.routing.num_experts} experts."
            )
        return self.record("experts", [x, logits], [experts], {}, x.width)

    # ---- several ranks

    def all_reduce(self, x: Value) -> Value:
        """The sum of x [n, d] over the ranks of the group; the same bits on all of them. x is not used after."""
        if self.group.size == 1:
            return x
        return self.record("all_reduce", [x], [self.group], {}, x.width)

    def all_gather(self, x: Value, sizes: Sequence[int]) -> Value:
        """The columns of all ranks side by side, `sizes[rank]` of each: [n, sum(sizes)]."""
        if self.group.size == 1:
            return x
        if len(sizes) != self.group.size or sizes[self.group.rank] != x.width:
            raise ValueError(f"A share of {x.width} is not that of a rank of {list(sizes)}.")
        attributes: dict[str, Attribute] = {"sizes": tuple(sizes)}
        return self.record("all_gather", [x], [self.group], attributes, sum(sizes))

    def all_gather_argmax(self, found: Value) -> Value:
        """The highest of all ranks' `linear_argmax` [n, 3], of equal ones that of the lowest rank."""
        if self.group.size == 1:
            return found
        (out,) = self._node(
            "all_gather_argmax", [found], [self.group], {}, [found.width], dtype="int64"
        )
        return out

    def counts(self, x: Value) -> Value:
        """Numbers of rows like those of x that each rank has (`pagoda.backend.own_rows`)."""
        name = f"{'row' if x.selected else 'token'}_counts"
        if name not in self._inputs:
            self._inputs[name] = self._value(0, dtype="counts")
        return self._inputs[name]

    # ---- rows

    def select_rows(self, x: Value, rows: Value) -> Value:
        """Rows of x [n, d] by the input `rows` [m], each once, maybe none: [m, d]."""
        if rows != self._inputs.get("rows"):
            raise ValueError("Rows are selected by the input `rows` only.")
        if x.selected:
            raise ValueError("Rows are selected once.")
        (out,) = self._node(
            "select_rows", [x, rows], [], {}, [x.width], selected=True, dtype=x.dtype
        )
        return out

    def own_rows(self, x: Value) -> Value:
        """The rows of x [n, d] that this context-parallel rank computes (`host.own_rows`)."""
        if not self.context:
            return x
        return self._node("own_rows", [x], self.context, {}, [x.width], own=True)[0]

    def share_rows(self, x: Value) -> Value:
        """The rows of all context-parallel ranks: [n, d]."""
        if not x.own:
            return x
        inputs = [x, self.input("positions")]
        return self._node("share_rows", inputs, self.context, {}, [x.width], own=False)[0]

    def add(self, x: Value, delta: Value) -> Value:
        """x + delta [n, d]."""
        _expect(delta, x.width)
        return self.record("add", [x, delta], [], {}, x.width)

    def rms_norm(self, x: Value, weight: Sized, eps: float) -> Value:
        """x [n, d] over the root of its mean square, times weight [d] float32 (Zhang and Sennrich 2019)."""
        _expect(x, len(weight))
        return self.record("rms_norm", [x], [weight], {"eps": eps}, x.width)

    def silu_and_mul(self, gate_up: Value) -> Value:
        """silu(left half) times right half of [n, 2 d]: [n, d] (SwiGLU, Shazeer 2020)."""
        return self._gated("silu_and_mul", gate_up)

    def gelu_and_mul(self, gate_up: Value) -> Value:
        """gelu(left half) times right half of [n, 2 d]: [n, d] (GEGLU, Shazeer 2020).

        GELU is x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), as in Gemma (Hendrycks and Gimpel 2016).
        """
        return self._gated("gelu_and_mul", gate_up)

    def gelu_erf_and_mul(self, gate_up: Value) -> Value:
        """gelu(left half) times right half of [n, 2 d], with the GELU of `gelu`: [n, d]."""
        return self._gated("gelu_erf_and_mul", gate_up)

    def swiglu_oai(self, gate_up: Value, *, alpha: float, limit: float) -> Value:
        """SwiGLU (up + 1) gate sigmoid(alpha gate) of pairs (gate, up) in rows [n, 2 d]: [n, d] (gpt-oss).

        Gates are at most `limit`; `up` is from -limit to limit.
        """
        return self._gated("swiglu_oai", gate_up, {"alpha": alpha, "limit": limit})

    def gelu(self, x: Value) -> Value:
        """x/2 (1 + erf(x / sqrt(2))) of [n, d] (Hendrycks and Gimpel 2016)."""
        return self._alike("gelu", x)

    def gelu_tanh(self, x: Value) -> Value:
        """GELU of [n, d] by the hyperbolic tangent, as in `gelu_and_mul`."""
        return self._alike("gelu_tanh", x)

    def silu(self, x: Value) -> Value:
        """x / (1 + e^-x) of [n, d] (Elfwing et al. 2018)."""
        return self._alike("silu", x)

    def relu(self, x: Value) -> Value:
        """x of [n, d] where it is above 0, else 0."""
        return self._alike("relu", x)

    def sigmoid(self, x: Value) -> Value:
        """1 / (1 + e^-x) of [n, d]."""
        return self._alike("sigmoid", x)

    def mul(self, x: Value, factor: Value) -> Value:
        """x times factor [n, d]."""
        _expect(factor, x.width)
        return self._alike("mul", x, [], None, factor)

    def scale_rows(self, x: Value, factors: Value) -> Value:
        """x [n, d] times a factor [n, 1] of each row."""
        _expect(factors, 1)
        return self._alike("scale_rows", x, [], None, factors)

    def scale(self, x: Value, factor: float) -> Value:
        """x [n, d] times a number."""
        return self._alike("scale", x, [], {"factor": factor})

    def softcap(self, x: Value, cap: float) -> Value:
        """cap tanh(x / cap) of [n, d] (Gemma 2)."""
        return self._alike("softcap", x, [], {"cap": cap})

    def layer_norm(self, x: Value, weight: Sized, bias: Sized, eps: float) -> Value:
        """x [n, d] less its mean, over the root of its variance, times weight, plus bias [d] (Ba et al. 2016)."""
        _expect(x, len(weight))
        _expect(x, len(bias))
        return self._alike("layer_norm", x, [weight, bias], {"eps": eps})

    def _alike(
        self,
        op: str,
        x: Value,
        weights: Sequence[object] = (),
        attributes: Mapping[str, Attribute] | None = None,
        *others: Value,
    ) -> Value:
        """A new value of the shape of x."""
        return self.record(op, [x, *others], weights, attributes or {}, x.width)

    def _gated(
        self, op: str, gate_up: Value, attributes: Mapping[str, Attribute] | None = None
    ) -> Value:
        if gate_up.width % 2:
            raise ValueError(f"Rows of {gate_up.width} are not of two halves.")
        return self.record(op, [gate_up], [], attributes or {}, gate_up.width // 2)

    # ---- attention

    def rotary_table(self, positions: Value, frequencies: Sized, scale: float) -> RotaryTable:
        """Cosines and sines of positions [n] times frequencies [d/2] float32, times `scale`."""
        half = len(frequencies)
        cosines, sines = self._node(
            "rotary_table", [positions], [frequencies], {"scale": scale}, [half, half]
        )
        return RotaryTable(cosines, sines)

    def rotate_and_cache(
        self,
        qkv: Value,
        metadata: Value,
        table: RotaryTable | None,
        cache: KVCache,
        norms: HeadNorms | None,
        *,
        num_heads: int,
        head_dim: int,
    ) -> Value:
        """Readies queries, keys and values, one behind the other in qkv [n, (heads + 2 kv_heads) d].

        Queries and keys are normed where there are norms, each of d elements, or all heads of a token together;
        then the pairs (i, i + r/2) of the first r elements of every head are rotated by a table [n, r/2] (Su et
        al. 2021, GPT-NeoX order), or none without a table (NoPE, Kazemnejad et al. 2023). Keys and values go to
        the blocks of their sequences; returns queries [n, heads d].
        """
        kv_width, rest = divmod(qkv.width - num_heads * head_dim, 2)
        if kv_width <= 0 or rest or kv_width % head_dim:
            raise ValueError(
                f"Rows of {qkv.width} are not {num_heads} queries, keys and values of {head_dim}."
            )
        if table is not None and 2 * table.cosines.width > head_dim:
            raise ValueError(
                f"A rotary table of {2 * table.cosines.width} elements does not fit heads of {head_dim}."
            )
        weights: list[object] = [cache]
        norms_all_heads = False
        if norms is not None:
            sizes = (len(norms.queries), len(norms.keys))
            norms_all_heads = sizes == (num_heads * head_dim, kv_width) != (head_dim, head_dim)
            if not norms_all_heads and sizes != (head_dim, head_dim):
                raise ValueError(
                    f"Norms of {sizes} elements fit neither heads of {head_dim} nor all of a token."
                )
            weights += [norms.queries, norms.keys]
        return self.record(
            "rotate_and_cache",
            [qkv, metadata, *(table or ())],
            weights,
            {
                "head_dim": head_dim,
                "eps": 0.0 if norms is None else norms.eps,
                "norms_all_heads": norms_all_heads,
            },
            num_heads * head_dim,
        )

    def attention(
        self,
        queries: Value,
        metadata: Value,
        cache: KVCache,
        *,
        head_dim: int,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        sinks: Sized | None = None,
        chunk: int | None = None,
        causal: bool = True,
    ) -> Value:
        """Attention of queries [n, heads d] over cached tokens of their sequences up to themselves: [n, heads d].

        Without `causal`, a token sees all tokens of its sequence, those behind it too, as encoders have it; then
        all of a sequence is computed in one step. With `window`, a token sees itself and the `window - 1` before
        it, and as many behind it if it sees any there. With `chunk`, it sees those from the
        last multiple of `chunk` on, itself included (Llama 4). With `softcap` c, scores s become
        c tanh(s / c) (Gemma 2). Sinks [heads] float32 are one more score of each head, whose value is zero
        (gpt-oss; Xiao et al. 2023).
        """
        if sinks is not None and len(sinks) * head_dim != queries.width:
            raise ValueError(
                f"{len(sinks)} sinks are not those of {queries.width // head_dim} heads."
            )
        for what, limit in (("window", window), ("chunk", chunk), ("softcap", softcap)):
            if limit is not None and limit <= 0:
                raise ValueError(f"A {what} is above 0, not {limit}.")
        if not causal and chunk is not None:
            raise ValueError("Chunks are of causal attention.")
        return self.record(
            "context_attention" if self.context else "attention",
            [queries, metadata],
            [cache, *self.context] if sinks is None else [cache, *self.context, sinks],
            {
                "head_dim": head_dim,
                "scale": scale,
                "window": window,
                "softcap": softcap,
                "chunk": chunk,
                "causal": causal,
            },
            queries.width,
        )

    # ---- recording

    def record(
        self,
        op: str,
        inputs: Sequence[Value],
        weights: Sequence[object],
        attributes: Mapping[str, Attribute],
        width: int,
        *,
        gathered: bool | None = None,
    ) -> Value:
        """An operation that another module checks (`pagoda.backend.state_layers`): its output, [n, width]."""
        (out,) = self._node(op, inputs, weights, attributes, [width], gathered=gathered)
        return out

    def _value(
        self,
        width: int,
        *,
        selected: bool = False,
        dtype: Dtype = "float32",
        own: bool = False,
        gathered: bool = False,
    ) -> Value:
        value = Value(len(self._values), width, selected, dtype, own, gathered)
        self._values.append(value)
        return value

    def _node(
        self,
        op: str,
        inputs: Sequence[Value],
        weights: Sequence[object],
        attributes: Mapping[str, Attribute],
        widths: Sequence[int],
        *,
        selected: bool | None = None,
        own: bool | None = None,
        dtype: Dtype = "float32",
        gathered: bool | None = None,
    ) -> list[Value]:
        """Values of a new node, with rows like those of its first input unless `selected` or `gathered` says
        otherwise."""
        spec = OPERATIONS[op]
        spec.check(op, {"inputs": len(inputs), "weights": len(weights)})
        spec.check_dtypes(op, [value.dtype for value in inputs])
        if tuple(attributes) != spec.attributes:
            raise ValueError(f"{op} takes attributes {', '.join(spec.attributes)}.")
        rows = {(value.selected, value.own, value.gathered) for value in inputs if value.width}
        if selected is own is None and len(rows) != 1:
            raise ValueError(f"The inputs of {op} have rows of the same tokens.")
        used_up = self._used_up.intersection(value.index for value in inputs)
        if used_up:
            raise ValueError(f"{op} reads a value that was used up.")
        outputs = [
            self._value(
                width,
                selected=inputs[0].selected if selected is None else selected,
                own=inputs[0].own if own is None else own,
                dtype=dtype,
                gathered=inputs[0].gathered if gathered is None else gathered,
            )
            for width in widths
        ]
        read, written = (tuple(value.index for value in part) for part in (inputs, outputs))
        used = tuple(map(self._weight, weights))
        self._nodes.append(Node(op, read, written, used, dict(attributes)))
        if op in IN_PLACE:
            self._used_up.add(inputs[0].index)
        return outputs

    def _weight(self, weight: object) -> int:
        index = self._known_weights.setdefault(id(weight), len(self._weights))
        if index == len(self._weights):
            self._weights.append(weight)
        return index


def _expect(x: Value, width: int) -> None:
    if x.width != width:
        raise ValueError(f"Rows of {x.width} do not fit a weight of {width} inputs.")
