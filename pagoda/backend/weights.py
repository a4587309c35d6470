# SPDX-License-Identifier: Apache-2.0
"""Weights of linear layers as a checkpoint holds them, before a backend packs them.

A quantized map rounds its inputs too: both sides of every product are small integers, whose sums are exact, so
that only scales are ever rounded. Inputs that share a scale with others of their group become integers from -127
to 127 (`highest magnitude / 127`, rounded half to even), worked out anew for every row. Where a whole row shares
one, as with `Int8Weight`, a few inputs are far larger than all others: the scale is that of the others, and these
few become integers of up to 15 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagoda.checkpoints.weight_formats import (
    BlockFormat,
    DenseFormat,
    Fp8Format,
    GroupedFormat,
    Int8Format,
    WeightFormat,
    format_bytes,
)


@dataclass(frozen=True)
class DenseWeight:
    """Numbers in the dtype of the activations, multiplied as they are."""

    values: Tensor
    """[out, in] float32, bfloat16 or float16."""


@dataclass(frozen=True)
class Int8Weight:
    """Weight `[o, i]` is `scales[o] * (values[o, i] - zero_points[o])`; a row of inputs has one scale."""

    values: Tensor
    """[out, in] int8."""
    scales: Tensor
    """[out] float32."""
    zero_points: Tensor | None = None
    """[out] int32, from -128 to 127; None where all are zero, and values from -127 on."""

    def integers(self) -> Tensor:
        """[out, in] float32, what scales are multiplied by."""
        values = self.values.float()
        return values if self.zero_points is None else values - self.zero_points[:, None]

    def rows(self, chosen: slice | Tensor) -> Int8Weight:
        """Some outputs of it."""
        zero_points = None if self.zero_points is None else self.zero_points[chosen]
        return Int8Weight(self.values[chosen], self.scales[chosen], zero_points)


@dataclass(frozen=True)
class Fp8Weight:
    """Weight `[o, i]` is `scales[o, i // group_size] * values[o, i]`; the last group may be cut off.

    Inputs are not rounded to 8 bits, but as they are for a dense weight of the model. Products of a group's inputs
    and values are added up in float32, multiplied by its scale, and added up in the order of groups.
    """

    values: Tensor
    """[out, in] float8_e4m3fn, without NaN."""
    scales: Tensor
    """[out, groups] float32."""
    group_size: int | None
    """Inputs of a group, a multiple of `weight_formats.FP8_INPUTS`; None where all are one."""

    def rows(self, chosen: slice | Tensor) -> Fp8Weight:
        """Some outputs of it."""
        return Fp8Weight(self.values[chosen], self.scales[chosen], self.group_size)

    def groups(self) -> Iterator[tuple[slice, Tensor]]:
        """Inputs of each group, and its scales [out]."""
        inputs = self.values.shape[1]
        size = self.group_size or inputs
        for group, first in enumerate(range(0, inputs, size)):
            yield slice(first, min(first + size, inputs)), self.scales[:, group]


@dataclass(frozen=True)
class GroupedWeight:
    """Weight `[o, i]` is `scales[o, g] * (codes[o, i] - 2 ** (bits - 1)) + offsets[o, g]`.

    `g` is the group of the input, `i // group_size`. Inputs have a scale for each group too.
    """

    codes: Tensor
    """[out, in] uint8, below `2 ** bits`."""
    scales: Tensor
    """[out, in / group_size] float16."""
    offsets: Tensor | None
    """[out, in / group_size] float16; None where all are zero."""
    bits: int
    group_size: int
    """One of `weight_formats.GROUP_SIZES`; divides the number of inputs."""
    act_order: Tensor | None = None
    """[in] int64: the map's input `i` is the activation's element `act_order[i]` (GPTQ's act-order)."""


BLOCK_INPUT_GROUP = 16
"""Inputs of a `BlockWeight` that share a scale, where blocks are no whole rows."""


@dataclass(frozen=True)
class BlockWeight:
    """Blocks of ggml with their own codes, scales and minima.

    Weight `[o, i]` is `scale * number + minimum`. The number is the code minus `stored_format.zero`, or what the
    codebook has for the code. Scale and minimum are those of the group `i // group_size`: floats, or integers
    times the float of the block `i // block_size`. Inputs have a scale for each 16, whatever the group size, or
    one for a row if `stored_format.whole_rows`.
    """

    stored_format: BlockFormat
    codes: Tensor
    """[out, in] uint8, below `2 ** bits`."""
    scales: Tensor
    """[out, in / group_size] float16, or where scales have 8 bits int8 or float8_e4m3fn."""
    minima: Tensor | None
    """The same of minima; None if the format has none."""
    block_scales: Tensor | None
    """[out, in / block_size] float16; None where scales are no integers."""
    block_minima: Tensor | None
    """The same of minima, below zero where ggml takes them away."""

    def rows(self, chosen: slice | Tensor) -> BlockWeight:
        """Some outputs of it."""
        minima, block_scales, block_minima = (
            None if part is None else part[chosen]
            for part in (self.minima, self.block_scales, self.block_minima)
        )
        return BlockWeight(
            self.stored_format,
            self.codes[chosen],
            self.scales[chosen],
            minima,
            block_scales,
            block_minima,
        )

    def group_scales(self) -> Tensor:
        """[out, in / group_size] float32, exact."""
        return self._of_groups(self.scales, self.block_scales)

    def group_minima(self) -> Tensor | None:
        """[out, in / group_size] float32, exact."""
        return None if self.minima is None else self._of_groups(self.minima, self.block_minima)

    def numbers(self) -> Tensor:
        """[out, in] float32, what codes mean."""
        if self.stored_format.codebook is not None:
            return torch.tensor(self.stored_format.codebook, dtype=torch.float32)[self.codes.long()]
        return self.codes.float() - self.stored_format.zero

    def _of_groups(self, numbers: Tensor, of_blocks: Tensor | None) -> Tensor:
        if of_blocks is None:
            return numbers.float()
        groups = self.stored_format.block_size // self.stored_format.group_size
        lattice, unit = self.stored_format.lattice, 1.0
        if self.stored_format.scales_are_floats:
            unit = 2**-8
        elif lattice is not None:
            unit = lattice.unit
        return (of_blocks.float() * unit).repeat_interleave(groups, dim=1) * numbers.float()


LinearWeight = DenseWeight | Int8Weight | Fp8Weight | GroupedWeight | BlockWeight


def weight_shape(weight: LinearWeight) -> tuple[int, int]:
    matrix = weight.codes if isinstance(weight, GroupedWeight | BlockWeight) else weight.values
    outputs, inputs = matrix.shape
    return outputs, inputs


def weight_format(weight: LinearWeight) -> WeightFormat:
    if isinstance(weight, DenseWeight):
        return DenseFormat()
    if isinstance(weight, Int8Weight):
        return Int8Format(zero_points=weight.zero_points is not None)
    if isinstance(weight, Fp8Weight):
        return Fp8Format(weight.group_size)
    if isinstance(weight, BlockWeight):
        return weight.stored_format
    has_offsets, has_order = weight.offsets is not None, weight.act_order is not None
    return GroupedFormat(weight.bits, weight.group_size, has_offsets, has_order)


def weight_bytes(weight: LinearWeight, dtype: torch.dtype) -> int:
    """Bytes in memory, once a backend has packed the weight; `dtype` is that of activations."""
    return format_bytes(weight_format(weight), *weight_shape(weight), dtype.itemsize)


def dequantize(weight: LinearWeight) -> Tensor:
    """[out, in] float32, its inputs in the order of the activations."""
    if isinstance(weight, DenseWeight):
        return weight.values.float()
    if isinstance(weight, Int8Weight):
        return weight.integers() * weight.scales[:, None]
    if isinstance(weight, BlockWeight):
        return _dequantize_blocks(weight)
    if isinstance(weight, Fp8Weight):
        size = weight.group_size or weight.values.shape[1]
        wide = _per_input(weight.scales, size)[:, : weight.values.shape[1]]
        return weight.values.float() * wide
    spread = weight.group_size
    values: Tensor = (weight.codes.float() - 2 ** (weight.bits - 1)) * _per_input(
        weight.scales, spread
    )
    if weight.offsets is not None:
        values += _per_input(weight.offsets, spread)
    if weight.act_order is None:
        return values
    ordered = torch.empty_like(values)
    ordered[:, weight.act_order] = values
    return ordered


def _dequantize_blocks(weight: BlockWeight) -> Tensor:
    values, minima = weight.numbers(), weight.group_minima()
    values *= _per_input(weight.group_scales(), weight.stored_format.group_size)
    if minima is not None:
        values += _per_input(minima, weight.stored_format.group_size)
    return values


def _per_input(groups: Tensor, group_size: int) -> Tensor:
    wide: Tensor = groups.float().repeat_interleave(group_size, dim=1)
    return wide


def total_outputs(parts: Sequence[LinearWeight]) -> int:
    return sum(weight_shape(part)[0] for part in parts)


def same_order(one: LinearWeight, other: LinearWeight) -> bool:
    """Returns True if both take the elements of their inputs in one order."""
    first, second = (getattr(weight, "act_order", None) for weight in (one, other))
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)
