# SPDX-License-Identifier: Apache-2.0
"""Linear layers in 4-bit floats: MXFP4 (OCP Microscaling Formats 1.0) and NVFP4 (NVIDIA, 2025).

A byte holds two neighbouring inputs, the first in its low half.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagoda.backend.weights import BlockWeight, DenseWeight
from pagoda.checkpoints.linears import LinearSpec
from pagoda.checkpoints.weight_formats import NVFP4, BlockFormat, held_block_format
from pagoda.errors import ConfigError
from pagoda.model.ggml_blocks import mxfp4_scales
from pagoda.model.weights import CheckpointWeights

_UINT8, _E4M3, _FLOAT32 = {"U8": "uint8"}, {"F8_E4M3": "float8_e4m3fn"}, {"F32": "float32"}
_HALF_UNIT = 2.0**7
"""Half, as codes stand for twice their numbers, of what 8-bit floats that count 2^-8 are divided by."""


def experts_in_mxfp4(
    tensors: CheckpointWeights, linear: LinearSpec, stored_format: BlockFormat
) -> BlockWeight:
    """Rows of the layer in the tensors of all experts, as gpt-oss has them."""
    stored, size = linear.stored, stored_format.block_size
    shape = (*stored.shape[:-1], linear.inputs // size)
    exponents = tensors.tensor(f"{stored.tensor}_scales", shape, _UINT8)
    packed = tensors.tensor(f"{stored.tensor}_blocks", (*shape, size // 2), _UINT8)
    own = stored.rows(linear.outputs)
    codes = _codes(packed.view(-1, linear.inputs // 2)[own])
    scales = mxfp4_scales(exponents.view(-1, shape[-1])[own])
    _check_finite(tensors, f"{stored.tensor}_scales", scales)
    return BlockWeight(stored_format, codes, scales, None, None, None)


def four_bit_floats(
    tensors: CheckpointWeights, linear: LinearSpec, stored: BlockFormat, dtype: torch.dtype
) -> BlockWeight | DenseWeight:
    """A layer of its own in MXFP4 or NVFP4; numbers in `dtype` where the inputs are no multiple of 32.
    Raises ConfigError: a tensor does not fit."""
    name = f"{linear.name}.weight"
    if linear.inputs % stored.group_size:
        raise ConfigError(
            f"{name} has {linear.inputs} inputs, which groups of {stored.group_size} do not divide."
        )
    packed_name = f"{name}_packed" if tensors.has(f"{name}_packed") else name
    groups = (linear.outputs, linear.inputs // stored.group_size)
    codes = _codes(tensors.tensor(packed_name, (linear.outputs, linear.inputs // 2), _UINT8))
    scales_name = f"{name}_scale"
    if not stored.integer_scales:
        scales = mxfp4_scales(tensors.tensor(scales_name, groups, _UINT8))
        _check_finite(tensors, scales_name, scales)
        return BlockWeight(stored, codes, scales, None, None, None)
    scales = tensors.tensor(scales_name, groups, _E4M3)
    if not bool(scales.float().isfinite().all()):
        _refuse_scales(tensors, scales_name)
    of_all = _HALF_UNIT * _scale_of_all(tensors, name)
    held = held_block_format(stored, linear.inputs)
    if not isinstance(held, BlockFormat):
        numbers = BlockWeight(NVFP4, codes, scales, None, None, None).numbers()
        spread = scales.float().repeat_interleave(stored.group_size, dim=1) * (of_all / 2**8)
        return DenseWeight((numbers * spread).to(dtype))
    blocks = torch.full((linear.outputs, linear.inputs // held.block_size), of_all).half()
    return BlockWeight(held, codes, scales, None, blocks, None)


def _scale_of_all(tensors: CheckpointWeights, name: str) -> float:
    """Scale of all groups, the inverse of which compressed-tensors stores."""
    is_inverse = tensors.has(f"{name}_global_scale")
    stored = f"{name}_global_scale" if is_inverse else f"{name}_scale_2"
    shape = tensors.shape(stored)
    of_all = float(tensors.tensor(stored, shape if shape == () else (1,), _FLOAT32).item())
    if is_inverse:
        of_all = 1 / of_all if of_all else 0.0
    # Beyond these float16 has no number of full precision.
    if not 2.0**-21 <= of_all <= 2.0**8:
        raise ConfigError(
            f"{tensors.path_of(stored)}: tensor {stored} makes {of_all} of one, which must be from 2^-21 to 256."
        )
    return of_all


def _codes(octets: Tensor) -> Tensor:
    return torch.stack((octets & 15, octets >> 4), dim=2).flatten(1)


def _check_finite(tensors: CheckpointWeights, name: str, scales: Tensor) -> None:
    if not bool(scales.isfinite().all()):
        _refuse_scales(tensors, name)


def _refuse_scales(tensors: CheckpointWeights, name: str) -> None:
    raise ConfigError(
        f"{tensors.path_of(name)}: tensor {name} holds scales that are not finite in float16."
    )
