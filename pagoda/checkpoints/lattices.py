# SPDX-License-Identifier: Apache-2.0
"""Lattices of ggml's IQ types: the combinations of levels that neighbouring weights may have.

A weight in them keeps the numbers of points, and signs, instead of codes. The points are those of ggml (MIT
licence); `python -m tools.lattices` takes them from its package `gguf` and writes them to `lattices.bin`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("lattices.bin")


@dataclass(frozen=True)
class Lattice:
    """Storage of codes by the numbers of points."""

    name: str
    inputs: int
    """Inputs of a point: 8, whose levels have two bits, or 4, whose levels have three."""
    high_bits: int
    """Bits of a point's number beyond eight."""
    sign_inputs: int
    """Inputs that share a sign, the highest bit of their codes: 1, 8 or 32."""
    unit: float
    """The power of two that scales are counted in, times their block's."""

    @property
    def points(self) -> int:
        return 256 << self.high_bits

    @property
    def level_bits(self) -> int:
        return 2 if self.inputs == 8 else 3

    @property
    def unit_bits(self) -> int:
        """Bits of 32 inputs."""
        signs = {1: 32, 8: 4, 32: 0}[self.sign_inputs]  # one for all is beside the scale
        return 32 // self.inputs * (8 + self.high_bits) + signs


IQ1_S = Lattice("IQ1_S", 8, 3, 32, 1 / 8)
IQ1_M = Lattice("IQ1_S", 8, 3, 8, 1 / 8)
IQ2_XXS = Lattice("IQ2_XXS", 8, 0, 1, 1 / 8)
IQ2_XS = Lattice("IQ2_XS", 8, 1, 1, 1 / 8)
IQ2_S = Lattice("IQ2_S", 8, 2, 1, 1 / 8)
IQ3_XXS = Lattice("IQ3_XXS", 4, 0, 1, 1 / 4)
IQ3_S = Lattice("IQ3_S", 4, 1, 1, 1.0)

IN_FILE = (IQ1_S, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S)
"""Lattices in the order of the file, two bytes of each point."""


def planes(lattice: Lattice) -> bytes:
    """Levels of all points: the first of two bytes of each, then the second.

    Of eight inputs they have two bits of each of the first four, and of the others; of four inputs the low two
    bits of each, and the third ones.
    """
    names = [it.name for it in IN_FILE]
    place = names.index(lattice.name)
    start = sum(2 * it.points for it in IN_FILE[:place])
    return FILE.read_bytes()[start : start + 2 * lattice.points]
