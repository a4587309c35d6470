"""Dense weights are quantized as they are read, one linear map after the other.

int8 has a scale for each output. int4 has one for each group of inputs; heads and embedding tables, which are read
row by row and suffer most from rounding, are int8 all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pagoda.backend.weights import GROUP_SIZES, DenseWeight, GroupedWeight, Int8Weight, LinearWeight
from pagoda.errors import ConfigError
from pagoda.model.quantization_config import EMBEDDING, HEAD
from pagoda.model.weight_formats import GroupedFormat, Int8Format, WeightFormat
from pagoda.model.weights import WeightSource

QUANTIZATIONS = ("none", "int8", "int4")

_WEIGHTS_AT_ONCE = 2**18
"""Weights that are rounded together; their float32 values stay in the processor's cache."""


@dataclass(frozen=True)
class Int8OnLoad:
    summary = "int8 weights"

    def format_of(self, name: str, inputs: int) -> WeightFormat:  # noqa: ARG002 - any map
        return Int8Format()


@dataclass(frozen=True)
class Int4OnLoad:
    group_size: int

    @property
    def summary(self) -> str:
        return f"int4 weights (groups of {self.group_size})"

    def format_of(self, name: str, inputs: int) -> WeightFormat:
        if name in (EMBEDDING, HEAD):
            return Int8Format()
        if inputs % self.group_size:
            raise ConfigError(
                f"{name}.weight has {inputs} inputs, which groups of {self.group_size} do not divide; "
                "take another --quantization-group-size, or --quantization int8."
            )
        return GroupedFormat(bits=4, group_size=self.group_size, offsets=False, input_order=False)


QuantizationOnLoad = Int8OnLoad | Int4OnLoad


def quantization_on_load(wanted: str, group_size: int) -> QuantizationOnLoad | None:
    """By its name, one of `QUANTIZATIONS`; the group size is that of int4.

    Raises:
        ConfigError: there are no groups of that size.
    """
    if group_size not in GROUP_SIZES:
        known = ", ".join(str(size) for size in GROUP_SIZES)
        raise ConfigError(f"--quantization-group-size must be one of {known}, got {group_size}.")
    if wanted == "none":
        return None
    return Int8OnLoad() if wanted == "int8" else Int4OnLoad(group_size)


class QuantizingSource:
    """Quantizes what another source gives."""

    def __init__(self, dense: WeightSource, quantization: QuantizationOnLoad) -> None:
        self._dense = dense
        self._quantization = quantization

    def read_into(self, name: str, out: Tensor) -> None:
        self._dense.read_into(name, out)

    def linear(self, name: str, outputs: int, inputs: int, dtype: torch.dtype) -> LinearWeight:
        weight = self._dense.linear(name, outputs, inputs, dtype)
        if not isinstance(weight, DenseWeight):
            raise TypeError(f"{name} is quantized already.")
        held_as = self._quantization.format_of(name, inputs)
        quantized: Int8Weight | GroupedWeight
        if isinstance(held_as, GroupedFormat):
            quantized = quantize_int4(weight.values, held_as.group_size)
        else:
            quantized = quantize_int8(weight.values)
        if not bool(quantized.scales.isfinite().all()):
            raise ConfigError(
                f"{name}.weight holds numbers that are infinite, NaN or too large to quantize; "
                "serve it without --quantization."
            )
        return quantized


def quantize_int8(values: Tensor) -> Int8Weight:
    """Of [out, in]; the weight of highest magnitude of each output becomes 127 or -127, ties go to even."""
    codes = torch.empty(values.shape, dtype=torch.int8)
    scales = torch.empty(len(values))
    for rows in _pieces(values):
        block = values[rows].float()
        scales[rows] = block.abs().amax(dim=1) / 127
        codes[rows] = (block / _divisors(scales[rows])[:, None]).round_().clamp_(-127, 127)
    return Int8Weight(codes, scales)


def quantize_int4(values: Tensor, group_size: int) -> GroupedWeight:
    """Of [out, in], as llama.cpp's Q4_0: of each group, the weight of highest magnitude becomes code 0.

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
    """Where the scale is zero all codes shall be that of zero."""
    return scales.masked_fill(scales == 0, torch.inf)


def _pieces(values: Tensor) -> Iterator[slice]:
    outputs, inputs = values.shape
    step = max(1, _WEIGHTS_AT_ONCE // inputs)
    for start in range(0, outputs, step):
        yield slice(start, start + step)
