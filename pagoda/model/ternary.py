# SPDX-License-Identifier: Apache-2.0
"""Linear layers of BitNet b1.58 (Ma et al. 2024): -1, 0 or 1 for each weight, times one number for all.

Four outputs share a byte: with a quarter as many rows r, byte [i, j] has outputs i, r + i, 2 r + i and 3 r + i of
input j, the first in its lowest bits, each with one added.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagoda.backend.weights import BlockWeight, DenseWeight
from pagoda.checkpoints.checkpoint_quantization import Layout
from pagoda.checkpoints.linears import LinearSpec
from pagoda.checkpoints.weight_formats import TERNARY, BlockFormat, held_block_format
from pagoda.errors import ConfigError
from pagoda.model.weights import READABLE, CheckpointWeights, check_finite

_UINT8 = {"U8": "uint8"}
_LEAST_MEAN = 1e-5


def ternary_weight(
    tensors: CheckpointWeights, linear: LinearSpec, layout: Layout, dtype: torch.dtype
) -> BlockWeight | DenseWeight:
    """Codes with their scale; numbers in `dtype` where rows are no multiple of 256 inputs.
    Raises ConfigError: a tensor does not fit."""
    name, shape = f"{linear.name}.weight", (linear.outputs, linear.inputs)
    if layout == "bitnet_online":
        weight = tensors.tensor(name, shape, READABLE).float()
        scale = weight.abs().mean().clamp(min=_LEAST_MEAN)
        codes = (weight * (1 / scale)).round().clamp(-1, 1) + 1
    else:
        codes, scale = _codes(tensors, name, shape), _scale(tensors, f"{name}_scale")
        scale = 1 / scale if layout == "bitnet_inverse" else scale
        check_finite(tensors, f"{name}_scale", scale, "float32")
    held = held_block_format(TERNARY, linear.inputs)
    if not isinstance(held, BlockFormat):
        return DenseWeight(((codes.float() - 1) * scale).to(dtype))
    scales = scale.half().expand(linear.outputs, linear.inputs // held.group_size).contiguous()
    check_finite(tensors, f"{name}_scale", scales, "float16")
    return BlockWeight(held, codes.to(torch.uint8), scales, None, None, None)


def _codes(tensors: CheckpointWeights, name: str, shape: tuple[int, int]) -> Tensor:
    """Weights [out, in] with one added, which some files have as plain numbers."""
    outputs, inputs = shape
    if tensors.stored_dtype(name) in READABLE:
        codes = tensors.tensor(name, shape, READABLE).float() + 1
        if not ((codes == 0) | (codes == 1) | (codes == 2)).all():
            raise ConfigError(
                f"{tensors.path_of(name)}: tensor {name} must hold -1, 0 and 1 alone."
            )
        return codes
    packed = tensors.tensor(name, (-(-outputs // 4), inputs), _UINT8)
    return torch.cat([packed >> 2 * place & 3 for place in range(4)])[:outputs]


def _scale(tensors: CheckpointWeights, name: str) -> Tensor:
    """The number of all weights: a tensor of one element, or a plain number."""
    stored = tensors.shape(name)
    scale = tensors.tensor(name, stored if stored in ((), (1,)) else (1,), READABLE).float()
    check_finite(tensors, name, scale, "float32")
    return scale.reshape(())
