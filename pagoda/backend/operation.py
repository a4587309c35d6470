# SPDX-License-Identifier: Apache-2.0
"""Operations of a forward pass, as traces show them."""

from __future__ import annotations

from collections.abc import Mapping
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
