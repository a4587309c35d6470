"""Steps that all ways of rounding weights share."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def row_slices(values: Tensor, weights_at_once: int = 2**18) -> Iterator[slice]:
    """Slices of the rows of a weight [out, in], whose float32 values stay in the processor's cache."""
    step = max(1, weights_at_once // values.shape[1])
    for start in range(0, len(values), step):
        yield slice(start, start + step)


def divisors(scales: Tensor) -> Tensor:
    """Scales to divide by; a scale of zero becomes infinity, so that all codes are that of zero."""
    return scales.masked_fill(scales == 0, torch.inf)
