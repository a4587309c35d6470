# SPDX-License-Identifier: Apache-2.0
"""Fixed positions of sines and cosines (Vaswani et al. 2017, part 3.5)."""

from __future__ import annotations

import torch
from torch import Tensor


def sinusoids(count: int, size: int) -> Tensor:
    """Embeddings [count, size] float32 of positions: sines of all frequencies, then cosines."""
    places = torch.arange(count, dtype=torch.float64)[:, None]
    powers = torch.arange(0, size, 2, dtype=torch.float64) / size
    angles = places / 10_000**powers
    return torch.cat((angles.sin(), angles[:, : size // 2].cos()), dim=1).float()
