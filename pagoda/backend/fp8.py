# SPDX-License-Identifier: Apache-2.0
"""8-bit floats of the format E4M3 (OCP 8-bit Floating Point, 2023): no infinities, and magnitudes up to 448."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
HIGHEST = 448.0


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x of any float dtype rounded half to even to 8-bit floats of `dtype`. What lies beyond their range becomes
    the highest, and NaN stays NaN."""
    highest = torch.finfo(dtype).max
    return x.clamp(-highest, highest).to(dtype)


def to_e4m3(x: Tensor) -> Tensor:
    """x as `rounded` to `E4M3`, whose highest is 448."""
    return rounded(x, E4M3)
