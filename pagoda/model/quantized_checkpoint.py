# SPDX-License-Identifier: Apache-2.0
"""Linear layers of ready-made quantized checkpoints: compressed-tensors, fp8, AWQ and GPTQ in safetensors files.

All but fp8 pack small unsigned integers into 32-bit words, the first in the lowest bits; what they mean is
`scale * (code - zero point)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pagoda.backend.fp8 import E4M3
from pagoda.backend.weights import (
    BlockWeight,
    DenseWeight,
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    LinearWeight,
)
from pagoda.checkpoints.fp8_config import Fp8Scheme
from pagoda.checkpoints.linears import LinearSpec
from pagoda.checkpoints.quantization_config import CheckpointQuantization, GroupScheme
from pagoda.checkpoints.tensor_names import StoredRows
from pagoda.checkpoints.weight_formats import BlockFormat, Fp8Format, Int8Format, held_group_size
from pagoda.errors import ConfigError
from pagoda.model.fp8_weights import convert_fp8, is_finite
from pagoda.model.ggml_blocks import mxfp4_scales
from pagoda.model.sharding import LinearShard, take_part
from pagoda.model.weights import READABLE, CheckpointWeights, in_head_order, stored_rows

_FP8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
_FP8_SCALES = READABLE | {"F8_E8M0": "float8_e8m0fnu"}
_INT8 = {"I8": "int8"}
_UINT8 = {"U8": "uint8"}
_INT32 = {"I32": "int32"}
_INTEGERS = {"I32": "int32", "I64": "int64"}
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Places of the eight codes in a word: the even ones lie below the odd ones."""


class QuantizedCheckpoint:
    """A checkpoint whose config.json has a `quantization_config`."""

    def __init__(self, tensors: CheckpointWeights, quantization: CheckpointQuantization) -> None:
        self._tensors = tensors
        self._quantization = quantization

    def read_into(self, name: str, out: Tensor) -> None:
        self._tensors.read_into(name, out)

    def linear(self, linear: LinearSpec, dtype: torch.dtype) -> LinearWeight:
        weight = self._stored(replace(linear, head_order=None), dtype)
        return _in_head_order(weight, linear.head_order)

    def _stored(self, linear: LinearSpec, dtype: torch.dtype) -> LinearWeight:
        scheme = self._quantization.scheme_of(linear)
        if scheme is None:
            return self._tensors.linear(linear, dtype)
        if isinstance(scheme, BlockFormat):
            return self._mxfp4(linear, scheme)
        if linear.rows is not None:
            return self._rows(linear, linear.rows, dtype)
        if isinstance(scheme, Fp8Scheme):
            return self._fp8(linear, scheme, dtype)
        if isinstance(scheme, Int8Format):
            return self._int8(linear)
        reader = _GroupReader(self._tensors, linear, scheme)
        match self._quantization.layout:
            case "compressed-tensors":
                return reader.compressed_tensors()
            case "awq":
                return reader.awq()
            case layout:
                return reader.gptq(zero_offset=1 if layout == "gptq" else 0)

    def _rows(self, linear: LinearSpec, rows: StoredRows, dtype: torch.dtype) -> LinearWeight:
        """A layer's rows of a tensor that holds several, and that is quantized as one."""
        if len(rows.shape) > 2:
            raise ConfigError(
                f"{rows.tensor} holds quantized weights of all experts in one tensor, which Pagoda does not read."
            )
        outputs, inputs = rows.shape
        joined = LinearSpec(rows.tensor, outputs, inputs, linear.role)
        whole = self.linear(joined, dtype)
        if rows.group:
            return _with_outputs(whole, lambda numbers: stored_rows(numbers, linear))
        part = LinearShard(range(rows.first, rows.first + linear.outputs), range(inputs))
        return take_part(linear, whole, part, dtype)

    def _fp8(self, linear: LinearSpec, scheme: Fp8Scheme, dtype: torch.dtype) -> LinearWeight:
        """A layer whose file has other floats is taken as it is, be it listed among those left out or not."""
        tensors, name = self._tensors, f"{linear.name}.weight"
        if tensors.stored_dtype(name) in READABLE:
            return tensors.linear(linear, dtype)
        values = tensors.tensor(name, (linear.outputs, linear.inputs), READABLE | _FP8)
        if not is_finite(values):
            raise ConfigError(
                f"{tensors.path_of(name)}: tensor {name} holds numbers that are not finite."
            )
        kinds = (f"{linear.name}.weight_scale", f"{linear.name}.weight_scale_inv")
        scales_name = kinds[1] if tensors.has(kinds[1]) else kinds[0]
        shape = scheme.scales_shape(linear.outputs, linear.inputs)
        # A scale for each output is a list or a column; one for all of them may be a plain number, too.
        flat = [(shape[0],), ()][: 2 if shape[0] == 1 else 1] if shape[1] == 1 else []
        stored = tensors.shape(scales_name)
        as_stored = stored if stored in flat else shape
        scales = tensors.tensor(scales_name, as_stored, _FP8_SCALES).float().reshape(shape)
        _check_finite(tensors, scales_name, scales, "float32")
        stored_format = self._quantization.format_of(linear)
        if isinstance(stored_format, Fp8Format) and values.dtype == E4M3:
            of_rows = scales.repeat_interleave(scheme.outputs or linear.outputs, dim=0)
            return Fp8Weight(values, of_rows[: linear.outputs], stored_format.group_size)
        return DenseWeight(convert_fp8(values, scales, scheme, dtype))

    def _mxfp4(self, linear: LinearSpec, stored_format: BlockFormat) -> BlockWeight:
        """Rows of the layer in the tensors of all experts, whose bytes hold two neighbouring inputs each."""
        stored, size = linear.stored, stored_format.block_size
        shape = (*stored.shape[:-1], linear.inputs // size)
        exponents = self._tensors.tensor(f"{stored.tensor}_scales", shape, _UINT8)
        packed = self._tensors.tensor(f"{stored.tensor}_blocks", (*shape, size // 2), _UINT8)
        own = stored.rows(linear.outputs)
        octets = packed.view(-1, linear.inputs // 2)[own]
        codes = torch.stack((octets & 15, octets >> 4), dim=2).flatten(1)
        scales = mxfp4_scales(exponents.view(-1, shape[-1])[own])
        _check_finite(self._tensors, f"{stored.tensor}_scales", scales, "float16")
        return BlockWeight(stored_format, codes, scales, None, None, None)

    def _int8(self, linear: LinearSpec) -> Int8Weight:
        tensors, name, outputs = self._tensors, linear.name, linear.outputs
        values = tensors.tensor(f"{name}.weight", (outputs, linear.inputs), _INT8)
        scales_name = f"{name}.weight_scale"
        flat = tensors.shape(scales_name) == (outputs,)
        shape = (outputs,) if flat else (outputs, 1)
        scales = tensors.tensor(scales_name, shape, READABLE).float().flatten()
        _check_finite(tensors, scales_name, scales, "float32")
        # Magnitude 128 has no positive counterpart. Compressors round 127.5 to it, so 127 is as near.
        return Int8Weight(values.clamp(min=-127), scales)


def _in_head_order(weight: LinearWeight, order: tuple[int, ...] | None) -> LinearWeight:
    """A weight whose outputs are brought into another order within each head."""
    if order is None:
        return weight
    return _with_outputs(weight, lambda numbers: in_head_order(numbers, order))


def _with_outputs(weight: LinearWeight, choose: Callable[[Tensor], Tensor]) -> LinearWeight:
    """Outputs of a weight that are chosen from all, in an order of their own."""

    def chosen(numbers: Tensor | None) -> Tensor | None:
        return None if numbers is None else choose(numbers)

    if isinstance(weight, DenseWeight):
        return DenseWeight(choose(weight.values))
    scales = choose(weight.scales)
    if isinstance(weight, Fp8Weight):
        return Fp8Weight(choose(weight.values), scales, weight.group_size)
    if isinstance(weight, Int8Weight):
        return Int8Weight(choose(weight.values), scales, chosen(weight.zero_points))
    if isinstance(weight, BlockWeight):
        raise TypeError("Checkpoints in safetensors files hold no blocks of ggml.")
    codes = choose(weight.codes)
    return replace(weight, codes=codes, scales=scales, offsets=chosen(weight.offsets))


class _GroupReader:
    """Reads one linear layer of a `GroupScheme`."""

    def __init__(self, tensors: CheckpointWeights, linear: LinearSpec, scheme: GroupScheme) -> None:
        name, inputs = linear.name, linear.inputs
        self._tensors = tensors
        self._name = name
        self._outputs = linear.outputs
        self._inputs = inputs
        self._scheme = scheme
        self._held_group_size = held_group_size(name, inputs, scheme.group_size)
        self._group_size = scheme.group_size or inputs
        self._num_groups = inputs // self._group_size
        self._per_word = 32 // scheme.bits

    def compressed_tensors(self) -> GroupedWeight:
        self._check_stored_shape()
        words = self._words("weight_packed", self._outputs, self._inputs // self._per_word)
        scales = self._scales("weight_scale", self._outputs, self._num_groups)
        offsets = None
        if not self._scheme.symmetric:
            kind, packed_outputs = "weight_zero_point", -(-self._outputs // self._per_word)
            zeros = self._unpacked(self._words(kind, packed_outputs, self._num_groups).t())
            offsets = self._offsets(kind, scales, zeros[:, : self._outputs].t())
        return self._weight(self._unpacked(words), scales, offsets, self._act_order("weight_g_idx"))

    def awq(self) -> GroupedWeight:
        packed_outputs = self._packed_outputs()
        codes = self._unpacked(self._words("qweight", self._inputs, packed_outputs))
        scales = self._scales("scales", self._num_groups, self._outputs).t()
        zeros = self._unpacked(self._words("qzeros", self._num_groups, packed_outputs))
        offsets = self._offsets("qzeros", scales, _in_awq_order(zeros).t())
        return self._weight(_in_awq_order(codes).t(), scales, offsets, None)

    def gptq(self, zero_offset: int) -> GroupedWeight:
        words = self._words("qweight", self._inputs // self._per_word, self._outputs)
        scales = self._scales("scales", self._num_groups, self._outputs).t()
        zeros = self._unpacked(self._words("qzeros", self._num_groups, self._packed_outputs()))
        # A zero point may be 2 ** bits, which bytes do not hold.
        offsets = self._offsets("qzeros", scales, zeros.t().float() + zero_offset)
        return self._weight(self._unpacked(words.t()), scales, offsets, self._act_order("g_idx"))

    def _check_stored_shape(self) -> None:
        name = f"{self._name}.weight_shape"
        stored = self._tensors.tensor(name, (2,), _INTEGERS).tolist()
        if stored != [self._outputs, self._inputs]:
            raise ConfigError(
                f"{self._tensors.path_of(name)}: {name} says {stored}, "
                f"config.json calls for {[self._outputs, self._inputs]}."
            )

    def _packed_outputs(self) -> int:
        if self._outputs % self._per_word:
            raise ConfigError(
                f"{self._name}.qweight has {self._outputs} outputs, "
                f"which must be a multiple of the {self._per_word} that a 32-bit word holds."
            )
        return self._outputs // self._per_word

    def _words(self, kind: str, *shape: int) -> Tensor:
        return self._tensors.tensor(f"{self._name}.{kind}", shape, _INT32)

    def _unpacked(self, words: Tensor) -> Tensor:
        """Codes [n, m * per_word] uint8 of words [n, m], the lowest bits first."""
        # Bytes of a word lie in memory from the lowest to the highest on all machines that torch runs on.
        octets = words.contiguous().view(torch.uint8)
        if self._scheme.bits == 8:
            return octets
        return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)

    def _scales(self, kind: str, *shape: int) -> Tensor:
        name = f"{self._name}.{kind}"
        scales = self._tensors.tensor(name, shape, READABLE).to(torch.float16)
        _check_finite(self._tensors, name, scales, "float16")
        return scales

    def _act_order(self, kind: str) -> Tensor | None:
        """Inputs by their groups; None where they lie so already."""
        name = f"{self._name}.{kind}"
        if not (self._scheme.act_order or self._tensors.has(name)):
            return None
        groups = self._tensors.tensor(name, (self._inputs,), _INTEGERS).long()
        in_order = torch.arange(self._num_groups).repeat_interleave(self._group_size)
        if torch.equal(groups, in_order):
            return None
        sorted_groups, order = groups.sort(stable=True)
        if not torch.equal(sorted_groups, in_order):
            raise ConfigError(
                f"{self._tensors.path_of(name)}: {name} must put {self._group_size} inputs into each of "
                f"{self._num_groups} groups."
            )
        return order

    def _offsets(self, kind: str, scales: Tensor, zeros: Tensor) -> Tensor | None:
        """Offsets from scales and zero points [out, groups]."""
        distances = 2 ** (self._scheme.bits - 1) - zeros.float()
        if not bool(distances.any()):
            return None
        offsets: Tensor = (scales.float() * distances).to(torch.float16)
        _check_finite(self._tensors, f"{self._name}.{kind}", offsets, "float16")
        return offsets

    def _weight(
        self, codes: Tensor, scales: Tensor, offsets: Tensor | None, order: Tensor | None
    ) -> GroupedWeight:
        """The weight of codes [out, in], scales and offsets [out, groups]."""
        repeats = self._group_size // self._held_group_size
        if order is not None:
            codes = codes[:, order]
        return GroupedWeight(
            codes=codes.contiguous(),
            scales=scales.repeat_interleave(repeats, dim=1),
            offsets=None if offsets is None else offsets.repeat_interleave(repeats, dim=1),
            bits=self._scheme.bits,
            group_size=self._held_group_size,
            act_order=order,
        )


def _in_awq_order(codes: Tensor) -> Tensor:
    return codes.view(len(codes), -1, 8)[:, :, list(_AWQ_PLACES)].flatten(1)


def _check_finite(tensors: CheckpointWeights, name: str, scales: Tensor, dtype: str) -> None:
    if not bool(scales.isfinite().all()):
        raise ConfigError(
            f"{tensors.path_of(name)}: tensor {name} holds scales that are not finite in {dtype}."
        )
