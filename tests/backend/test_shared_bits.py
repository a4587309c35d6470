# SPDX-License-Identifier: Apache-2.0
"""Weights whose codes share bits: points of lattices, and trits."""

from __future__ import annotations

import pytest
import torch
from block_weights import make_blocks
from cpu_cases import SETS, kernels, needs_kernels

from pagoda.backend.lattices import pack_trits, unpack_trits
from pagoda.backend.reference.quantized import PackedBlocks
from pagoda.checkpoints.gguf.config import BLOCKS
from pagoda.checkpoints.weight_formats import format_bytes

SHARED = [name for name, it in BLOCKS.items() if it.lattice is not None or it.trits]


@pytest.mark.parametrize("name", SHARED)
def test_the_reference_keeps_codes_in_their_bits(name: str) -> None:
    stored_format = BLOCKS[name]
    weight = make_blocks(stored_format, 12, 512, 5)
    packed = PackedBlocks.of(weight)
    for some in (slice(3, 9), torch.tensor([7, 7, 0])):
        assert torch.equal(packed.rows(some).codes, weight.codes[some])
    # Scales take whole bytes here.
    scales = sum(it.nbytes for it in (weight.scales, weight.block_scales) if it is not None)
    held = sum(plane.nbytes for plane in packed.planes) + scales
    assert held <= 1.2 * format_bytes(stored_format, 12, 512, 2)


@pytest.mark.parametrize("count", [1, 4, 5, 32, 256])
def test_trits(count: int) -> None:
    codes = torch.randint(0, 3, (7, count), dtype=torch.uint8)
    packed = pack_trits(codes)
    assert packed.shape == (7, -(-count // 5))
    assert torch.equal(unpack_trits(packed, count), codes)


@needs_kernels
def test_codes_that_are_no_points_are_refused() -> None:
    weight = make_blocks(BLOCKS["IQ2_XXS"], 40, 256, 1)
    weight.codes[33, 8:16] = torch.tensor([2, 0, 2, 1, 0, 2, 2, 2], dtype=torch.uint8)
    with pytest.raises(ValueError, match="codes are not those of the lattice's points"):
        kernels(SETS[-1]).prepare_linear([weight], None, torch.float32)
