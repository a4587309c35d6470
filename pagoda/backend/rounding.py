# SPDX-License-Identifier: Apache-2.0
"""Steps that all ways of rounding weights share."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

RANGE_SHRINKS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.75, 0.7)
"""Parts of a group's range that searches for scales try; what lies outside is clamped."""


def slices(count: int, at_once: int) -> Iterator[slice]:
    for start in range(0, count, at_once):
        yield slice(start, start + at_once)


def row_slices(values: Tensor, weights_at_once: int = 2**18) -> Iterator[slice]:
    """Slices of the rows of a weight [out, in], whose float32 values stay in the processor's cache."""
    return slices(len(values), max(1, weights_at_once // values.shape[1]))


def divisors(scales: Tensor) -> Tensor:
    """Scales to divide by; a scale of zero becomes infinity, so that all codes are that of zero."""
    return scales.masked_fill(scales == 0, torch.inf)
