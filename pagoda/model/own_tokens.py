# SPDX-License-Identifier: Apache-2.0
"""Tokens of a step that a rank attends to, where each has requests of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagoda.backend.base import TokenBatch


@dataclass(frozen=True)
class OwnTokens:
    """Tokens that a rank attends to, of several that each have their own."""

    batch: TokenBatch
    rank: int
    counts: list[int]
    """Tokens of each rank; those of the step are in order of rank."""

    @classmethod
    def of(cls, batch: TokenBatch, rank: int, size: int) -> OwnTokens:
        """This rank's part of a step of all ranks; all of one that names no ranks."""
        ranks = batch.ranks
        if ranks is None:
            return cls(batch, rank, [len(batch.token_ids) * (it == rank) for it in range(size)])
        counts = torch.zeros(size, dtype=torch.int64).index_add_(0, ranks, batch.query_lens)
        return cls(batch.of(ranks == rank), rank, counts.tolist())

    @property
    def rows(self) -> slice:
        """The rows of these tokens among those of the step."""
        first = sum(self.counts[: self.rank])
        return slice(first, first + self.counts[self.rank])

    def inputs(self, rows: Sequence[int] | None) -> dict[str, Tensor]:
        """Inputs that say how many tokens each rank has, and of `rows` of the step which are this one's."""
        tensors = {"token_counts": torch.tensor(self.counts)}
        if rows is not None:
            ends = torch.tensor(self.counts).cumsum(0)
            wanted = torch.tensor(sorted(rows), dtype=torch.int64)
            ranks = torch.bucketize(wanted, ends, right=True)
            tensors["row_counts"] = torch.bincount(ranks, minlength=len(ends))
            tensors["rows"] = wanted[ranks == self.rank] - self.rows.start
        return tensors

    @staticmethod
    def in_order(rows: Sequence[int], computed: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Results for `rows` of the step, of those in ascending order, as ranks compute them."""
        places = {row: place for place, row in enumerate(sorted(rows))}
        order = torch.tensor([places[row] for row in rows], dtype=torch.int64)
        return tuple(each[order.to(each.device)] for each in computed)
