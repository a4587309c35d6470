# SPDX-License-Identifier: Apache-2.0
"""Operations of the forward pass by name: what goes in and out of each, and its attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pagoda.backend.operation import Kind


@dataclass(frozen=True)
class OperationSpec:
    """Arity of an operation; names with a question mark at their end are optional, and come last."""

    kind: Kind
    """Kind of the operation in traces."""
    inputs: tuple[str, ...]
    weights: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("out",)
    any_rows: bool = False
    """True where rows of the first input may be of any dtype; others are of the dtype of their name."""

    def check(self, op: str, counts: Mapping[str, int]) -> None:
        """Raises ValueError: a node has too few or too many inputs or weights; `counts` has both by field name."""
        for field, count in counts.items():
            names: tuple[str, ...] = getattr(self, field)
            least = sum(not name.endswith("?") for name in names)
            if not least <= count <= len(names):
                raise ValueError(f"{op} takes {field} {', '.join(names)}, not {count} of them.")

    def check_dtypes(self, op: str, dtypes: Sequence[str]) -> None:
        """Raises ValueError: an input of a node is of a dtype that the operation does not compute with."""
        for name, dtype in zip(self.inputs, dtypes, strict=False):
            wanted = _DTYPES.get(name, "float32")
            if self.any_rows and name == self.inputs[0] and dtype != "metadata":
                continue
            if dtype != wanted:
                raise ValueError(f"{op} takes {name.removesuffix('?')} of {wanted}, not {dtype}.")


_DTYPES = {
    **dict.fromkeys(("token_ids", "positions", "adapters", "rows", "found"), "int64"),
    "metadata": "metadata",
}
"""Dtypes of inputs of operations by name; all others are float32."""


OPERATIONS: Mapping[str, OperationSpec] = {
    "embedding": OperationSpec("embedding", ("token_ids",), ("table",), ("first_id", "vocab_size")),
    "linear": OperationSpec("linear", ("x",), ("weight",)),
    "linear_argmax": OperationSpec("linear", ("x",), ("weight",), ("first_id",)),
    "add_low_rank": OperationSpec("low_rank", ("out", "x", "adapters"), ("maps",)),
    "all_reduce": OperationSpec("all_reduce", ("x",), ("group",)),
    "all_gather": OperationSpec("all_gather", ("x",), ("group",), ("sizes",)),
    "all_gather_argmax": OperationSpec("all_gather", ("found",), ("group",)),
    "select_rows": OperationSpec("select", ("x", "rows"), any_rows=True),
    "add": OperationSpec("add", ("x", "delta")),
    "rms_norm": OperationSpec("norm", ("x",), ("weight",), ("eps",)),
    "silu_and_mul": OperationSpec("activation", ("gate_up",)),
    "gelu_and_mul": OperationSpec("activation", ("gate_up",)),
    "swiglu_oai": OperationSpec("activation", ("gate_up",), (), ("alpha", "limit")),
    "gelu": OperationSpec("activation", ("x",)),
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
    "layer_norm": OperationSpec("norm", ("x",), ("weight", "bias"), ("eps",)),
    "experts": OperationSpec("experts", ("x", "logits"), ("experts",)),
    "rotary_table": OperationSpec(
        "rotary", ("positions",), ("frequencies",), ("scale",), ("cosines", "sines")
    ),
    "rotate_and_cache": OperationSpec(
        "rotary",
        ("qkv", "metadata", "cosines?", "sines?"),
        ("cache", "query_norm?", "key_norm?"),
        ("head_dim", "eps", "norms_all_heads"),
    ),
    "attention": OperationSpec(
        "attention",
        ("queries", "metadata"),
        ("cache", "sinks?"),
        ("head_dim", "scale", "window", "softcap", "chunk", "causal"),
    ),
    "short_conv": OperationSpec(
        "state", ("x", "metadata"), ("cache", "weight", "bias?"), ("gated", "silu")
    ),
    "gated_delta": OperationSpec(
        "state",
        ("qkv", "gates", "metadata"),
        ("cache", "decay", "dt_bias"),
        ("key_heads", "key_dim"),
    ),
    "head_linear": OperationSpec("linear", ("x",), ("weight",)),
    "rotate_and_cache_latents": OperationSpec(
        "rotary",
        ("queries", "latents", "metadata", "cosines?", "sines?"),
        ("cache", "norm"),
        ("eps",),
    ),
    "latent_attention": OperationSpec(
        "attention", ("latent_queries", "rotary_queries", "metadata"), ("cache",), ("scale",)
    ),
    "gated_head_norm": OperationSpec("norm", ("x", "gate"), ("weight",), ("head_dim", "eps")),
}
"""Operations by name. Inputs, then weights are the arguments of the reference's method of that name."""

IN_PLACE = frozenset({"all_reduce", "add_low_rank"})
"""Operations whose output may take the memory of their first input, which nothing else uses."""
