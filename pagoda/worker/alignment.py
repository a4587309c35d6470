# SPDX-License-Identifier: Apache-2.0
"""Places of tokens in audio, by the heads of a decoder that look at what is said (openai-whisper's `timing.py`).

How much each token attends to each position is compared with the other tokens, smoothed, and the cheapest way
through all tokens and positions is searched (dynamic time warping, Giorgino 2009). Numbers are transformers'.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_WIDTH = 7
"""Positions of which the median is taken."""


def places_of(
    queries: Tensor,
    keys: Tensor,
    positions: int,
    num_heads: int,
    reduce: Callable[[Tensor], Tensor],
) -> Tensor:
    """The first position at which the way is at each token: [n] float32.

    `queries` [n, heads, head_dim], scaled, and `keys` [heads, all positions, head_dim] are those of this rank's
    heads among `num_heads`; `reduce` adds up a matrix [n, positions] over the ranks. The first `positions` count.
    """
    total = torch.zeros(len(queries), min(positions, keys.shape[1]))
    for head, own in enumerate(keys):
        weights = (queries[:, head] @ own.T).softmax(-1)[:, : total.shape[1]]
        deviation, mean = torch.std_mean(weights, dim=0, correction=0, keepdim=True)
        total += _smoothed(((weights - mean) / deviation).nan_to_num(0.0))
    return _way(-(reduce(total) / num_heads).double())


def _smoothed(x: Tensor) -> Tensor:
    """The median of each position of x [n, positions] and its neighbours, which are mirrored at both ends."""
    half, count = _WIDTH // 2, x.shape[1]
    if count <= half:
        return x
    padded = F.pad(x[None], (half, half), mode="reflect")[0]
    parts = [padded[:, first : first + count] for first in range(_WIDTH)]
    for end in range(_WIDTH - 1, half - 1, -1):  # the highest of what is left goes to the end
        for place in range(end):
            low, high = parts[place : place + 2]
            parts[place : place + 2] = torch.minimum(low, high), torch.maximum(low, high)
    return parts[half]


def _way(matrix: Tensor) -> Tensor:
    """The first column of each row on the cheapest way through a matrix [n, m] float64: [n] float32.

    A diagonal is computed at a time; its cells depend on those of the two before it. Costs are in float32."""
    n, m = matrix.shape
    rows = F.pad(matrix, (0, n), value=torch.inf).flatten()
    diagonals = rows[: n * (n + m - 1)].view(n, n + m - 1).T.contiguous()
    costs = torch.full((n + m + 1, n + 1), torch.inf)
    costs[0, 0] = 0.0
    for before, last, own, found in zip(costs, costs[1:], diagonals, costs[2:], strict=False):
        least = torch.minimum(torch.minimum(before[:-1], last[:-1]), last[1:])
        found[1:] = own + least
    both, down, along = costs[:-2, :-1], costs[1:-1, :-1], costs[1:-1, 1:]
    steps = torch.full(both.shape, 2, dtype=torch.uint8)
    steps[(down < both) & (down < along)] = 1
    steps[(both < down) & (both < along)] = 0
    found_at, row, column = [0] * n, n, m
    while row and column:
        found_at[row - 1] = column - 1
        step = int(steps[row + column - 2, row - 1])
        row, column = row - (step != 2), column - (step != 1)
    return torch.tensor(found_at, dtype=torch.float32)
