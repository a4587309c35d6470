# SPDX-License-Identifier: Apache-2.0
"""Formats of linear layers in memory: types of numbers and the bytes that they take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from pagoda.checkpoints.lattices import Lattice
from pagoda.errors import ConfigError

if TYPE_CHECKING:
    from pagoda.checkpoints.linears import LinearSpec

GROUP_SIZES = (32, 64, 128)
"""Numbers of inputs that may share a scale in a grouped weight, in memory."""


@dataclass(frozen=True)
class DenseFormat:
    """A `DenseWeight`."""


@dataclass(frozen=True)
class Int8Format:
    """An `Int8Weight`."""

    zero_points: bool = False


@dataclass(frozen=True)
class GroupedFormat:
    """A `GroupedWeight`."""

    bits: int
    group_size: int
    offsets: bool
    act_order: bool
    can_regroup: bool = True
    """True if a part may hold a group as several groups of the same scale."""


@dataclass(frozen=True)
class BlockFormat:
    """A `BlockWeight`: numbers in the blocks of ggml."""

    bits: int
    """Bits of a code, 2 to 6 or 8."""
    group_size: int
    """Inputs that share a scale: 16 or 32, with trits a block's, of whole rows in 8 bits 64."""
    block_size: int
    """Inputs of a block; one group where scales are no integers."""
    integer_scales: bool
    """True if scales and minima have 8 bits, times a float16 for each block, instead of float16: integers, or of
    E2M1 floats (E4M3), 2^-8 of which count."""
    minima: bool
    """True if a number is added to the codes of each group; then no code means zero by itself."""
    codebook: tuple[int, ...] | None = None
    """Numbers that codes stand for, one of `CODEBOOKS`; None if they stand for themselves."""
    whole_rows: bool = False
    """True if a block is a row of inputs, and a row of activations has one scale."""
    lattice: Lattice | None = None
    """Points whose numbers are kept in place of codes; scales are odd, from 1 to 31, in its unit."""
    trits: bool = False
    """True if five codes, which are below 3, share a byte."""

    @property
    def zero(self) -> int:
        """The code that means zero."""
        return 0 if self.minima or self.codebook is not None else 1 << (self.bits - 1)

    @property
    def scales_are_floats(self) -> bool:
        """True if scales of 8 bits are floats (NVFP4)."""
        return self.integer_scales and self.codebook == E2M1_CODEBOOK


@dataclass(frozen=True)
class Fp8Format:
    """An `Fp8Weight`."""

    group_size: int | None
    """Inputs that share a scale of an output, a multiple of `FP8_INPUTS`; None: all of them."""


FP8_INPUTS = 32
"""Inputs of an `Fp8Weight` that kernels take at once, at the least."""

IQ4_CODEBOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The numbers that 4-bit codes of ggml's IQ4_NL and IQ4_XS stand for (`kvalues_iq4nl`)."""
E2M1_CODEBOOK = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the numbers of 4-bit floats E2M1 (OCP Microscaling Formats 1.0)."""
MXFP4 = BlockFormat(4, 32, 32, integer_scales=False, minima=False, codebook=E2M1_CODEBOOK)
"""Blocks of such floats with a power of two as their scale (OCP Microscaling Formats 1.0)."""
NVFP4 = BlockFormat(4, 16, 256, integer_scales=True, minima=False, codebook=E2M1_CODEBOOK)
"""Groups of such floats with an E4M3 float as their scale (NVIDIA, 2025)."""
NF4_CODEBOOK = (-123, -86, -65, -49, -35, -23, -11, 0, 10, 20, 30, 42, 54, 69, 89, 123)
"""`NF4_UNIT` times the quantiles of NF4 (Dettmers et al. 2023), rounded: none moves by more than 0.0029."""
NF4_UNIT = 123.256
"""The multiple that rounds the farthest number least, of those below 128."""
FP4_CODEBOOK = (0, 1, 80, 120, 40, 60, 20, 30, 0, -1, -80, -120, -40, -60, -20, -30)
"""`FP4_UNIT` times the 4-bit floats of bitsandbytes, exact but for the smallest, 1 / 192."""
FP4_UNIT = 120.0
NF4, FP4 = (
    BlockFormat(4, 32, 32, integer_scales=False, minima=False, codebook=codebook)
    for codebook in (NF4_CODEBOOK, FP4_CODEBOOK)
)
"""Blocks of bitsandbytes, in memory: the highest magnitude of a block is its scale."""
TERNARY_CODEBOOK = (-1, 0, 1, 2)
"""The numbers that codes of ggml's TQ1_0 and TQ2_0 stand for."""
TERNARY = BlockFormat(2, 256, 256, integer_scales=False, minima=False, codebook=TERNARY_CODEBOOK)
"""Blocks of ggml's TQ2_0, in which weights of BitNet are held."""
IQ1_CODEBOOK = (-7, 1, 9, 0, -9, -1, 7, 0)
"""Eight times the numbers of levels of IQ1_S and IQ1_M, without and with a sign."""
IQ2_CODEBOOK = (8, 25, 43, 0, -8, -25, -43, 0)
_IQ3_XXS, _IQ3_S = (4, 12, 20, 28, 36, 44, 52, 62), (1, 3, 5, 7, 9, 11, 13, 15)
IQ3_XXS_CODEBOOK = (*_IQ3_XXS, *(-number for number in _IQ3_XXS))
IQ3_S_CODEBOOK = (*_IQ3_S, *(-number for number in _IQ3_S))
CODEBOOKS = (
    *(None, IQ4_CODEBOOK, E2M1_CODEBOOK, NF4_CODEBOOK, FP4_CODEBOOK, TERNARY_CODEBOOK),
    *(IQ1_CODEBOOK, IQ2_CODEBOOK, IQ3_XXS_CODEBOOK, IQ3_S_CODEBOOK),
)
"""Codebooks that kernels know, in their order."""

TRITS_OF_BYTE = 5
BLOCK_SIZES = (256, 128, 64, 32)
"""Inputs that may share a float16 in a `BlockWeight`, in memory."""

WeightFormat = DenseFormat | Int8Format | Fp8Format | GroupedFormat | BlockFormat


class Quantization(Protocol):
    """Quantized linear layers of a model and their formats."""

    @property
    def summary(self) -> str:
        """Summary for the operator, such as `int4 weights (groups of 32)`."""

    def format_of(self, linear: LinearSpec) -> WeightFormat:
        """Format of a whole linear layer; for a rank's part of it see `part_format`.
        Raises ConfigError: a layer of so many inputs cannot be held so."""


def format_bytes(
    stored_format: WeightFormat, outputs: int, inputs: int, dense_itemsize: int
) -> int:
    """Bytes of a linear layer; `dense_itemsize` is that of the activations' dtype."""
    weights = outputs * inputs
    if isinstance(stored_format, DenseFormat):
        return weights * dense_itemsize
    if isinstance(stored_format, Int8Format):
        return weights + (8 if stored_format.zero_points else 4) * outputs
    if isinstance(stored_format, Fp8Format):
        return weights + 4 * outputs * -(-inputs // (stored_format.group_size or inputs))
    if isinstance(stored_format, BlockFormat):
        blocks = weights // stored_format.block_size
        return blocks * _code_bits(stored_format) // 8 + blocks * _block_scales(stored_format)
    per_group = 4 if stored_format.offsets else 2
    order = 8 * inputs if stored_format.act_order else 0
    return (
        weights * stored_format.bits // 8 + weights // stored_format.group_size * per_group + order
    )


def _code_bits(stored_format: BlockFormat) -> int:
    """Bits of the codes of a block."""
    size = stored_format.block_size
    if stored_format.trits:
        return 32 * -(-size // (4 * TRITS_OF_BYTE))
    if stored_format.lattice is not None:
        return size // 32 * stored_format.lattice.unit_bits
    return size * stored_format.bits


def _block_scales(stored_format: BlockFormat) -> int:
    """Bytes of a block's scales and minima: float16, and of each group a byte, or half of one (2 bits, points)."""
    kinds = 2 if stored_format.minima else 1
    if not stored_format.integer_scales:
        return 2 * kinds
    groups = stored_format.block_size // stored_format.group_size
    if stored_format.lattice is not None:
        return 2 + -(-groups // 2)
    return 2 * kinds + (groups if stored_format.bits == 2 else groups * kinds)


def part_format(stored_format: WeightFormat, num_inputs: int, part: range) -> WeightFormat | None:
    """Returns the format of the inputs `part` of a map of `num_inputs` in `stored_format`; None if there is none.

    Where groups are cut they become smaller ones of the same scale. Ordered groups, over which a rank's inputs lie
    scattered, become plain numbers, and so do 8-bit floats that are cut inside what kernels take at once.
    """
    if len(part) == num_inputs:
        return stored_format
    if isinstance(stored_format, Fp8Format):
        return _part_of_fp8(stored_format, num_inputs, part)
    if isinstance(stored_format, BlockFormat):
        return _part_of_blocks(stored_format, part)
    if not isinstance(stored_format, GroupedFormat):
        return stored_format
    if stored_format.act_order:
        return DenseFormat()
    sizes = (
        sorted(GROUP_SIZES, reverse=True)
        if stored_format.can_regroup
        else [stored_format.group_size]
    )
    for size in sizes:
        if size <= stored_format.group_size and part.start % size == part.stop % size == 0:
            return replace(stored_format, group_size=size)
    return None


def _part_of_fp8(stored_format: Fp8Format, num_inputs: int, part: range) -> WeightFormat:
    whole = stored_format.group_size
    if whole is None:
        return stored_format
    for size in (whole, *sorted(GROUP_SIZES, reverse=True)):
        ends = part.stop == num_inputs or part.stop % size == 0
        if whole % size == 0 and part.start % size == 0 and ends:
            return Fp8Format(size)
    return DenseFormat()


def _part_of_blocks(stored_format: BlockFormat, part: range) -> BlockFormat | None:
    if stored_format.whole_rows:
        size = stored_format.group_size
        fits = part.start % size == part.stop % size == 0
        return replace(stored_format, block_size=len(part)) if fits else None
    for size in BLOCK_SIZES:
        if size <= stored_format.block_size and part.start % size == part.stop % size == 0:
            group_size = stored_format.group_size if stored_format.integer_scales else size
            return replace(stored_format, block_size=size, group_size=group_size)
    return None


def held_block_format(stored: BlockFormat, inputs: int) -> BlockFormat | DenseFormat:
    """The format in memory of rows of so many inputs, in the largest blocks that divide them; plain numbers where
    none does."""
    sizes = BLOCK_SIZES if stored.integer_scales else (stored.block_size,)
    for size in sizes:
        if size <= stored.block_size and inputs % size == 0:
            return replace(stored, block_size=size)
    return DenseFormat()


def held_group_size(name: str, inputs: int, stored: int | None) -> int:
    """The size of groups in memory for weights stored in groups of `stored` inputs, None for one group.

    Larger groups are held as several of the same scale.
    Raises ConfigError: no size that Pagoda computes with divides the stored one, or that the inputs."""
    if stored is not None and inputs % stored:
        raise ConfigError(
            f"{name}.weight has {inputs} inputs, which groups of {stored} do not divide; "
            f"the number of inputs must be a multiple of the group size."
        )
    for size in sorted(GROUP_SIZES, reverse=True):
        if (stored or inputs) % size == 0:
            return size
    sizes = ", ".join(str(size) for size in GROUP_SIZES)
    what = f"{inputs} inputs in one group" if stored is None else f"groups of {stored} inputs"
    raise ConfigError(
        f"{name}.weight has {what}; Pagoda computes with groups of {sizes} or multiples of them."
    )
