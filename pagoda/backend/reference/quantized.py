"""Quantized linear layers in plain PyTorch: the specification that other backends are tested against.

Inputs are rounded as `weights` says. Sums of products of integers are exact in any order, as every partial sum
fits into the 24 bits of a float32; so only the few operations on scales decide the bits of a result, and they are
the same for every row whatever else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagoda.backend.weights import GroupedWeight, Int8Weight, dequantize

_EXACT_INPUTS = 1024
"""Inputs whose products of 127 by 127 add up to less than 2 ** 24."""
_OUTPUTS_AT_ONCE = 16384
"""Outputs whose weights are widened at once; the head of a large vocabulary has ten times as many."""


@dataclass(frozen=True)
class PackedGroups:
    """A `GroupedWeight` that takes as little memory as is reckoned for it."""

    weight: GroupedWeight
    """The weight; 4-bit codes are [out, in / 2], the code of an odd input in the high half of a byte."""

    @classmethod
    def of(cls, weight: GroupedWeight) -> PackedGroups:
        codes = weight.codes
        if weight.bits == 4:
            codes = codes[:, 0::2] | codes[:, 1::2] << 4
        return cls(replace(weight, codes=codes))

    def rows(self, chosen: slice | Tensor) -> GroupedWeight:
        """Some outputs of it, unpacked."""
        weight = self.weight
        return replace(
            weight,
            codes=_unpacked(weight.codes[chosen], weight.bits),
            scales=weight.scales[chosen],
            offsets=None if weight.offsets is None else weight.offsets[chosen],
        )


def num_rows(weight: Tensor | Int8Weight | PackedGroups) -> int:
    if isinstance(weight, PackedGroups):
        return len(weight.weight.codes)
    return len(weight.values if isinstance(weight, Int8Weight) else weight)


def embedding_rows(ids: Tensor, weight: Int8Weight | PackedGroups) -> Tensor:
    """Rows of the weight, one for each of `ids` [n]: [n, in] float32."""
    if isinstance(weight, PackedGroups):
        return dequantize(weight.rows(ids))
    return dequantize(Int8Weight(weight.values[ids], weight.scales[ids]))


def quantized_product(x: Tensor, weight: Int8Weight | PackedGroups) -> Tensor:
    """x [n, in] times the weight: [n, out] float32."""
    if isinstance(weight, Int8Weight):
        rounded, scales = _rounded(x.float())
        pieces = [
            _int8_product(rounded, scales, Int8Weight(weight.values[some], weight.scales[some]))
            for some in _pieces(len(weight.values))
        ]
    else:
        order, group_size = weight.weight.act_order, weight.weight.group_size
        wide = x.float() if order is None else x[:, order].float()
        rounded, scales = _rounded(wide.view(len(x), -1, group_size))
        pieces = [
            _grouped_product(rounded, scales, weight.rows(some))
            for some in _pieces(len(weight.weight.codes))
        ]
    return torch.cat(pieces, dim=1)


def _rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Integers from -127 to 127, in float32, and what each row of the last dimension is to be multiplied by."""
    scales = x.abs().amax(-1, keepdim=True) / 127
    # A row of zeros stays one; NaN stays NaN, so that a request whose numbers broke is seen to have broken.
    steps = x / scales.masked_fill(scales == 0, torch.inf)
    return steps.round_().clamp_(-127, 127), scales


def _int8_product(rounded: Tensor, scales: Tensor, weight: Int8Weight) -> Tensor:
    """Product of integers [n, in] with scales [n, 1] and a weight."""
    total = torch.zeros(len(rounded), len(weight.values), dtype=torch.float64)
    for start in range(0, rounded.shape[1], _EXACT_INPUTS):
        inputs = slice(start, start + _EXACT_INPUTS)
        total += rounded[:, inputs] @ weight.values[:, inputs].float().t()
    return total.float() * (scales * weight.scales)


def _grouped_product(rounded: Tensor, scales: Tensor, weight: GroupedWeight) -> Tensor:
    """Product of integers [n, groups, group_size] with scales [n, groups, 1]; groups are added up in order."""
    total = torch.zeros(len(rounded), len(weight.codes))
    for group in range(rounded.shape[1]):
        inputs = slice(group * weight.group_size, (group + 1) * weight.group_size)
        integers = weight.codes[:, inputs].float() - 2 ** (weight.bits - 1)
        products = rounded[:, group] @ integers.t()
        total += products * (scales[:, group] * weight.scales[:, group].float())
        if weight.offsets is not None:
            row_sums = rounded[:, group].sum(-1, keepdim=True) * scales[:, group]
            total += row_sums * weight.offsets[:, group].float()
    return total


def _unpacked(codes: Tensor, bits: int) -> Tensor:
    return codes if bits == 8 else torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)


def _pieces(outputs: int) -> list[slice]:
    starts = range(0, outputs, _OUTPUTS_AT_ONCE)
    return [slice(start, start + _OUTPUTS_AT_ONCE) for start in starts]
