# SPDX-License-Identifier: Apache-2.0
"""Linear layers as bitsandbytes stores them (Dettmers et al. 2022 and 2023).

Four bits: all numbers of a weight, one row after the other, are cut into blocks, and each is the highest magnitude
of its block times the number that its code stands for. These magnitudes may be codes of a table themselves.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from torch import Tensor

from pagoda.backend.weights import BlockWeight, DenseWeight, Int8Weight
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.linears import LinearSpec
from pagoda.checkpoints.weight_formats import (
    FP4_UNIT,
    NF4_CODEBOOK,
    NF4_UNIT,
    BlockFormat,
    held_block_format,
)
from pagoda.errors import ConfigError
from pagoda.model.weights import READABLE, CheckpointWeights, check_finite

_FLOAT32, _UINT8, _INT8 = {"F32": "float32"}, {"U8": "uint8"}, {"I8": "int8"}
_MAX_STATE_BYTES = 2**16
_LEAST_BLOCK = 32


def int8_weight(tensors: CheckpointWeights, linear: LinearSpec) -> Int8Weight:
    """Codes times the highest magnitude of their output, over 127. Raises ConfigError: a tensor does not fit."""
    values = tensors.tensor(f"{linear.name}.weight", (linear.outputs, linear.inputs), _INT8)
    highest = tensors.tensor(f"{linear.name}.SCB", (linear.outputs,), READABLE).float()
    check_finite(tensors, f"{linear.name}.SCB", highest, "float32")
    return Int8Weight(values.clamp(min=-127), highest / 127)


def four_bit_weight(
    tensors: CheckpointWeights, linear: LinearSpec, stored: BlockFormat, dtype: torch.dtype
) -> BlockWeight | DenseWeight:
    """Codes with the scales of their blocks; numbers in `dtype` where rows are no multiple of 32 inputs.
    Raises ConfigError: a tensor does not fit."""
    is_nf4 = stored.codebook == NF4_CODEBOOK
    name, shape = f"{linear.name}.weight", (linear.outputs, linear.inputs)
    state = _State.read(tensors, name, "nf4" if is_nf4 else "fp4", shape)
    octets = tensors.stored(name).contiguous().view(torch.uint8).flatten()
    count = linear.outputs * linear.inputs
    if len(octets) != -(-count // 2):
        raise ConfigError(
            f"{tensors.path_of(name)}: tensor {name} has {len(octets)} bytes, "
            f"config.json calls for {-(-count // 2)}."
        )
    codes = torch.stack((octets >> 4, octets & 15), dim=1).flatten()[:count].view(shape)
    blocks = -(-count // state.block_size)
    highest = _highest(tensors, name, state, blocks)
    numbers = tensors.tensor(f"{name}.quant_map", (16,), _FLOAT32)
    unit = NF4_UNIT if is_nf4 else FP4_UNIT
    held = held_block_format(stored, linear.inputs)
    if not isinstance(held, BlockFormat):
        spread = highest[torch.arange(count) // state.block_size].view(shape)
        return DenseWeight((numbers[codes.long()] * spread).to(dtype))
    if (numbers * unit - torch.tensor(held.codebook)).abs().max() > 0.5:
        raise ConfigError(
            f"{tensors.path_of(name)}: tensor {name}.quant_map must hold the numbers of "
            f"{'nf4' if is_nf4 else 'fp4'}."
        )
    places = torch.arange(count // held.group_size) * held.group_size // state.block_size
    scales = (highest / unit).half()[places].view(linear.outputs, -1)
    check_finite(tensors, f"{name}.absmax", scales, "float16")
    return BlockWeight(held, codes, scales, None, None, None)


@dataclass(frozen=True)
class _State:
    """Sizes that a file has for each weight."""

    block_size: int
    nested_size: int | None
    """Highest magnitudes of a block of theirs; None if they are floats."""
    offset: float
    """The number that was taken from them before they became codes."""

    @classmethod
    def read(
        cls, tensors: CheckpointWeights, weight: str, kind: str, shape: tuple[int, int]
    ) -> _State:
        name = f"{weight}.quant_state.bitsandbytes__{kind}"
        size = tensors.shape(name)
        source = f"{tensors.path_of(name)}: tensor {name}"
        if len(size) != 1 or size[0] > _MAX_STATE_BYTES:
            raise ConfigError(f"{source} must hold a JSON object.")
        try:
            values = json.loads(bytes(tensors.tensor(name, size, _UINT8).tolist()))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{source} must hold a JSON object.") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{source} must hold a JSON object.")
        fields = Fields(values, source)
        if fields.values.get("shape") != list(shape):
            fields.refuse("shape", f"must be {list(shape)}, as config.json calls for")
        block_size = fields.positive("blocksize", 64)
        if block_size % _LEAST_BLOCK:
            fields.refuse("blocksize", f"must be a multiple of {_LEAST_BLOCK}")
        if not tensors.has(f"{weight}.nested_absmax"):
            return cls(block_size, None, 0.0)
        return cls(
            block_size,
            fields.positive("nested_blocksize", 256),
            fields.amount("nested_offset", 0.0),
        )


def _highest(tensors: CheckpointWeights, weight: str, state: _State, blocks: int) -> Tensor:
    """Highest magnitudes [blocks] float32."""
    name = f"{weight}.absmax"
    if state.nested_size is None:
        return tensors.tensor(name, (blocks,), _FLOAT32)
    codes = tensors.tensor(name, (blocks,), _UINT8)
    table = tensors.tensor(f"{weight}.nested_quant_map", (256,), _FLOAT32)
    nested = (-(-blocks // state.nested_size),)
    highest = tensors.tensor(f"{weight}.nested_absmax", nested, _FLOAT32)
    places = torch.arange(blocks) // state.nested_size
    return table[codes.long()] * highest[places] + state.offset
