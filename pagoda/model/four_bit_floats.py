# SPDX-License-Identifier: Apache-2.0
"""Linear layers in 4-bit floats: MXFP4 (OCP Microscaling Formats 1.0) and NVFP4 (NVIDIA, 2025).

A byte holds two neighbouring inputs, the first in its low half.
"""

from __future__ import annotations

import torch

from pagoda.backend.weights import BlockWeight, DenseWeight
from pagoda.checkpoints.linears import LinearSpec
from pagoda.checkpoints.weight_formats import MXFP4, NVFP4, BlockFormat, held_block_format
from pagoda.errors import ConfigError
from pagoda.model.ggml_blocks import mxfp4_scales, nibbles
from pagoda.model.weights import CheckpointWeights, check_finite

_UINT8, _E4M3, _FLOAT32 = {"U8": "uint8"}, {"F8_E4M3": "float8_e4m3fn"}, {"F32": "float32"}
_HALF_UNIT = 2.0**7
"""Half, as codes stand for twice their numbers, of what 8-bit floats that count 2^-8 are divided by."""


def experts_in_mxfp4(tensors: CheckpointWeights, linear: LinearSpec) -> BlockWeight:
    """Rows of the layer in the tensors of all experts, as gpt-oss has them."""
    stored, size = linear.stored, MXFP4.block_size
    shape = (*stored.shape[:-1], linear.inputs // size)
    exponents = tensors.tensor(f"{stored.tensor}_scales", shape, _UINT8)
    packed = tensors.tensor(f"{stored.tensor}_blocks", (*shape, size // 2), _UINT8)
    own = stored.rows(linear.outputs)
    codes = nibbles(packed.view(-1, linear.inputs // 2)[own], 1)
    scales = mxfp4_scales(exponents.view(-1, shape[-1])[own])
    check_finite(tensors, f"{stored.tensor}_scales", scales, "float16")
    return BlockWeight(MXFP4, codes, scales, None, None, None)


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
    codes = nibbles(tensors.tensor(packed_name, (linear.outputs, linear.inputs // 2), _UINT8), 1)
    scales_name = f"{name}_scale"
    if not stored.integer_scales:
        scales = mxfp4_scales(tensors.tensor(scales_name, groups, _UINT8))
        check_finite(tensors, scales_name, scales, "float16")
        return BlockWeight(stored, codes, scales, None, None, None)
    scales = tensors.tensor(scales_name, groups, _E4M3)
    check_finite(tensors, scales_name, scales.float(), "float16")
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
