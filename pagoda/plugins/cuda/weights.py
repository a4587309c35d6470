# SPDX-License-Identifier: Apache-2.0
"""Weights of linear layers in the device's memory, as kernels take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagoda.backend.base import UnsupportedError
from pagoda.backend.reference.quantized import PackedBlocks, PackedGroups, plane_widths
from pagoda.backend.weights import (
    BlockWeight,
    DenseWeight,
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    LinearWeight,
    same_order,
    weight_format,
    weight_shape,
)
from pagoda.plugins.cuda.kernels.block_weights import Blocks

Upload = Callable[[Tensor], Tensor]
"""`Runtime.upload`."""
_WHOLE_ROWS = 2**30


@dataclass(frozen=True)
class Dense:
    values: Tensor
    """[out, in] float32, bfloat16 or float16."""

    @property
    def outputs(self) -> int:
        return len(self.values)

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes


@dataclass(frozen=True)
class Int8:
    values: Tensor
    """[out, in] int8."""
    scales: Tensor
    """[out] float32."""
    zero_points: Tensor | None
    """[out] int32."""

    @property
    def outputs(self) -> int:
        return len(self.values)

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes


@dataclass(frozen=True)
class Fp8:
    values: Tensor
    """[out, in] float8_e4m3fn."""
    scales: Tensor
    """[out, groups] float32."""
    size: int
    """Inputs that share a scale; more than there are where a row has one."""
    dtype: torch.dtype
    """Dtype of dense weights beside it."""

    @property
    def outputs(self) -> int:
        return len(self.values)

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes


@dataclass(frozen=True)
class Grouped:
    codes: Tensor
    """[out, in] uint8; of 4 bits [out, in / 2], the code of an odd input in the high half."""
    scales: Tensor
    """[out, groups] float16."""
    offsets: Tensor | None
    bits: int
    group_size: int
    order: Tensor | None
    """[in] int64; see `GroupedWeight.act_order`."""

    @property
    def outputs(self) -> int:
        return len(self.codes)

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


Segment = Dense | Int8 | Fp8 | Grouped | Blocks


@dataclass(frozen=True, eq=False)
class DeviceLinear:
    """Linear maps of the same inputs, whose outputs follow one another."""

    segments: tuple[Segment, ...]
    """Weights of one format each."""
    outputs: int
    inputs: int
    bias: Tensor | None
    """[out] float32."""

    @property
    def num_bytes(self) -> int:
        bias = 0 if self.bias is None else self.bias.nbytes
        return bias + sum(segment.num_bytes for segment in self.segments)

    @property
    def is_dense(self) -> bool:
        return len(self.segments) == 1 and isinstance(self.segments[0], Dense)

    def dense(self) -> Tensor:
        """The weight [out, in]. Raises UnsupportedError: it is quantized."""
        if len(self.segments) == 1 and isinstance(self.segments[0], Dense):
            return self.segments[0].values
        raise UnsupportedError(
            "the GPU backend has dense maps of heads only, and experts that are all dense or quantized alike."
        )


def prepare(
    parts: Sequence[LinearWeight], bias: Tensor | None, dtype: torch.dtype, upload: Upload
) -> DeviceLinear:
    """Puts weights into the device's memory; dense ones become `dtype`."""
    runs: list[list[LinearWeight]] = []
    for part in parts:
        last = runs[-1][-1] if runs else None
        alike = last is not None and weight_format(last) == weight_format(part)
        if last is not None and alike and same_order(last, part):
            runs[-1].append(part)
        else:
            runs.append([part])
    segments = tuple(_segment(run, dtype, upload) for run in runs)
    return DeviceLinear(
        segments,
        sum(segment.outputs for segment in segments),
        weight_shape(parts[0])[1],
        None if bias is None else upload(bias.float()),
    )


def _segment(run: Sequence[LinearWeight], dtype: torch.dtype, upload: Upload) -> Segment:
    """Weights of one format, one after the other."""
    first = run[0]
    if isinstance(first, DenseWeight):
        return Dense(_joined(run, "values", lambda values: upload(values.to(dtype))))
    if isinstance(first, Int8Weight):
        zero_points = None
        if first.zero_points is not None:
            zero_points = _joined(run, "zero_points", upload)
        return Int8(_joined(run, "values", upload), _joined(run, "scales", upload), zero_points)
    if isinstance(first, Fp8Weight):
        size = first.group_size or _WHOLE_ROWS
        return Fp8(_joined(run, "values", upload), _joined(run, "scales", upload), size, dtype)
    if isinstance(first, BlockWeight):
        return _blocks([part for part in run if isinstance(part, BlockWeight)], upload)
    packed = [PackedGroups.of(part).weight for part in run if isinstance(part, GroupedWeight)]
    offsets = None if first.offsets is None else _joined(packed, "offsets", upload)
    return Grouped(
        _joined(packed, "codes", upload),
        _joined(packed, "scales", upload),
        offsets,
        first.bits,
        first.group_size,
        None if first.act_order is None else upload(first.act_order),
    )


def _blocks(parts: Sequence[BlockWeight], upload: Upload) -> Blocks:
    if parts[0].stored_format.scales_are_floats:
        parts = [_with_half_scales(part) for part in parts]
    stored_format, inputs = parts[0].stored_format, parts[0].codes.shape[1]
    if stored_format.lattice is not None or stored_format.trits:
        raise UnsupportedError("the GPU backend has no weights of IQ1, IQ2, IQ3 and TQ1_0.")
    packed = [PackedBlocks.of(part) for part in parts]
    planes = zip(*(part.planes for part in packed), strict=True)
    of_groups = {
        field: None if getattr(parts[0], field) is None else _joined(parts, field, upload)
        for field in ("minima", "block_scales", "block_minima")
    }
    codebook = stored_format.codebook
    return Blocks(
        stored_format,
        inputs,
        tuple(upload(torch.cat(each)) for each in planes),
        plane_widths(stored_format.bits),
        None if codebook is None else upload(torch.tensor(codebook, dtype=torch.int8)),
        _joined(parts, "scales", upload),
        **of_groups,
    )


def _with_half_scales(part: BlockWeight) -> BlockWeight:
    """The weight with a float16 for each group, instead of an E4M3 float and a float16 for all of its block."""
    size = part.stored_format.group_size
    plain = replace(part.stored_format, block_size=size, integer_scales=False)
    return BlockWeight(plain, part.codes, part.group_scales().half(), None, None, None)


def _joined(parts: Sequence[object], field: str, upload: Upload) -> Tensor:
    tensors: list[Tensor] = [getattr(part, field) for part in parts]
    return upload(tensors[0] if len(tensors) == 1 else torch.cat(tensors))
