# SPDX-License-Identifier: Apache-2.0
"""Codes of weights in the lattices of ggml's IQ types, and the trits of its TQ1_0."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from pagoda.checkpoints.lattices import Lattice, planes
from pagoda.checkpoints.weight_formats import TRITS_OF_BYTE as TRITS


@cache
def levels(lattice: Lattice) -> Tensor:
    """Levels of all points: [points, inputs] uint8."""
    first, second = _planes(lattice)
    twice = torch.arange(0, 8, 2, dtype=torch.uint8)
    low = first[:, None] >> twice & 3
    if lattice.inputs == 8:
        return torch.cat([low, second[:, None] >> twice & 3], dim=1)
    return low | (second[:, None] >> torch.arange(4, dtype=torch.uint8) & 1) << 2


def point_codes(lattice: Lattice, numbers: Tensor, signs: Tensor) -> Tensor:
    """Codes [rows, inputs] uint8 of points.

    They have numbers [rows, points], and signs [rows, n], 0 or 1, of all inputs, or of those that share one.
    """
    codes = levels(lattice)[numbers.long()].flatten(1)
    return codes | signs.repeat_interleave(lattice.sign_inputs, dim=1) << lattice.level_bits


def parts_of_codes(lattice: Lattice, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers and signs of which `point_codes` makes the codes."""
    shifts = lattice.level_bits * torch.arange(lattice.inputs)
    keys = (levels(lattice).long() << shifts).sum(1)
    numbers = torch.zeros(1 << lattice.level_bits * lattice.inputs, dtype=torch.int16)
    numbers[keys] = torch.arange(lattice.points, dtype=torch.int16)
    mask = (1 << lattice.level_bits) - 1
    own = torch.zeros((len(codes), codes.shape[1] // lattice.inputs), dtype=torch.int32)
    for i, shift in enumerate(shifts.tolist()):
        own |= (codes[:, i :: lattice.inputs] & mask).int() << shift
    return numbers[own.long()], codes[:, :: lattice.sign_inputs] >> lattice.level_bits


@cache
def kernel_table(lattice: Lattice, codebook: tuple[int, ...]) -> Tensor:
    """Bytes that the native kernels find points in; see `Lattice` in csrc/kernels.h."""
    tables = [*_planes(lattice)]
    if lattice.inputs == 4:
        numbers = torch.tensor(codebook)[levels(lattice).long()] + 128
        tables += [*numbers.to(torch.uint8).t()]
    return torch.cat(tables)


def _planes(lattice: Lattice) -> tuple[Tensor, ...]:
    return torch.frombuffer(bytearray(planes(lattice)), dtype=torch.uint8).chunk(2)


def pack_trits(codes: Tensor) -> Tensor:
    """Five codes below three in a byte: [rows, inputs / 5, rounded up] uint8."""
    filled = torch.nn.functional.pad(codes, (0, -codes.shape[1] % TRITS))
    total = torch.zeros((len(codes), filled.shape[1] // TRITS), dtype=torch.uint8)
    for i in range(TRITS):
        total = 3 * total + filled[:, i::TRITS]
    return total


def unpack_trits(packed: Tensor, inputs: int) -> Tensor:
    powers = [3**i for i in reversed(range(TRITS))]
    return torch.stack([packed // power % 3 for power in powers], dim=2).flatten(1)[:, :inputs]
