"""Random quantized weights of every format."""

from __future__ import annotations

import torch
from cpu_cases import random_tensor
from torch import Tensor

from pagoda.backend.weights import GroupedWeight, Int8Weight, LinearWeight


def _integers(low: int, high: int, *shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator).to(dtype)


def _int8(outputs: int, inputs: int) -> Int8Weight:
    values = _integers(-127, 128, outputs, inputs, seed=1, dtype=torch.int8)
    return Int8Weight(values, random_tensor(outputs, seed=2).abs() / 100)


def _grouped(
    outputs: int, inputs: int, *, bits: int, group_size: int, offsets: bool, order: bool
) -> GroupedWeight:
    shape = (outputs, inputs // group_size)
    return GroupedWeight(
        codes=_integers(0, 2**bits, outputs, inputs, seed=1, dtype=torch.uint8),
        scales=random_tensor(*shape, seed=2).half() / 100,
        offsets=random_tensor(*shape, seed=3).half() / 10 if offsets else None,
        bits=bits,
        group_size=group_size,
        act_order=torch.randperm(inputs, generator=torch.Generator().manual_seed(4))
        if order
        else None,
    )


QUANTIZED: dict[str, LinearWeight] = {
    "int8": _int8(333, 96),
    "int8-long": _int8(33, 3000),
    "int4": _grouped(70, 96, bits=4, group_size=32, offsets=False, order=False),
    "int4-offsets": _grouped(70, 256, bits=4, group_size=128, offsets=True, order=False),
    "int4-order": _grouped(70, 192, bits=4, group_size=64, offsets=True, order=True),
    "int8-groups": _grouped(333, 256, bits=8, group_size=128, offsets=True, order=True),
}
