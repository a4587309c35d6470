# SPDX-License-Identifier: Apache-2.0
"""Quantized linear layers in plain PyTorch: the specification that other backends are tested against.

Inputs are rounded as `weights` says. Sums of products of integers are exact in any order, as every partial sum
fits into the mantissa; so only the few operations on scales decide the bits of a result, and they are the same for
every row whatever else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagoda.backend.lattices import pack_trits, parts_of_codes, point_codes, unpack_trits
from pagoda.backend.rounding import divisors, row_slices
from pagoda.backend.weights import (
    BLOCK_INPUT_GROUP,
    BlockWeight,
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    dequantize,
)

LANES = 32
TYPICAL_LANE, NARROW_SPAN = 4, 1.75
"""Rank of a lane, and the multiple of its highest magnitude that becomes 127; see `rounded_rows`."""
LARGEST_INTEGER = 127 * 128
LARGEST_SUM = 2**23
"""Magnitudes of a row's integers add up to less, so that products with weights' 255 fit into 32 bits."""
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


@dataclass(frozen=True)
class PackedBlocks:
    """A `BlockWeight` that takes about as little memory as is reckoned for it."""

    weight: BlockWeight
    """The weight, with the codes of `planes` left out."""
    planes: tuple[Tensor, ...]
    """Bits of the codes, the lowest first: 8, 4, 2 or 1 of each code, as many codes in a byte as fit.

    Of trits there are five in a byte; of points the low bytes of numbers, then higher bits, and signs.
    """

    @classmethod
    def of(cls, weight: BlockWeight) -> PackedBlocks:
        stored_format, planes, taken = weight.stored_format, list[Tensor](), 0
        if stored_format.trits:
            planes.append(pack_trits(weight.codes))
        elif stored_format.lattice is not None:
            numbers, signs = parts_of_codes(stored_format.lattice, weight.codes)
            high = [numbers >> 8 + bit & 1 for bit in range(stored_format.lattice.high_bits)]
            planes = [(numbers & 255).to(torch.uint8), *map(_packed_bits, (*high, signs))]
        if planes:
            return cls(replace(weight, codes=weight.codes[:, :0].clone()), tuple(planes))
        for width in plane_widths(weight.stored_format.bits):
            parts = (weight.codes >> taken & 2**width - 1).unflatten(1, (-1, 8 // width))
            shifts = torch.arange(0, 8, width, dtype=torch.uint8)
            planes.append((parts << shifts).sum(-1, dtype=torch.uint8))
            taken += width
        return cls(replace(weight, codes=weight.codes[:, :0].clone()), tuple(planes))

    def rows(self, chosen: slice | Tensor) -> BlockWeight:
        """Some outputs of it, unpacked."""
        weight, codes, taken = self.weight, torch.tensor(0, dtype=torch.uint8), 0
        stored_format, some = weight.stored_format, [plane[chosen] for plane in self.planes]
        if stored_format.trits:
            inputs = weight.scales.shape[1] * stored_format.group_size
            return replace(weight.rows(chosen), codes=unpack_trits(some[0], inputs))
        if stored_format.lattice is not None:
            numbers, count = some[0].to(torch.int16), some[0].shape[1]
            *high, signs = map(_unpacked_bits, some[1:])
            for bit, plane in enumerate(high):
                numbers |= plane[:, :count].to(torch.int16) << 8 + bit
            signs = signs[
                :, : count * stored_format.lattice.inputs // stored_format.lattice.sign_inputs
            ]
            codes = point_codes(stored_format.lattice, numbers, signs)
            return replace(weight.rows(chosen), codes=codes)
        for width, plane in zip(plane_widths(weight.stored_format.bits), self.planes, strict=True):
            shifts = torch.arange(0, 8, width, dtype=torch.uint8)
            parts = plane[chosen][..., None] >> shifts & 2**width - 1
            codes = codes | parts.flatten(1) << taken
            taken += width
        return replace(weight.rows(chosen), codes=codes)


def _packed_bits(bits: Tensor) -> Tensor:
    """Numbers 0 and 1 [rows, n], eight in a byte: [rows, n / 8, rounded up] uint8."""
    filled = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.shape[1] % 8))
    shifts = torch.arange(8, dtype=torch.uint8)
    return (filled.view(len(bits), -1, 8) << shifts).sum(-1, dtype=torch.uint8)


def _unpacked_bits(packed: Tensor) -> Tensor:
    bits: Tensor = packed[..., None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(1)


def plane_widths(bits: int) -> tuple[int, ...]:
    """Bits that each of `PackedBlocks.planes` has of a code of `bits`."""
    return tuple(width for width in (8, 4, 2, 1) if bits & width)


Quantized = Int8Weight | Fp8Weight | PackedGroups | PackedBlocks


def num_rows(weight: Tensor | Quantized) -> int:
    if isinstance(weight, PackedGroups):
        return len(weight.weight.codes)
    if isinstance(weight, PackedBlocks):
        return len(weight.weight.scales)
    return len(weight.values if isinstance(weight, Int8Weight | Fp8Weight) else weight)


def embedding_rows(ids: Tensor, weight: Quantized) -> Tensor:
    """Rows of the weight, one for each of `ids` [n]: [n, in] float32."""
    return dequantize(weight.rows(ids))


def quantized_product(x: Tensor, weight: Int8Weight | PackedGroups | PackedBlocks) -> Tensor:
    """x [n, in] times the weight: [n, out] float32."""
    pieces = _pieces(num_rows(weight))
    if isinstance(weight, Int8Weight):
        rounded, scales = rounded_rows(x)
        products = [_int8_product(rounded, scales, weight.rows(some)) for some in pieces]
    elif isinstance(weight, PackedBlocks) and weight.weight.stored_format.whole_rows:
        rounded, scales = rounded_rows(x)
        products = [_whole_product(rounded, scales, weight.rows(some)) for some in pieces]
    elif isinstance(weight, PackedBlocks):
        rounded, scales = _rounded(x.view(len(x), -1, BLOCK_INPUT_GROUP))
        products = [_block_product(rounded, scales, weight.rows(some)) for some in pieces]
    else:
        order, group_size = weight.weight.act_order, weight.weight.group_size
        wide = x if order is None else x[:, order]
        rounded, scales = _rounded(wide.view(len(x), -1, group_size))
        products = [_grouped_product(rounded, scales, weight.rows(some)) for some in pieces]
    return torch.cat(products, dim=1)


def _rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Integers from -127 to 127, in float32, and what each row of the last dimension is to be multiplied by."""
    scales = x.abs().amax(-1, keepdim=True) / 127
    # A row of zeros stays one; NaN stays NaN, so that a request whose numbers broke is seen to have broken.
    steps = x / divisors(scales)
    return steps.round_().clamp_(-127, 127), scales


def rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Integers of rows [n, in], in float32, and scales [n, 1] that they are to be multiplied by.

    In a transformer a few channels are many times larger than the others, and were they to decide the scale, the
    others would become small integers. So inputs are dealt out to `LANES` lanes, and the scale makes 127 of
    `NARROW_SPAN` times the highest magnitude of the lane of rank `TYPICAL_LANE`: what is higher becomes an
    integer of up to `LARGEST_INTEGER`. Of numbers from a normal distribution hardly any are.
    """
    dealt = torch.nn.functional.pad(x.abs(), (0, -x.shape[1] % LANES)).view(len(x), -1, LANES)
    highest = dealt.amax(1)
    folded = highest * (dealt.shape[1] / LARGEST_SUM)
    while folded.shape[1] > 1:
        half = folded.shape[1] // 2
        folded = folded[:, :half] + folded[:, half:]
    top = highest.amax(1, keepdim=True)
    span = NARROW_SPAN * highest.sort(1).values[:, TYPICAL_LANE, None]
    scales = torch.maximum(torch.minimum(span, top) / 127, top / LARGEST_INTEGER)
    scales = torch.maximum(scales, folded)
    # Rows of zeros, and of what is as good as that, stay zeros; NaN stays NaN.
    inverse = 1 / scales
    vanishes = inverse == torch.inf
    rounded = (x * inverse.masked_fill(vanishes, 0)).round_()
    return rounded, scales.masked_fill(vanishes, 0)


def _int8_product(rounded: Tensor, scales: Tensor, weight: Int8Weight) -> Tensor:
    """Product of integers [n, in] with scales [n, 1] and a weight."""
    total = rounded.double() @ weight.integers().double().t()
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


def _block_product(rounded: Tensor, scales: Tensor, weight: BlockWeight) -> Tensor:
    """Product of integers [n, groups of inputs, 16] with scales [n, groups of inputs, 1].

    The weight's groups are added up in order, in each the one or two groups of inputs.
    """
    numbers, minima = weight.numbers(), weight.group_minima()
    weight_scales = weight.group_scales()
    parts = weight.stored_format.group_size // BLOCK_INPUT_GROUP
    total = torch.zeros(len(rounded), len(numbers))
    for group in range(weight_scales.shape[1]):
        products, row_sums = torch.zeros_like(total), torch.zeros(len(rounded), 1)
        for part in range(group * parts, (group + 1) * parts):
            inputs = slice(part * BLOCK_INPUT_GROUP, (part + 1) * BLOCK_INPUT_GROUP)
            products += rounded[:, part] @ numbers[:, inputs].t() * scales[:, part]
            row_sums += rounded[:, part].sum(-1, keepdim=True) * scales[:, part]
        total += products * weight_scales[:, group]
        if minima is not None:
            total += row_sums * minima[:, group]
    return total


def _whole_product(rounded: Tensor, scales: Tensor, weight: BlockWeight) -> Tensor:
    """Product of integers [n, in] with scales [n, 1] and blocks of whole rows; groups are added up in order."""
    codes, minima = weight.codes.double(), weight.group_minima()
    weight_scales, size = weight.group_scales(), weight.stored_format.group_size
    total = torch.zeros(len(rounded), len(codes))
    for group in range(weight_scales.shape[1]):
        inputs = slice(group * size, (group + 1) * size)
        integers = rounded[:, inputs].double()
        total += (integers @ codes[:, inputs].t()).float() * weight_scales[:, group]
        if minima is not None:
            total += integers.sum(-1, keepdim=True).float() * minima[:, group]
    return total * scales


def _unpacked(codes: Tensor, bits: int) -> Tensor:
    return codes if bits == 8 else torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)


def _pieces(outputs: int) -> list[slice]:
    starts = range(0, outputs, _OUTPUTS_AT_ONCE)
    return [slice(start, start + _OUTPUTS_AT_ONCE) for start in starts]


# ---- dense weights to quantized ones: the specification of every backend's `quantize_...`


def quantize_int8(values: Tensor, *, symmetric: bool) -> Int8Weight:
    """Int8 codes of a weight [out, in]: each output's highest magnitude becomes 127 or -127, ties go to even.

    With zero points, where the weight need not be symmetric, the lowest and the highest become -128 and 127.
    """
    codes = torch.empty(values.shape, dtype=torch.int8)
    scales = torch.empty(len(values))
    if not symmetric:
        zero_points = torch.empty(len(values), dtype=torch.int32)
        for rows in row_slices(values):
            block = values[rows].float()
            low, high = block.amin(dim=1).clamp(max=0), block.amax(dim=1).clamp(min=0)
            scales[rows] = (high - low) / 255
            steps = divisors(scales[rows])
            zero_points[rows] = (-128 - (low / steps).round_()).nan_to_num(0).int()
            zero_points[rows] *= steps.isfinite()
            integers = (block / steps[:, None]).round_() + zero_points[rows, None]
            codes[rows] = integers.clamp_(-128, 127)
        return Int8Weight(codes, scales, zero_points)
    for rows in row_slices(values):
        block = values[rows].float()
        scales[rows] = block.abs().amax(dim=1) / 127
        codes[rows] = (block / divisors(scales[rows])[:, None]).round_().clamp_(-127, 127)
    return Int8Weight(codes, scales)


def quantize_int4(values: Tensor, group_size: int) -> GroupedWeight:
    """Int4 codes of a weight [out, in], as llama.cpp's Q4_0: each group's highest magnitude becomes code 0.

    The scale is that weight over -8, rounded to float16; the codes are those of the rounded scale.
    """
    outputs, inputs = values.shape
    # From floats to signed bytes is the quicker conversion, and codes are the same in both.
    codes = torch.empty((outputs, inputs), dtype=torch.int8)
    scales = torch.empty((outputs, inputs // group_size), dtype=torch.float16)
    for rows in row_slices(values):
        groups = values[rows].float().view(-1, inputs // group_size, group_size)
        scales[rows] = _signed_peaks(groups) / -8
        steps = groups / divisors(scales[rows].float())[..., None]
        codes[rows] = steps.round_().add_(8).clamp_(0, 15).flatten(1)
    return GroupedWeight(codes.view(torch.uint8), scales, None, bits=4, group_size=group_size)


def _signed_peaks(groups: Tensor) -> Tensor:
    """The first of the values of highest magnitude along the last dimension."""
    low, high = groups.amin(-1), groups.amax(-1)  # aminmax takes twice the time of both
    peaks = torch.where(high > -low, high, low)
    tied = (high == -low).nonzero(as_tuple=True)
    first = groups[tied].abs().argmax(dim=-1, keepdim=True)
    peaks[tied] = groups[tied].gather(-1, first).squeeze(-1)
    return peaks
