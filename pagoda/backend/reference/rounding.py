"""Dense weights to quantized ones, in plain PyTorch: the specification of every backend's `quantize_...`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pagoda.backend.weights import GroupedWeight, Int8Weight

_WEIGHTS_AT_ONCE = 2**18
"""Weights that are rounded together; their float32 values stay in the processor's cache."""


def quantize_int8(values: Tensor) -> Int8Weight:
    """Int8 codes of a weight [out, in]: each output's highest magnitude becomes 127 or -127, ties go to even."""
    codes = torch.empty(values.shape, dtype=torch.int8)
    scales = torch.empty(len(values))
    for rows in _pieces(values):
        block = values[rows].float()
        scales[rows] = block.abs().amax(dim=1) / 127
        codes[rows] = (block / _divisors(scales[rows])[:, None]).round_().clamp_(-127, 127)
    return Int8Weight(codes, scales)


def quantize_int4(values: Tensor, group_size: int) -> GroupedWeight:
    """Int4 codes of a weight [out, in], as llama.cpp's Q4_0: each group's highest magnitude becomes code 0.

    The scale is that weight over -8, rounded to float16; the codes are those of the rounded scale.
    """
    outputs, inputs = values.shape
    # From floats to signed bytes is the quicker conversion, and codes are the same in both.
    codes = torch.empty((outputs, inputs), dtype=torch.int8)
    scales = torch.empty((outputs, inputs // group_size), dtype=torch.float16)
    for rows in _pieces(values):
        groups = values[rows].float().view(-1, inputs // group_size, group_size)
        scales[rows] = _signed_peaks(groups) / -8
        steps = groups / _divisors(scales[rows].float())[..., None]
        codes[rows] = steps.round_().add_(8).clamp_(0, 15).flatten(1)
    return GroupedWeight(codes.view(torch.uint8), scales, None, bits=4, group_size=group_size)


def _signed_peaks(groups: Tensor) -> Tensor:
    """The first of the values of highest magnitude along the last dimension."""
    low, high = groups.amin(-1), groups.amax(-1)  # aminmax takes twice the time of both
    peaks = torch.where(high > -low, high, low)
    tied = (high == -low).nonzero(as_tuple=True)
    first = groups[tied].abs().argmax(dim=-1, keepdim=True)
    peaks[tied] = groups[tied].gather(-1, first).squeeze(-1)
    return peaks


def _divisors(scales: Tensor) -> Tensor:
    """Scales as divisors; a scale of zero becomes infinity, so that all codes are that of zero."""
    return scales.masked_fill(scales == 0, torch.inf)


def _pieces(values: Tensor) -> Iterator[slice]:
    outputs, inputs = values.shape
    step = max(1, _WEIGHTS_AT_ONCE // inputs)
    for start in range(0, outputs, step):
        yield slice(start, start + step)
