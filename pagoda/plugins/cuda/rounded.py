# SPDX-License-Identifier: Apache-2.0
"""Values that only products with bfloat16 weights read: they are bfloat16 from the start, as products round them.

That is half the memory to write and to read, and kernels load such inputs without a detour over registers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from pagoda.backend.graph import Graph, Node
from pagoda.plugins.cuda.kernels.rows import WRITES_ANY
from pagoda.plugins.cuda.lowering import FUSED
from pagoda.plugins.cuda.weights import Dense, DeviceLinear

_WRITERS = WRITES_ANY | {FUSED, "attention"}
"""Operations whose kernels write their last output in any number format."""


def rounded_values(graph: Graph, nodes: Sequence[Node], apart: Collection[int]) -> frozenset[int]:
    """Values that `nodes` compute and that may be bfloat16; those `apart` are read by others."""
    written = {node.outputs[-1] for node in nodes if node.op in _WRITERS}
    rounding = set[int]()
    others = set(apart)
    for node in nodes:
        rounds = node.op == "linear" and _rounds(graph.weights[node.weights[0]])
        (rounding if rounds else others).update(node.inputs)
    return frozenset(written & rounding - others)


def _rounds(weight: object) -> bool:
    """True of a map whose inputs are rounded to bfloat16."""
    return isinstance(weight, DeviceLinear) and all(
        isinstance(segment, Dense) and segment.values.dtype == torch.bfloat16
        for segment in weight.segments
    )
