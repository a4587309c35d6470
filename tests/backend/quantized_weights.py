"""Random weights of every format."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from pagoda.backend.weights import DenseWeight, GroupedWeight, Int8Weight, LinearWeight
from pagoda.checkpoints.weight_formats import GROUP_SIZES


@dataclass(frozen=True)
class Format:
    """Format of a weight; see `GroupedWeight`. No bits: dense, no group size: `Int8Weight`."""

    bits: int | None = None
    group_size: int | None = None
    offsets: bool = False
    ordered: bool = False


DENSE, INT8 = Format(), Format(8)
grouped = st.builds(
    Format, st.sampled_from([4, 8]), st.sampled_from(GROUP_SIZES), st.booleans(), st.booleans()
)


def make_weight(held_as: Format, outputs: int, inputs: int, seed: int) -> LinearWeight:
    generator = torch.Generator().manual_seed(seed)
    if held_as.bits is None:
        return DenseWeight(torch.randn(outputs, inputs, generator=generator))
    if held_as.group_size is None:
        codes = torch.randint(-127, 128, (outputs, inputs), generator=generator)
        return Int8Weight(codes.to(torch.int8), torch.randn(outputs, generator=generator))
    codes = torch.randint(0, 2**held_as.bits, (outputs, inputs), generator=generator)
    shape = (outputs, inputs // held_as.group_size)
    scales, offsets = (torch.randn(shape, generator=generator).half() for _ in range(2))
    return GroupedWeight(
        codes.to(torch.uint8),
        scales,
        4 * offsets if held_as.offsets else None,
        held_as.bits,
        held_as.group_size,
        torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))
        if held_as.ordered
        else None,
    )


QUANTIZED: dict[str, LinearWeight] = {
    "int8": make_weight(INT8, 333, 96, 1),
    "int8-long": make_weight(INT8, 33, 3000, 1),
    "int4": make_weight(Format(4, 32), 70, 96, 1),
    "int4-offsets": make_weight(Format(4, 128, offsets=True), 70, 256, 1),
    "int4-order": make_weight(Format(4, 64, offsets=True, ordered=True), 70, 192, 1),
    "int8-groups": make_weight(Format(8, 128, offsets=True, ordered=True), 333, 256, 1),
}
