# SPDX-License-Identifier: Apache-2.0
"""Weights as a worker holds them."""

from __future__ import annotations

import torch
from torch import Tensor

from pagoda.backend.cpu.backend import CpuBackend
from pagoda.backend.weights import DenseWeight, LinearWeight
from pagoda.checkpoints.linears import LinearRole, LinearSpec
from pagoda.model.quantization import quantization_on_load
from pagoda.model.sharding import whole_part


def held_weight(
    ops: CpuBackend, values: Tensor, quantization: str, group_size: int = 32
) -> LinearWeight:
    """The weight [out, in] of an MLP as `--quantization` makes it; dense ones are in bfloat16."""
    outputs, inputs = values.shape
    dense = DenseWeight(values.to(torch.bfloat16))
    on_load = quantization_on_load(quantization, group_size)
    if on_load is None:
        return dense
    linear = LinearSpec("mlp", outputs, inputs, LinearRole.MLP_IN)
    return on_load.quantize(linear, whole_part(linear), dense, ops)
