# SPDX-License-Identifier: Apache-2.0
"""Linear layers of ready-made quantized checkpoints in safetensors files, of whatever format."""

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
    Int8Weight,
    LinearWeight,
    dequantize,
)
from pagoda.checkpoints.checkpoint_quantization import CheckpointQuantization
from pagoda.checkpoints.fp8_config import Fp8Scheme
from pagoda.checkpoints.linears import LinearSpec
from pagoda.checkpoints.tensor_names import StoredRows
from pagoda.checkpoints.weight_formats import TERNARY, BlockFormat, Fp8Format, Int8Format
from pagoda.errors import ConfigError
from pagoda.model import bitsandbytes
from pagoda.model.four_bit_floats import experts_in_mxfp4, four_bit_floats
from pagoda.model.fp8_weights import convert_fp8, is_finite
from pagoda.model.packed_weights import GroupReader
from pagoda.model.sharding import LinearShard, take_part
from pagoda.model.ternary import ternary_weight
from pagoda.model.weights import (
    READABLE,
    CheckpointWeights,
    check_finite,
    filled,
    in_head_order,
    stored_rows,
)

_FP8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
_FP8_SCALES = READABLE | {"F8_E8M0": "float8_e8m0fnu", "U8": "uint8"}
_INT8 = {"I8": "int8"}


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
        scheme, layout = self._quantization.scheme_of(linear), self._quantization.layout
        if scheme is None or self._is_dense(linear):
            return self._tensors.linear(linear, dtype)
        if layout == "mxfp4":
            return experts_in_mxfp4(self._tensors, linear)
        if linear.fill is not None:
            return self._filled(linear, dtype)
        if linear.rows is not None:
            return self._rows(linear, linear.rows, dtype)
        if scheme == TERNARY:
            return ternary_weight(self._tensors, linear, layout, dtype)
        if isinstance(scheme, BlockFormat):
            is_theirs = layout == "bitsandbytes"
            read = bitsandbytes.four_bit_weight if is_theirs else four_bit_floats
            return read(self._tensors, linear, scheme, dtype)
        if isinstance(scheme, Fp8Scheme):
            return self._fp8(linear, scheme, dtype)
        if isinstance(scheme, Int8Format):
            if layout == "bitsandbytes":
                return bitsandbytes.int8_weight(self._tensors, linear)
            return self._int8(linear, scheme)
        return GroupReader(self._tensors, linear, scheme).read(layout)

    def _is_dense(self, linear: LinearSpec) -> bool:
        """Tells if a layer's file has plain numbers, be it listed among those left out or not."""
        name, layout = linear.stored.weight, self._quantization.layout
        if layout == "bitnet_online" or (self._tensors.has(f"{name}_scale") and layout == "bitnet"):
            return False
        if not self._tensors.has(name) or self._tensors.has(f"{name}.absmax"):
            return False
        return self._tensors.stored_dtype(name) in READABLE

    def _filled(self, linear: LinearSpec, dtype: torch.dtype) -> DenseWeight:
        """Plain numbers of heads that are filled with zeros."""
        outputs, inputs = linear.stored.shape
        whole = self.linear(LinearSpec(linear.stored.tensor, outputs, inputs, linear.role), dtype)
        return DenseWeight(filled(dequantize(whole), linear).to(dtype))

    def _rows(self, linear: LinearSpec, rows: StoredRows, dtype: torch.dtype) -> LinearWeight:
        """A layer's rows of a tensor that holds several, and that is quantized as one."""
        scheme = self._quantization.scheme_of(linear)
        if len(rows.shape) > 2 and isinstance(scheme, Fp8Scheme):
            return self._fp8_of_expert(linear, rows, scheme, dtype)
        if len(rows.shape) > 2:
            raise ConfigError(
                f"{rows.tensor} holds weights of all experts in one tensor, which Pagoda reads of fp8 alone."
            )
        outputs, inputs = rows.shape
        joined = LinearSpec(rows.tensor, outputs, inputs, linear.role)
        whole = self.linear(joined, dtype)
        if rows.group:
            return _with_outputs(whole, lambda numbers: stored_rows(numbers, linear))
        part = LinearShard(range(rows.first, rows.first + linear.outputs), range(inputs))
        return take_part(linear, whole, part, dtype)

    def _fp8_of_expert(
        self, linear: LinearSpec, rows: StoredRows, scheme: Fp8Scheme, dtype: torch.dtype
    ) -> LinearWeight:
        """An expert's rows of the numbers and scales of all, with scales for it, for its blocks, or for all."""
        experts, outputs, inputs = rows.shape
        expert, first = divmod(rows.first, outputs)
        own = replace(rows, first=first).rows(linear.outputs)
        values = self._tensors.tensor(rows.weight, rows.stored_shape, _FP8)[expert]
        kinds = [f"{rows.weight}_{end}" for end in ("scale_inv", "weight_scale", "scale")]
        name = next((kind for kind in kinds if self._tensors.has(kind)), kinds[0])
        shape = scheme.scales_shape(outputs, inputs)
        stored = (experts, *(shape[::-1] if rows.transposed else shape))
        flat = [(experts,), (1,), ()] if shape == (1, 1) else []
        found = self._tensors.shape(name)
        of_all = self._tensors.tensor(name, found if found in flat else stored, _FP8_SCALES)
        of_all = of_all.reshape(-1, *stored[1:])
        scales = self._floats(name, of_all[expert if len(of_all) > 1 else 0])
        if rows.transposed:
            values, scales = values.t(), scales.t()
        of_rows = scales.repeat_interleave(scheme.outputs or outputs, dim=0)[own]
        return self._in_fp8(
            rows.weight,
            linear,
            values[own].contiguous(),
            of_rows,
            Fp8Scheme(1, scheme.inputs),
            dtype,
        )

    def _fp8(self, linear: LinearSpec, scheme: Fp8Scheme, dtype: torch.dtype) -> LinearWeight:
        tensors, name = self._tensors, f"{linear.name}.weight"
        values = tensors.tensor(name, (linear.outputs, linear.inputs), READABLE | _FP8)
        kinds = (f"{linear.name}.weight_scale", f"{linear.name}.weight_scale_inv")
        scales_name = kinds[1] if tensors.has(kinds[1]) else kinds[0]
        shape = scheme.scales_shape(linear.outputs, linear.inputs)
        # A scale for each output is a list or a column; one for all of them may be a plain number, too.
        flat = [(shape[0],), ()][: 2 if shape[0] == 1 else 1] if shape[1] == 1 else []
        stored = tensors.shape(scales_name)
        in_blocks = (shape[0], 1, shape[1], 1)  # of modelopt
        as_stored = stored if stored in [*flat, in_blocks] else shape
        scales = tensors.tensor(scales_name, as_stored, _FP8_SCALES).reshape(shape)
        scales = self._floats(scales_name, scales)
        return self._in_fp8(name, linear, values, scales, scheme, dtype)

    def _floats(self, name: str, scales: Tensor) -> Tensor:
        """Scales out of the tensor `name`, of which those of other experts are left alone, as float32."""
        if scales.dtype == torch.uint8:
            scales = scales.view(torch.float8_e8m0fnu)
        scales = scales.float()
        check_finite(self._tensors, name, scales, "float32")
        return scales

    def _in_fp8(
        self,
        name: str,
        linear: LinearSpec,
        values: Tensor,
        scales: Tensor,
        scheme: Fp8Scheme,
        dtype: torch.dtype,
    ) -> LinearWeight:
        """The layer of the tensor `name` in 8 bits where the backend keeps them, or in `dtype`."""
        if not is_finite(values):
            raise ConfigError(
                f"{self._tensors.path_of(name)}: tensor {name} holds numbers that are not finite."
            )
        stored_format = self._quantization.format_of(linear)
        if isinstance(stored_format, Fp8Format) and values.dtype == E4M3:
            of_rows = scales.repeat_interleave(scheme.outputs or linear.outputs, dim=0)
            return Fp8Weight(values, of_rows[: linear.outputs], stored_format.group_size)
        return DenseWeight(convert_fp8(values, scales, scheme, dtype))

    def _int8(self, linear: LinearSpec, scheme: Int8Format) -> Int8Weight:
        tensors, name, outputs = self._tensors, linear.name, linear.outputs
        values = tensors.tensor(f"{name}.weight", (outputs, linear.inputs), _INT8)
        scales_name = f"{name}.weight_scale"
        stored = tensors.shape(scales_name)
        shape = stored if stored in ((outputs,), (1,), ()) else (outputs, 1)
        scales = tensors.tensor(scales_name, shape, READABLE).float().flatten().expand(outputs)
        check_finite(tensors, scales_name, scales, "float32")
        if scheme.zero_points:
            zeros = tensors.tensor(f"{name}.weight_zero_point", shape, _INT8).flatten()
            return Int8Weight(values, scales.contiguous(), zeros.int().expand(outputs).contiguous())
        # Magnitude 128 has no positive counterpart. Compressors round 127.5 to it, so 127 is as near.
        return Int8Weight(values.clamp(min=-127), scales.contiguous())


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
    codes = choose(weight.codes)
    if isinstance(weight, BlockWeight):
        others = (weight.minima, weight.block_scales, weight.block_minima)
        return BlockWeight(weight.stored_format, codes, scales, *map(chosen, others))
    return replace(weight, codes=codes, scales=scales, offsets=chosen(weight.offsets))
