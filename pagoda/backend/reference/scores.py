# SPDX-License-Identifier: Apache-2.0
"""Ways from products of queries and keys to scores, in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Scores(NamedTuple):
    """Makes scores of products of queries and keys."""

    softcap: float | None
    slopes: Tensor | None = None
    """[tiles, kv_heads, rows], of the place of a key behind its query (ALiBi), or numbers of heads."""
    distances: Tensor | None = None
    """[heads, 2 reach + 1], added by the place of a key behind its query (T5)."""

    def of_tiles(self, tiles: slice | Tensor) -> Scores:
        return self if self.slopes is None else self._replace(slopes=self.slopes[tiles])

    def added(self, of_rows: Tensor, behind: Tensor) -> Tensor:
        """Numbers that are added to scores, of `slopes` and places of keys behind queries."""
        if self.distances is None:
            return of_rows * behind
        reach = self.distances.shape[1] // 2
        return self.distances[of_rows.long(), (behind + reach).clamp(0, 2 * reach)]
