"""What traces say of the operations of a forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "plan",
    "embedding",
    "linear",
    "norm",
    "rotary",
    "attention",
    "activation",
    "experts",
    "add",
    "all_reduce",
]

WeightNames = Mapping[int, str]
"""What a model calls its weights, such as `layers.3.qkv`, by their `id`."""


@dataclass(frozen=True)
class Operation:
    """One of those that a recorded pass repeats in every step."""

    name: str
    kind: Kind
    weight_bytes: int = 0
    """Weights that a step reads; of experts all that are held, though few tokens go through some only."""
    flops_per_token: int = 0
    """Of products with weights; attention over a context is not among them."""


class OperationNamer:
    """Names operations after their weights, and others after the layer that they are in."""

    def __init__(self, weights: WeightNames) -> None:
        self._weights = weights
        self._layer = ""

    def name(self, kind: Kind, weight: object = None) -> str:
        """Of the next operation; operations are asked for in the order in which they are computed."""
        name = None if weight is None else self._weights.get(id(weight))
        if name is None:
            return f"{self._layer}{kind}"
        self._layer = name[: name.rfind(".") + 1]
        return name
