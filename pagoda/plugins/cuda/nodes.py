# SPDX-License-Identifier: Apache-2.0
"""Lowering of the nodes of one graph: what they share, and the memory of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from pagoda.backend.graph import Graph, Node
from pagoda.plugins.cuda.adapters import AdapterTables
from pagoda.plugins.cuda.kernels.attention import SPLIT, Partials
from pagoda.plugins.cuda.runtime import Runtime
from pagoda.plugins.cuda.slot_mapping import Layout

TemplateT = TypeVar("TemplateT")
Values = list[Any]
"""Tensors of a step by the number of their value, places of metadata, and scratch memory behind them."""
Launch = Callable[[Values], None]
"""Launches the kernels of a node on the values of a step."""


@dataclass(frozen=True)
class StepShape:
    """Rows of a step, padding included, and memory for it."""

    num_tokens: int
    num_rows: int
    """Selected ones."""
    layouts: Mapping[int, Layout]
    """Layouts of metadata by the number of its value."""
    memory: Callable[[Hashable, int], Tensor]
    """Gives [bytes] uint8 of the device; steps that are captured may be given that of others of the same key."""

    def rows_of(self, *, selected: bool) -> int:
        return self.num_rows if selected else self.num_tokens

    def tensor(self, key: Hashable, dtype: torch.dtype, *shape: int) -> Tensor:
        """Memory of a dtype in a shape."""
        return self.memory(key, dtype.itemsize * math.prod(shape)).view(dtype).view(shape)

    def like(self, key: tuple[Hashable, ...], template: TemplateT) -> TemplateT:
        """A dataclass as the template, whose tensors have no memory, with memory for these."""
        own = {
            name: self.tensor((*key, name), value.dtype, *value.shape)
            for name, value in vars(template).items()
            if isinstance(value, Tensor)
        }
        return replace(template, **own)  # type: ignore[type-var]

    def floats(self, key: Hashable, *shape: int) -> Tensor:
        return self.tensor(key, torch.float32, *shape)


NewScratch = Callable[[StepShape], Any]


class Lowering:
    """Lowers the nodes of one graph; nodes share scratch memory of one kind."""

    def __init__(
        self,
        graph: Graph,
        runtime: Runtime,
        products_of: Callable[[Any], torch.dtype],
        adapters: AdapterTables,
        rounded: Collection[int] = (),
    ) -> None:
        """`products_of` says in which number format attention over a cache multiplies; values that are `rounded`
        are bfloat16."""
        self.adapters = adapters
        self.rounded = rounded
        self.graph = graph
        self.runtime = runtime
        self.products_of = products_of
        self.valid = len(graph.values)
        """Number of a tensor [1] int64: how many of the step's tokens are no padding."""
        self.scratch: list[NewScratch] = []
        """Makers of each piece of scratch memory; their numbers follow that of `valid`."""
        self._known: dict[Hashable, int] = {}

    def weights(self, node: Node) -> list[Any]:
        return [self.graph.weights[index] for index in node.weights]

    def attributes(self, node: Node) -> Mapping[str, Any]:
        """Numbers of a node, which are what its operation says."""
        return node.attributes

    def width(self, value: int) -> int:
        return self.graph.values[value].width

    def selected(self, value: int) -> bool:
        return self.graph.values[value].selected

    def new_scratch(self, key: Hashable, new: NewScratch) -> int:
        """Number of scratch memory that equal keys share."""
        if key not in self._known:
            self._known[key] = self.valid + 1 + len(self.scratch)
            self.scratch.append(new)
        return self._known[key]


def partials_of(lowering: Lowering, metadata: int, heads: int, value_dim: int) -> int:
    """Scratch memory of contexts that several programs share."""
    key = ("partials", metadata, heads, value_dim)

    def new(shape: StepShape) -> Partials | None:
        layout = shape.layouts[metadata]
        if not layout.shares_contexts:
            return None
        sizes = (-(-layout.context // SPLIT), layout.tokens, heads)
        return Partials(
            shape.floats((*key, "accumulated"), *sizes, value_dim),
            shape.floats((*key, "statistics"), *sizes, 2),
        )

    return lowering.new_scratch(key, new)
