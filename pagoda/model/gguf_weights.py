# SPDX-License-Identifier: Apache-2.0
"""Weights out of a GGUF file."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagoda.backend.weights import BlockWeight, DenseWeight, LinearWeight, dequantize
from pagoda.checkpoints.gguf.config import checked_tensor, scale_of_all
from pagoda.checkpoints.gguf.reader import GgufFile, GgufTensor
from pagoda.checkpoints.linears import HeadFill, LinearRole, LinearSpec
from pagoda.errors import ConfigError
from pagoda.model.ggml_blocks import floats, linear_weight
from pagoda.model.sharding import LinearShard, take_part
from pagoda.model.weights import of_unit_length, own_rows

_LEAST_HALF, _MOST_HALF = 2.0**-14, 65504.0
"""Numbers between which float16 has all of its digits."""


class GgufWeights:
    """The tensors of a GGUF file, mapped into memory and converted one at a time; see `WeightSource`."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._mapped: dict[Path, mmap.mmap] = {}
        """Each is let go when no tensor is left that lies in it."""

    def read_into(self, name: str, out: Tensor) -> None:
        tensor = self._file.tensor(name)
        # llama.cpp makes matrices of vectors of Mamba-2: of one column, or of a row for each group. Dimensions of
        # one come and go.
        sizes = [[size for size in it if size > 1] for it in (tensor.shape, out.shape)]
        is_vector = out.dim() < 2 and math.prod(tensor.shape) == out.numel()
        if not is_vector and sizes[0] != sizes[1]:
            checked_tensor(self._file, name, tuple(out.shape))
        rows = self._with_end(self._rows(tensor), tensor)
        values = floats(rows, tensor.type).view(out.shape)
        out.copy_(values * scale_of_all(self._file, tensor, 0))

    def linear(self, linear: LinearSpec, dtype: torch.dtype) -> LinearWeight:
        stored = linear.stored
        # llama.cpp drops dimensions of one.
        shape = stored.shape[1:] if stored.shape[0] == 1 else stored.shape
        tensor = checked_tensor(self._file, stored.weight, shape)
        rows, fill = self._rows(tensor), linear.fill
        if fill is not None:
            rows = self._with_end(rows, tensor)  # no scale is behind rows of zeros
            if linear.role is LinearRole.ATTENTION_OUT:
                whole = self._weight(rows, tensor, linear, dtype)
                return _filled_inputs(whole, linear, fill, dtype)
        own = own_rows(rows, linear)
        own = own if fill is not None else self._with_end(own, tensor)
        weight = self._weight(own, tensor, linear, dtype)
        if linear.unit is not None:
            values = weight.values if isinstance(weight, DenseWeight) else dequantize(weight)
            return DenseWeight(of_unit_length(values, linear).to(dtype))
        if linear.role is LinearRole.STATE_OUT and linear.value_order is not None:
            weight = _in_value_order(weight, linear, linear.value_order, dtype)
        if isinstance(weight, BlockWeight):
            for numbers in (weight.group_scales(), weight.group_minima()):
                _check_finite(tensor, numbers)
        return weight

    def _weight(
        self, rows: Tensor, tensor: GgufTensor, linear: LinearSpec, dtype: torch.dtype
    ) -> LinearWeight:
        """The weight in rows of a tensor, with the scale of all of it."""
        weight, stored = linear_weight(rows, tensor.type, dtype), linear.stored
        scale = scale_of_all(self._file, tensor, stored.first // stored.shape[-2])
        if scale == 1 or not isinstance(weight, BlockWeight) or weight.block_scales is None:
            return weight
        return replace(weight, block_scales=(weight.block_scales.float() * scale).half())

    def _rows(self, tensor: GgufTensor) -> Tensor:
        """The tensor's bytes, [rows, bytes of a row] uint8, without those behind all rows."""
        path = tensor.path
        if path not in self._mapped:
            with path.open("rb") as file:
                # Nothing is written, but torch knows no memory that cannot be.
                self._mapped[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        count = tensor.num_bytes - tensor.type.behind
        return self._octets(tensor, 0, count).view(math.prod(tensor.shape[:-1]), -1)

    def _with_end(self, rows: Tensor, tensor: GgufTensor) -> Tensor:
        """Rows of a tensor, few or all, with what lies behind all at the end of each.
        Raises ConfigError: codes or scale are not those of I2_S, the type that has a scale there."""
        behind = tensor.type.behind
        if not behind:
            return rows
        end = self._octets(tensor, tensor.num_bytes - behind, behind)
        scale = abs(float(end[:4].clone().view(torch.float32)))
        if scale and not _LEAST_HALF <= scale <= _MOST_HALF:
            raise ConfigError(
                f"{tensor.path}: tensor {tensor.name} has a scale of magnitude {scale}, which must be 0, or from "
                "2^-14 to 65504."
            )
        # Programs that read it differ in what it stands for.
        if (rows & rows >> 1 & 0x55).any():
            raise ConfigError(
                f"{tensor.path}: tensor {tensor.name} has the code 3, which stands for no weight of I2_S."
            )
        return torch.cat([rows, end.expand(len(rows), behind)], dim=1)

    def _octets(self, tensor: GgufTensor, first: int, count: int) -> Tensor:
        at = tensor.start + first
        return torch.frombuffer(
            self._mapped[tensor.path], dtype=torch.uint8, count=count, offset=at
        )


def _filled_inputs(
    weight: LinearWeight, linear: LinearSpec, fill: HeadFill, dtype: torch.dtype
) -> LinearWeight:
    """A weight whose inputs are heads that are filled with zeros, in blocks of no more than one head."""
    size = math.gcd(fill.stored_dim, fill.dim)
    outputs, count = range(linear.outputs), fill.stored_heads * fill.stored_dim // size
    stored = replace(linear, inputs=count * size, rows=None, fill=None)
    parts = [
        take_part(stored, weight, LinearShard(outputs, range(at * size, (at + 1) * size)), dtype)
        for at in range(count)
    ]
    zeros = _changed(parts[0], lambda name: torch.zeros_like(getattr(parts[0], name)))
    own, missing = fill.stored_dim // size, (fill.dim - fill.stored_dim) // size
    heads = [parts[at : at + own] + [zeros] * missing for at in range(0, count, own)]
    return _joined([part for head in heads for part in head])


def _changed(weight: LinearWeight, change: Callable[[str], Tensor]) -> LinearWeight:
    """A weight with other tensors, by their names."""
    if isinstance(weight, BlockWeight):
        names = [name for name, it in vars(weight).items() if isinstance(it, Tensor)]
        changed: dict[str, Any] = {name: change(name) for name in names}
        return replace(weight, **changed)
    return DenseWeight(change("values"))


def _joined(parts: Sequence[LinearWeight]) -> LinearWeight:
    """Parts of the inputs of a weight, one behind the other."""
    return _changed(
        parts[0], lambda name: torch.cat([getattr(part, name) for part in parts], dim=1)
    )


def _in_value_order(
    weight: LinearWeight, linear: LinearSpec, order: tuple[int, ...], dtype: torch.dtype
) -> LinearWeight:
    """A weight whose inputs are heads that are brought into an order.
    Raises ConfigError: the weight cannot be cut between heads."""
    size, outputs = linear.inputs // len(order), range(linear.outputs)
    parts = [
        take_part(
            linear, weight, LinearShard(outputs, range(head * size, (head + 1) * size)), dtype
        )
        for head in order
    ]
    return _joined(parts)


def _check_finite(tensor: GgufTensor, numbers: Tensor | None) -> None:
    if numbers is not None and not torch.isfinite(numbers).all():
        raise ConfigError(f"{tensor.path}: tensor {tensor.name} has scales that are not finite.")
