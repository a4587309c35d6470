# SPDX-License-Identifier: Apache-2.0
"""Adapters of linear layers: what they add is a product of two narrow matrices (LoRA, Hu et al. 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class LowRank:
    """Matrices of one adapter for one linear map: it adds `scale * up (down x)`."""

    down: Tensor
    """[rank, inputs]."""
    up: Tensor
    """[outputs, rank]."""
    scale: float


@dataclass(frozen=True)
class LowRankPart:
    """Matrices of one adapter as a backend lays them out."""

    rank: int
    scale: float
    down: Tensor
    up: Tensor


@dataclass(frozen=True, eq=False)
class LowRankMaps:
    """Low-rank maps that adapters add to a linear layer, whose outputs may be of several parts.

    A backend fills them (`Backend.set_low_rank`); they change between steps only.
    """

    inputs: int
    outputs: tuple[int, ...]
    """Outputs of each part, one behind the other: those of queries, keys and values."""
    dtype: torch.dtype
    """Number format of the matrices; a product of bfloat16 rounds its inputs to bfloat16."""
    parts: dict[int, tuple[LowRankPart | None, ...]] = field(default_factory=dict)
    """Parts by number of the adapter; None where the adapter adds nothing."""

    def check(self, parts: Sequence[LowRank | None]) -> None:
        """Raises ValueError: matrices do not fit the layer."""
        if len(parts) != len(self.outputs):
            raise ValueError(f"A layer of {len(self.outputs)} parts takes no {len(parts)}.")
        for part, outputs in zip(parts, self.outputs, strict=True):
            if part is None:
                continue
            rank = part.down.shape[0]
            if (part.down.shape, part.up.shape) != ((rank, self.inputs), (outputs, rank)):
                raise ValueError(
                    f"Matrices of {list(part.down.shape)} and {list(part.up.shape)} do not fit a map of "
                    f"{self.inputs} inputs and {outputs} outputs."
                )


def low_rank_dtype(dtype: torch.dtype) -> torch.dtype:
    """Number format of adapters of a model whose activations are of `dtype`."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
