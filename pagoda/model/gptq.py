# SPDX-License-Identifier: Apache-2.0
"""Codes of weights chosen by the error of outputs: GPTQ (Frantar et al. 2022), on grids that are found before.

The inputs of a map are seldom independent: what rounding one weight adds to an output, weights of other inputs can
take back. So inputs are rounded one after the other, the one with the largest mean square first, and its error
is spread over those that are still to come, by the mean products of inputs on a text. Mean products of different
inputs are shrunk towards zero (Ledoit and Wolf 2004): those of a text are larger than those of all texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from pagoda.backend.rounding import divisors, slices
from pagoda.backend.weights import BlockWeight, GroupedWeight, Int8Weight
from pagoda.model.rounding import ZeroPointGroups

LoadedGrids = Int8Weight | GroupedWeight | BlockWeight
StoredGrids = Int8Weight | ZeroPointGroups
Rounded = LoadedGrids | StoredGrids
"""A weight of integer codes on a grid for each group of inputs: in memory, or for a file."""
RoundedT = TypeVar("RoundedT", bound=Rounded)

SHRINKAGE = 0.7
"""Part by which mean products of different inputs are shrunk.

Measured on SmolLM2-135M in int4 with a text in English and Python. Unshrunk, French and Chinese become worse than
without a calibration; of 0.3 to 0.8, lower ones are better for English and Python, higher ones for the others.
"""
_DAMPING = 0.01
"""Part of the mean of all inputs' mean squares that is added to each (Frantar et al. 2022)."""
_INPUTS_AT_ONCE = 32
"""Inputs whose errors are spread among each other one by one, and over all later ones together."""
_SOLVED_AT_ONCE = 256
"""Rows of a triangular matrix that is inverted in one piece."""
_OUTPUTS_AT_ONCE = 4096
"""Outputs that are rounded together; their float32 values of `_INPUTS_AT_ONCE` stay in the processor's cache."""


@dataclass(frozen=True)
class Grid:
    """The numbers that weights may become: `steps * code + bases` of their output and group."""

    steps: Tensor
    """[out, groups] float32."""
    bases: Tensor
    """[out, groups] float32."""
    lowest: int
    highest: int
    """The largest code."""


def grid_of(rounded: Rounded) -> Grid:
    if isinstance(rounded, Int8Weight):
        steps = rounded.scales[:, None]
        if rounded.zero_points is None:
            return Grid(steps, torch.zeros_like(steps), -127, 127)
        return Grid(steps, steps * -rounded.zero_points[:, None], -128, 127)
    if isinstance(rounded, BlockWeight):
        steps, minima = rounded.group_scales(), rounded.group_minima()
        bases = steps * -rounded.stored_format.zero
        return Grid(
            steps, bases if minima is None else bases + minima, 0, 2**rounded.stored_format.bits - 1
        )
    steps = rounded.scales.float()
    if isinstance(rounded, ZeroPointGroups) and rounded.zeros is not None:
        bases = steps * -rounded.zeros.float()
    else:
        bases = steps * -(2 ** (rounded.bits - 1))
        if isinstance(rounded, GroupedWeight) and rounded.offsets is not None:
            bases += rounded.offsets.float()
    # A symmetric grid of `round_symmetric` has a code below its mirror image, which is as good as any.
    return Grid(steps, bases, 0, 2**rounded.bits - 1)


def with_codes(rounded: RoundedT, codes: Tensor) -> RoundedT:
    """The same grids with other codes [out, in]."""
    if isinstance(rounded, Int8Weight):
        return replace(rounded, values=codes.to(rounded.values.dtype))
    return replace(rounded, codes=codes.to(rounded.codes.dtype))


def one_above_the_other(parts: Sequence[RoundedT]) -> RoundedT:
    """Weights of the same inputs and one kind, as one."""
    first = parts[0]
    tensors: dict[str, Any] = {
        name: torch.cat([getattr(part, name) for part in parts])
        for name, value in vars(first).items()
        if isinstance(value, Tensor)
    }
    return replace(first, **tensors)


def dequantized(grid: Grid, codes: Tensor) -> Tensor:
    """[out, in] float32."""
    groups = codes.float().view(*grid.steps.shape, -1)
    values: Tensor = (groups * grid.steps[..., None] + grid.bases[..., None]).flatten(1)
    return values


@dataclass(frozen=True)
class InputProducts:
    """Mean products of the inputs of a map, prepared for rounding."""

    mean_squares: Tensor
    """[in] float32."""
    order: Tensor
    """[in] int64, inputs by descending mean square."""
    factor: Tensor
    """[in, in] float32, upper triangular: `factor.T @ factor` inverts the mean products, both in that order."""

    @classmethod
    def of(cls, products: Tensor) -> InputProducts:
        """Takes mean products [in, in] float32 of pairs of inputs, which it overwrites."""
        mean_squares = products.diagonal().clone()
        order = mean_squares.argsort(descending=True, stable=True)
        damped = mean_squares + _DAMPING * mean_squares.mean()
        damped[damped == 0] = 1  # a text that gives all zeros
        products.mul_(1 - SHRINKAGE).diagonal().copy_(damped)
        # An upper triangular root R of the ordered products, R @ R.T: the lower one of the reversed, reversed.
        backwards = order.flip(0)
        root = torch.linalg.cholesky(products[backwards][:, backwards]).flip(0, 1)
        return cls(mean_squares, order, _inverse(root))


def _inverse(upper: Tensor) -> Tensor:
    """The inverse of an upper triangular matrix, half by half, which spares products with its zeros."""
    size = len(upper)
    if size <= _SOLVED_AT_ONCE:
        solved: Tensor = torch.linalg.solve_triangular(upper, torch.eye(size), upper=True)
        return solved
    half = size // 2
    inverse = torch.zeros_like(upper)
    inverse[:half, :half] = _inverse(upper[:half, :half])
    inverse[half:, half:] = _inverse(upper[half:, half:])
    corner = inverse[:half, :half] @ upper[:half, half:] @ inverse[half:, half:]
    inverse[:half, half:] = corner.neg_()
    return inverse


def round_by_outputs(values: Tensor, grid: Grid, inputs: InputProducts) -> Tensor:
    """Codes [out, in] float32 of a weight [out, in]."""
    codes = torch.empty(values.shape)
    group_size = values.shape[1] // grid.steps.shape[1]
    group_of = inputs.order // group_size
    for rows in slices(len(values), _OUTPUTS_AT_ONCE):
        # Inputs are rows here, so that those of all outputs lie side by side.
        remaining = values[rows].float().t()[inputs.order]
        steps, bases = grid.steps[rows].t(), grid.bases[rows].t()
        found = torch.empty_like(remaining)
        for first in range(0, len(remaining), _INPUTS_AT_ONCE):
            last = min(first + _INPUTS_AT_ONCE, len(remaining))
            block, factor = remaining[first:last], inputs.factor[first:last]
            errors = torch.empty_like(block)
            for place, group in enumerate(group_of[first:last].tolist()):
                step, base = steps[group], bases[group]
                code = ((block[place] - base) / divisors(step)).round_()
                code.clamp_(grid.lowest, grid.highest)
                found[first + place] = code
                own = factor[place, first + place : last]
                torch.sub(block[place], code.mul_(step).add_(base), out=errors[place])
                errors[place].div_(own[0])
                block[place + 1 :].addr_(own[1:], errors[place], alpha=-1)
            remaining[last:].addmm_(factor[:, last:].t(), errors, alpha=-1)
        back = torch.empty_like(found)
        back[inputs.order] = found
        codes[rows] = back.t()
    return codes
