# SPDX-License-Identifier: Apache-2.0
"""Slopes of heads whose scores depend on the distance of tokens (ALiBi)."""

from __future__ import annotations

import torch
from torch import Tensor


def alibi_slopes(num_heads: int) -> Tensor:
    """Slopes [num_heads] float32: 2^-x, x going up to 8 in equal steps (Press et al. 2021).

    Where heads are no power of two n, those of the next lower one are followed by every second one of 2n.
    """
    power = 1 << (num_heads - 1).bit_length()
    slopes = torch.exp2(torch.arange(1, power + 1) * (-8 / power))
    if power == num_heads:
        return slopes
    return torch.cat((slopes[1::2], slopes[::2]))[:num_heads]
