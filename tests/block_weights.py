# SPDX-License-Identifier: Apache-2.0
"""Weights in blocks, of GGUF files and others."""

from __future__ import annotations

import torch
from torch import Tensor

from pagoda.backend.weights import BlockWeight
from pagoda.checkpoints.weight_formats import FP4, NF4, NVFP4, BlockFormat
from pagoda.plugins.backend_check.products import random_codes, scale_limits

OTHER_BLOCKS = {"NF4": NF4, "FP4": FP4, "NVFP4": NVFP4}
"""Formats of checkpoints in safetensors files."""


def whole_rows(bits: int, inputs: int) -> BlockFormat:
    """The format of weights that are quantized when they are loaded."""
    size = 64 if bits == 8 else 32
    return BlockFormat(bits, size, inputs, integer_scales=True, minima=True, whole_rows=True)


def make_blocks(stored_format: BlockFormat, outputs: int, inputs: int, seed: int) -> BlockWeight:
    """A weight of random codes, scales and minima."""
    generator = torch.Generator().manual_seed(seed)

    def halves(size: int) -> Tensor:
        return torch.randn((outputs, inputs // size), generator=generator).half()

    def integers(lowest: int, highest: int) -> Tensor:
        shape = (outputs, inputs // stored_format.group_size)
        drawn = torch.randint(lowest, highest + 1, shape, generator=generator)
        return (drawn if stored_format.lattice is None else drawn | 1).to(torch.int8)

    def floats() -> Tensor:
        shape = (outputs, inputs // stored_format.group_size)
        drawn = torch.randint(0, 127, shape, generator=generator).to(torch.uint8)
        return drawn.view(torch.float8_e4m3fn)

    codes = random_codes(stored_format, outputs, inputs, generator)
    if not stored_format.integer_scales:
        minima = 4 * halves(stored_format.group_size) if stored_format.minima else None
        return BlockWeight(
            stored_format,
            codes,
            halves(stored_format.group_size),
            minima,
            None,
            None,
        )
    limits = scale_limits(stored_format)
    return BlockWeight(
        stored_format,
        codes,
        floats() if stored_format.scales_are_floats else integers(*limits),
        integers(*limits) if stored_format.minima else None,
        halves(stored_format.block_size) / limits[1],
        halves(stored_format.block_size) / limits[1] if stored_format.minima else None,
    )
