# SPDX-License-Identifier: Apache-2.0
"""Dense weights rounded to groups with integer scales and minima, as llama.cpp's Q4_K and Q5_K have them.

The two float16 that integers are multiplied by belong to a whole row of inputs instead of 256, so that any width
that groups divide has few bits for scales.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pagoda.backend.rounding import RANGE_SHRINKS, divisors, row_slices
from pagoda.backend.weights import BlockWeight
from pagoda.checkpoints.weight_formats import BlockFormat

_LARGEST = 127
"""The largest integer of a scale or minimum."""


def quantize_blocks(
    values: Tensor, stored_format: BlockFormat, importance: Tensor | None = None
) -> BlockWeight:
    """Codes of a weight [out, in] in blocks of whole rows: a group's lowest and highest become the extreme codes.

    In 8 bits minima are rounded down and scales up, so that no weight is beyond the extreme codes. With fewer, and
    the `importance` [in] of inputs, scales and minima are searched for that have the least sum of squared errors,
    weighed by it.

    Block scales are not finite where weights are not.
    """
    outputs, inputs = values.shape
    if stored_format.block_size != inputs or not stored_format.whole_rows:
        raise ValueError(f"Rows of {inputs} are not held as {stored_format}.")
    codes = torch.empty((outputs, inputs), dtype=torch.uint8)
    scales, minima = (
        torch.empty((outputs, inputs // stored_format.group_size), dtype=torch.int8)
        for _ in range(2)
    )
    of_scales, of_minima = (torch.empty((outputs, 1), dtype=torch.float16) for _ in range(2))
    top = 2**stored_format.bits - 1
    for rows in row_slices(values):
        block = values[rows].float()
        groups = block.view(len(block), -1, stored_format.group_size)
        lowest, highest = groups.amin(-1).clamp_(max=0), groups.amax(-1)
        widths = (highest - lowest) / top
        covers = stored_format.bits == 8
        if importance is not None and not covers:
            weigh = importance.float().view(1, -1, stored_format.group_size)
            widths, lowest = _searched(groups, widths, lowest, top, weigh)
        down, up = (torch.floor, torch.ceil) if covers else (torch.round, torch.round)
        minima[rows], of_minima[rows] = _integers(lowest, -_LARGEST, down)
        base = minima[rows].float() * of_minima[rows].float()
        if covers:
            widths = (highest - base) / top
        scales[rows], of_scales[rows] = _integers(widths, 1, up)
        steps = scales[rows].float() * of_scales[rows].float()
        offsets = (groups - base[..., None]) / divisors(steps)[..., None]
        codes[rows] = offsets.round_().clamp_(0, top).flatten(1)
    return BlockWeight(stored_format, codes, scales, minima, of_scales, of_minima)


def _searched(
    groups: Tensor, widths: Tensor, lowest: Tensor, top: int, weigh: Tensor
) -> tuple[Tensor, Tensor]:
    """Steps and minima [out, n] of groups [out, n, size]: narrower ranges are tried, and fitted to their codes."""
    total = weigh.sum(-1).clamp_(min=torch.finfo(torch.float32).tiny)
    mean = (groups * weigh).sum(-1) / total
    best, steps, minima = torch.full_like(widths, torch.inf), widths, lowest
    for shrink in RANGE_SHRINKS:
        step, base = widths * shrink, lowest + widths * top * (1 - shrink) / 2
        for fitted in (False, True):
            offsets = (groups - base[..., None]) / divisors(step)[..., None]
            codes = offsets.round_().clamp_(0, top)
            if not fitted:  # by least squares
                own = (codes * weigh).sum(-1) / total
                spread = codes - own[..., None]
                slope = (spread * weigh * groups).sum(-1) / (spread.square() * weigh).sum(-1)
                step = torch.where(slope > 0, slope, step)  # NaN where all codes are the same
                base = mean - step * own
            errors = (groups - codes * step[..., None] - base[..., None]).square_()
            error = errors.mul_(weigh).sum(-1)
            better = error < best
            best = torch.where(better, error, best)
            steps, minima = torch.where(better, step, steps), torch.where(better, base, minima)
    return steps, minima


def _integers(
    numbers: Tensor, lowest: int, rounded: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Integers [out, groups] from `lowest` on and float16 [out, 1] whose products are near to the numbers."""
    wanted = numbers.abs().amax(1, keepdim=True) / _LARGEST
    units = wanted.half()
    # Rounded up, as integers end at the largest, and float16 has few digits for small numbers.
    units = (units.view(torch.int16) + (units.float() < wanted)).to(torch.int16).view(torch.float16)
    integers = rounded(numbers / divisors(units.float())).clamp_(lowest, _LARGEST)
    return integers.nan_to_num_(0).to(torch.int8), units
