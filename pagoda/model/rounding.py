# SPDX-License-Identifier: Apache-2.0
"""Integer groups with zero points: weights as files of other programs hold them, rounded by search.

A weight is `scale * (code - zero)` with a scale and an unsigned zero point for each group of inputs. The search
takes the range of a group and narrower ones, rounds to each, fits scales to codes by least squares, and keeps what
is nearest to the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagoda.backend.rounding import RANGE_SHRINKS, divisors, row_slices

_WEIGHTS_AT_ONCE = 2**16
"""Weights that are rounded together; the search keeps several values of each in the processor's cache."""


@dataclass(frozen=True)
class ZeroPointGroups:
    codes: Tensor
    """[out, in] uint8, below `2 ** bits`."""
    scales: Tensor
    """[out, in / group_size] float16 or bfloat16, exact in both."""
    zeros: Tensor | None
    """[out, in / group_size] uint8; None where all are `2 ** (bits - 1)`."""
    bits: int


def round_symmetric(
    values: Tensor, bits: int, group_size: int, scale_dtype: torch.dtype
) -> ZeroPointGroups:
    """Rounds a weight [out, in]; each group's highest magnitude becomes the highest code or its mirror image."""
    top = 2 ** (bits - 1) - 1
    codes, scales = _empty(values, group_size, scale_dtype)
    for rows in row_slices(values, _WEIGHTS_AT_ONCE):
        groups = _grouped(values[rows], group_size)
        scale = _exact(groups.abs().amax(-1) / top, scale_dtype)
        scales[rows] = scale
        steps = (groups / divisors(scale)[..., None]).round_().clamp_(-top, top)
        codes[rows] = (steps + 2 ** (bits - 1)).flatten(1)
    return ZeroPointGroups(codes, scales, None, bits)


def round_asymmetric(
    values: Tensor,
    bits: int,
    group_size: int,
    scale_dtype: torch.dtype,
    importance: Tensor | None = None,
) -> ZeroPointGroups:
    """Rounds a weight [out, in] with the least sum of squared errors that the search finds.

    `importance` [in] weighs the squared errors of the weights of each input, such as its mean square.
    """
    codes, scales = _empty(values, group_size, scale_dtype)
    zeros = torch.empty(scales.shape, dtype=torch.uint8)
    weigh = None if importance is None else importance.float().view(1, -1, group_size)
    for rows in row_slices(values, _WEIGHTS_AT_ONCE):
        found = _search(_grouped(values[rows], group_size), bits, scale_dtype, weigh)
        codes[rows], scales[rows], zeros[rows] = found[0].flatten(1), found[1], found[2]
    return ZeroPointGroups(codes, scales, zeros, bits)


def _search(
    groups: Tensor, bits: int, scale_dtype: torch.dtype, weigh: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [out, n, size], scales and zero points [out, n] of groups [out, n, size]."""
    top = 2**bits - 1
    low, high = groups.amin(-1).clamp_(max=0), groups.amax(-1).clamp_(min=0)
    best = torch.full_like(low, torch.inf)
    scales, zeros = torch.zeros_like(low), torch.zeros_like(low)

    def try_out(scale: Tensor, zero: Tensor) -> Tensor:
        """Keeps scale and zero point where they are better; returns the integers that they round to."""
        nonlocal best, scales, zeros
        integers = _integers(groups, scale, zero, top)
        error = (groups - integers * scale[..., None]).square_()
        total = (error if weigh is None else error.mul_(weigh)).sum(-1)
        better = total < best
        best = torch.where(better, total, best)
        scales, zeros = torch.where(better, scale, scales), torch.where(better, zero, zeros)
        return integers

    for shrink in RANGE_SHRINKS:
        scale = _exact((high - low) * (shrink / top), scale_dtype)
        try_out(scale, (-low * shrink / divisors(scale)).round_().clamp_(0, top))
    middle = zeros
    for shift in (0, -1, 1):
        zero, scale = (middle + shift).clamp_(0, top), scales
        integers = _integers(groups, scale, zero, top)
        for _ in range(2):
            scale = _exact(_fitted(groups, integers, weigh, scale), scale_dtype)
            integers = try_out(scale, zero)
    return _integers(groups, scales, zeros, top) + zeros[..., None], scales, zeros


def _integers(groups: Tensor, scale: Tensor, zero: Tensor, top: int) -> Tensor:
    """Codes less the zero point, as floats."""
    steps = (groups / divisors(scale)[..., None]).round_()
    return torch.clamp(steps, min=-zero[..., None], max=top - zero[..., None])


def _fitted(groups: Tensor, integers: Tensor, weigh: Tensor | None, scale: Tensor) -> Tensor:
    """The scale that fits integers to groups by least squares; `scale` where all integers are zero."""
    weighed = integers if weigh is None else integers * weigh
    squares = (weighed * integers).sum(-1)
    fitted = (weighed * groups).sum(-1) / squares
    return torch.where((squares > 0) & (fitted > 0), fitted, scale)


def _exact(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales rounded to numbers that float16 holds, and `dtype` too: programs convert between them."""
    return scale.half().to(dtype).float()


def _empty(values: Tensor, group_size: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    outputs, inputs = values.shape
    codes = torch.empty((outputs, inputs), dtype=torch.uint8)
    return codes, torch.empty((outputs, inputs // group_size), dtype=scale_dtype)


def _grouped(rows: Tensor, group_size: int) -> Tensor:
    return rows.float().view(len(rows), -1, group_size)
