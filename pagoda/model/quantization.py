# SPDX-License-Identifier: Apache-2.0
"""Dense weights are quantized as they are read, one linear layer after the other.

int8 has a scale and a zero point for each output. Heads and embedding tables, from whose rounding a model suffers
most, have a scale and a minimum for each group of 64 inputs, in integers of 8 bits, where such groups divide the
inputs. int4 has them for each group of 32 inputs, and codes of 5 bits in heads and tables.
Larger groups of int4 have a float16 scale and no minimum, and leave heads and tables in int8. fp8 has a scale for
each output, and leaves heads and tables dense. Routers of experts, small as they are, stay dense.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from pagoda.backend.base import Backend
from pagoda.backend.block_rounding import quantize_blocks
from pagoda.backend.fp8 import E4M3, HIGHEST, to_e4m3
from pagoda.backend.rounding import divisors, row_slices
from pagoda.backend.weights import (
    BlockWeight,
    DenseWeight,
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    LinearWeight,
)
from pagoda.checkpoints.linears import NEVER_ROUNDED, LinearRole, LinearSpec
from pagoda.checkpoints.weight_formats import (
    GROUP_SIZES,
    BlockFormat,
    DenseFormat,
    Fp8Format,
    GroupedFormat,
    Int8Format,
    WeightFormat,
)
from pagoda.errors import ConfigError
from pagoda.model.sharding import LinearShard, format_of_part

QUANTIZATIONS = ("none", "int8", "int4", "fp8")
_BLOCK_GROUP_SIZE = 32
"""Groups of int4 that have integer scales and minima."""
_TABLE_BITS = 5
_INT8_GROUP_SIZE = 64
_TABLES = (LinearRole.EMBEDDING, LinearRole.HEAD)


@dataclass(frozen=True)
class QuantizationOnLoad:
    group_size: int | None
    """Inputs that share a scale of int4; None for int8 and fp8."""
    calibration: str | None = None
    """Digest of the text by which weights are rounded; None where each is rounded to the nearest."""
    in_fp8: bool = False
    """True for fp8."""

    @property
    def summary(self) -> str:
        by = "" if self.calibration is None else f" rounded by text {self.calibration}"
        if self.in_fp8:
            return "fp8 weights (by channel)"
        if self.group_size is None:
            return f"int8 weights{by}"
        return f"int4 weights (groups of {self.group_size}){by}"

    def format_of(self, linear: LinearSpec) -> WeightFormat:
        if linear.role in NEVER_ROUNDED:
            return DenseFormat()
        is_table = linear.role in _TABLES
        if self.in_fp8:
            return DenseFormat() if is_table else Fp8Format(None)
        if self.group_size is None or (is_table and self.group_size != _BLOCK_GROUP_SIZE):
            return _int8_format(linear)
        if linear.inputs % self.group_size:
            raise ConfigError(
                f"{linear.name}.weight has {linear.inputs} inputs, which groups of {self.group_size} do not "
                "divide; take another --quantization-group-size, or --quantization int8."
            )
        if self.group_size == _BLOCK_GROUP_SIZE:
            bits = _TABLE_BITS if is_table else 4
            return _whole_rows(bits, self.group_size, linear.inputs)
        return GroupedFormat(
            bits=4, group_size=self.group_size, offsets=False, act_order=False, can_regroup=False
        )

    def quantize(
        self,
        linear: LinearSpec,
        part: LinearShard,
        weight: LinearWeight,
        backend: Backend[Any, Any],
        importance: Tensor | None = None,
    ) -> LinearWeight:
        """A linear layer's weight [outputs of the part, all inputs], quantized by the backend.

        `importance` [in] weighs the squared errors of the weights of each input, where scales are searched for.

        Raises ConfigError: it holds numbers that are not finite or too large."""
        if not isinstance(weight, DenseWeight):
            raise TypeError(f"{linear.name} is quantized already.")
        stored_format = format_of_part(linear, self.format_of(linear), part.inputs)
        if isinstance(stored_format, DenseFormat):
            return weight
        quantized: Int8Weight | Fp8Weight | GroupedWeight | BlockWeight
        if isinstance(stored_format, BlockFormat):
            if importance is None:
                quantized = backend.quantize_blocks(weight.values, stored_format)
            else:
                quantized = quantize_blocks(weight.values, stored_format, importance)
            scales = quantized.block_scales
        elif isinstance(stored_format, Fp8Format):
            quantized = quantize_fp8(weight.values)
            scales = quantized.scales
        elif isinstance(stored_format, GroupedFormat):
            quantized = backend.quantize_int4(weight.values, stored_format.group_size)
            scales = quantized.scales
        else:
            quantized = backend.quantize_int8(weight.values, symmetric=False)
            scales = quantized.scales
        if scales is None or not bool(scales.isfinite().all()):
            raise ConfigError(
                f"{linear.name}.weight holds numbers that are infinite, NaN or too large to quantize; "
                "serve it without --quantization."
            )
        return quantized


def quantize_fp8(values: Tensor) -> Fp8Weight:
    """8-bit floats of a weight [out, in]: each output's highest magnitude becomes 448, and ties go to even.

    Scales are not finite where weights are not.
    """
    held, scales = torch.empty(values.shape, dtype=E4M3), torch.empty(len(values), 1)
    for rows in row_slices(values):
        block = values[rows].float()
        scales[rows] = block.abs().amax(dim=1, keepdim=True) / HIGHEST
        held[rows] = to_e4m3(block / divisors(scales[rows]))
    return Fp8Weight(held, scales, None)


def _int8_format(linear: LinearSpec) -> WeightFormat:
    if linear.role in _TABLES and linear.inputs % _INT8_GROUP_SIZE == 0:
        return _whole_rows(8, _INT8_GROUP_SIZE, linear.inputs)
    return Int8Format(zero_points=True)


def _whole_rows(bits: int, group_size: int, inputs: int) -> BlockFormat:
    return BlockFormat(bits, group_size, inputs, integer_scales=True, minima=True, whole_rows=True)


def quantization_on_load(
    wanted: str, group_size: int, calibration_windows: Sequence[Sequence[int]] = ()
) -> QuantizationOnLoad | None:
    """Quantization by name, one of `QUANTIZATIONS`; the group size is that of int4."""
    if group_size not in GROUP_SIZES:
        known = ", ".join(str(size) for size in GROUP_SIZES)
        raise ConfigError(f"--quantization-group-size must be one of {known}, got {group_size}.")
    if wanted == "none":
        return None
    digest = None
    if calibration_windows:
        digest = hashlib.sha256(msgspec.json.encode(calibration_windows)).hexdigest()[:16]
    return QuantizationOnLoad(group_size if wanted == "int4" else None, digest, wanted == "fp8")
