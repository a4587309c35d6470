# SPDX-License-Identifier: Apache-2.0
"""Writes the lattices of ggml's IQ types, from its package `gguf`, to pagoda/checkpoints/lattices.bin.

python -m tools.lattices
"""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt

from pagoda.checkpoints.lattices import FILE, IN_FILE, Lattice


def planes_of_package(lattice: Lattice) -> bytes:
    """The bytes that `pagoda.checkpoints.lattices.planes` gives, by the package."""
    kind = getattr(gguf.quants, lattice.name)
    kind.init_grid()
    values = kind.grid.reshape(lattice.points, lattice.inputs)
    levels = np.searchsorted(kind.grid_map, values).astype(np.uint8)
    if lattice.inputs == 8:
        halves = levels.reshape(-1, 2, 4)
        return _packed(halves[:, 0], 2) + _packed(halves[:, 1], 2)
    return _packed(levels & 3, 2) + _packed(levels >> 2, 1)


def _packed(numbers: npt.NDArray[np.uint8], bits: int) -> bytes:
    """A byte of each four numbers [n, 4] of so many bits, the first ones lowest."""
    packed: npt.NDArray[np.uint8] = np.bitwise_or.reduce(
        numbers << np.arange(0, 4 * bits, bits, dtype=np.uint8), axis=1
    )
    return packed.tobytes()


if __name__ == "__main__":
    FILE.write_bytes(b"".join(map(planes_of_package, IN_FILE)))
