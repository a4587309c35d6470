# SPDX-License-Identifier: Apache-2.0
"""Conversion of weights of 8-bit floats and their scales to the dtype of activations.

Each number is multiplied by its scale in float32 and rounded once, so that nothing but that rounding is lost.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagoda.backend.rounding import row_slices
from pagoda.checkpoints.fp8_config import Fp8Scheme

_E4M3_IN_HALF = 2.0**8
"""Half precision has eight more exponents below one than E4M3 has."""


def convert_fp8(values: Tensor, scales: Tensor, scheme: Fp8Scheme, dtype: torch.dtype) -> Tensor:
    """`values` [out, in] of 8-bit floats times `scales`, which are as `Fp8Scheme.scales_shape` says: `dtype`."""
    outputs, inputs = values.shape
    out = torch.empty((outputs, inputs), dtype=dtype)
    by_input = scales.float()
    if values.dtype == torch.float8_e4m3fn:
        by_input = by_input * _E4M3_IN_HALF
    if scheme.inputs is not None:
        by_input = by_input.repeat_interleave(scheme.inputs, dim=1)[:, :inputs]
    block_of = torch.arange(outputs) // (scheme.outputs or outputs)
    for rows in row_slices(values):
        out[rows] = _halves(values[rows]).float().mul_(by_input[block_of[rows]])
    return out


def is_finite(values: Tensor) -> bool:
    """Returns True if 8-bit floats hold neither NaN nor infinities, whose codes are the highest of either sign."""
    lowest = 127 if values.dtype == torch.float8_e4m3fn else 124
    return int(values.view(torch.uint8).bitwise_and(127).max()) < lowest


def _halves(values: Tensor) -> Tensor:
    """`values` as float16, those of E4M3 divided by `_E4M3_IN_HALF`.

    The bits of either format are those of a float16, behind a sign, but for the bias of the exponent. Conversion
    by torch takes ten times as long.
    """
    wide = values.view(torch.int8).to(torch.int16)
    if values.dtype == torch.float8_e4m3fn:
        # The sign, which fills the upper bits, stays in the uppermost alone.
        wide = wide.bitwise_left_shift_(7).bitwise_and_(~(1 << 14))
    else:
        wide = wide.bitwise_left_shift_(8)
    return wide.view(torch.float16)
