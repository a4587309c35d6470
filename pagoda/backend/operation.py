# SPDX-License-Identifier: Apache-2.0
"""Operations of a forward pass, as traces show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "plan",
    "embedding",
    "linear",
    "low_rank",
    "norm",
    "rotary",
    "attention",
    "state",
    "activation",
    "experts",
    "add",
    "select",
    "all_reduce",
    "all_gather",
]

WeightNames = Mapping[int, str]
"""Names of weights in the model, such as `layers.3.qkv`, by `id` of the weight."""


@dataclass(frozen=True)
class Operation:
    """One of those that a recorded pass repeats in every step."""

    name: str
    kind: Kind
    weight_bytes: int = 0
    """Weights that a step reads; of experts all that are held, though few tokens go through some only."""
    flops_per_token: int = 0
    """Floating-point operations of products with weights, without attention over a context."""


class OperationNamer:
    """Names operations after their weights, and others after the layer that they are in."""

    def __init__(self, weights: WeightNames) -> None:
        self._weights = weights
        self._layer = ""

    def name(self, kind: Kind, weight: object = None) -> str:
        """Name of the next operation; the caller asks in the order of computation."""
        name = None if weight is None else self._weights.get(id(weight))
        if name is None:
            return f"{self._layer}{kind}"
        self._layer = name[: name.rfind(".") + 1]
        return name


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
    "counts": "counts",
}
"""Dtypes of inputs of operations by name; all others are float32."""
