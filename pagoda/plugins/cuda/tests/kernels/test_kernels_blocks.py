# SPDX-License-Identifier: Apache-2.0
"""Kernels that gather and scatter blocks of the KV cache, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from pagoda.plugins.backend_check.subject import random_tensor
from pagoda.plugins.cuda.kernels.blocks import gather_blocks, scatter_blocks


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(torch.float32, (6, 2, 4, 8)), (torch.int8, (6, 1, 3, 5)), (torch.float16, (6, 2, 3, 1))],
)
def test_blocks_as_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    cache, chosen = (9 * random_tensor(*shape)).to(dtype), torch.tensor([5, 0, 2])
    size = cache[0].numel() * cache.itemsize
    rows = torch.zeros((3, size + 8), dtype=torch.uint8)
    gather_blocks(cache, chosen, rows, offset=4)
    assert torch.equal(rows[:, 4 : 4 + size], cache[chosen].flatten(1).view(torch.uint8))
    assert not rows[:, :4].any()
    assert not rows[:, 4 + size :].any()
    target = torch.zeros_like(cache)
    scatter_blocks(target, chosen, rows, offset=4)
    assert torch.equal(target[chosen], cache[chosen])
    assert not target[[1, 3, 4]].any()


def test_no_blocks() -> None:
    cache, none = torch.zeros(2, 1, 4, 4), torch.empty(0, dtype=torch.int64)
    gather_blocks(cache, none, torch.empty((0, 64), dtype=torch.uint8), offset=0)
