# SPDX-License-Identifier: Apache-2.0
"""8-bit floats of the format E4M3 (OCP 8-bit Floating Point, 2023): no infinities, and magnitudes up to 448."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
HIGHEST = 448.0


def to_e4m3(x: Tensor) -> Tensor:
    """x of any float dtype rounded half to even: `E4M3`. What lies beyond becomes ±448, and NaN stays NaN."""
    return x.clamp(-HIGHEST, HIGHEST).to(E4M3)
