# SPDX-License-Identifier: Apache-2.0
"""Kernels of weights in blocks in Triton's interpreter: they have the bits of the reference, in every format."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagoda.backend.base import UnsupportedError
from pagoda.backend.block_rounding import quantize_blocks
from pagoda.backend.reference import linear as reference
from pagoda.backend.weights import BLOCK_INPUT_GROUP, BlockWeight
from pagoda.checkpoints.gguf.config import BLOCKS
from pagoda.checkpoints.weight_formats import BlockFormat
from pagoda.plugins.backend_check.products import block_weight
from pagoda.plugins.backend_check.subject import random_tensor
from pagoda.plugins.cuda.kernels import quantized
from pagoda.plugins.cuda.kernels.block_weights import Blocks, block_embedding, block_linear
from pagoda.plugins.cuda.weights import prepare

CPU = torch.device("cpu")
INPUTS = 256
ROWS = {
    f"rows of {bits} bits": BlockFormat(bits, size, INPUTS, True, True, whole_rows=True)
    for bits, size in ((4, 32), (5, 32), (8, 64))
}


def weight_of(name: str, outputs: int) -> BlockWeight:
    if name in BLOCKS:
        return block_weight(BLOCKS[name], outputs, INPUTS)
    return quantize_blocks(random_tensor(outputs, INPUTS) / 8, ROWS[name])


def prepared(weight: BlockWeight) -> Blocks:
    (held,) = prepare([weight], None, torch.float32, lambda values: values.contiguous()).segments
    assert isinstance(held, Blocks)
    return held


def product(x: Tensor, held: Blocks, bias: Tensor | None) -> Tensor:
    out = torch.full((len(x), held.outputs), torch.nan)
    if held.stored_format.whole_rows:
        rows = quantized.RoundedRows.new(*x.shape, CPU)
        quantized.round_rows(x, rows)
        block_linear(rows, held, out, bias=bias)
    else:
        groups = quantized.RoundedGroups.new(*x.shape, BLOCK_INPUT_GROUP, CPU)
        quantized.round_groups(x, groups)
        block_linear(groups, held, out, bias=bias)
    return out


THERE = [name for name, it in BLOCKS.items() if it.lattice is None and not it.trits]
SAME = [name for name in THERE if not BLOCKS[name].scales_are_floats]
"""Formats but NVFP4, whose scales are rounded to float16 (`test_blocks_of_other_files`)."""


@pytest.mark.parametrize("name", [*SAME, *ROWS])
def test_products_and_rows_have_the_bits_of_the_reference(name: str) -> None:
    weight, x, bias = weight_of(name, 19), random_tensor(5, INPUTS), random_tensor(19)
    x[1] *= 1e4
    x[2] = 0
    x[3, 5] *= 300
    x[4, 7] = torch.nan
    held, wanted = prepared(weight), reference.prepare_linear([weight], bias, torch.float32)
    out, expected = product(x, held, bias), reference.linear(x, wanted)
    assert torch.equal(out[:4], expected[:4])
    assert out[4].isnan().all()
    ids, looked_up = torch.tensor([23, 5, 4]), torch.full((3, INPUTS), torch.nan)
    block_embedding(ids, held, looked_up, first_id=5)
    assert torch.equal(looked_up, reference.embedding(ids, wanted, first_id=5, vocab_size=99))


@pytest.mark.parametrize("name", sorted({*BLOCKS} - {*THERE}))
def test_codes_that_do_not_lie_side_by_side_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match="no weights of IQ1, IQ2, IQ3 and TQ1_0"):
        prepared(weight_of(name, 19))


@pytest.mark.parametrize("name", ["Q4_K", "rows of 4 bits"])
def test_rows_have_the_same_bits_alone_as_among_others(name: str) -> None:
    weight, x = weight_of(name, 70), random_tensor(66, INPUTS)
    held = prepared(weight)
    out = product(x, held, None)
    assert torch.equal(
        out, reference.linear(x, reference.prepare_linear([weight], None, torch.float32))
    )
    assert torch.equal(product(x[65:].clone(), held, None)[0], out[65])
