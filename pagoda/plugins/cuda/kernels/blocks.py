# SPDX-License-Identifier: Apache-2.0
"""Blocks of the KV cache gathered into rows of bytes and scattered back, for copies between device and host."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagoda.plugins.cuda.kernels.numbers import blocks

_BLOCK = 4096


@triton.jit
def _copy_blocks(
    cache_ptr,
    ids_ptr,
    rows_ptr,
    words,
    cache_stride,
    row_stride,
    first,
    gathers: tl.constexpr,
    block: tl.constexpr,
):
    place, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    there = columns < words
    own = cache_ptr + tl.load(ids_ptr + place) * cache_stride + columns
    row = rows_ptr + place * row_stride + first + columns
    if gathers:
        tl.store(row, tl.load(own, there, 0), there)
    else:
        tl.store(own, tl.load(row, there, 0), there)


def gather_blocks(tensor: Tensor, block_ids: Tensor, out: Tensor, *, offset: int) -> None:
    """Copies blocks of a tensor [num_blocks, ...], by ids [m] int64, to rows [m, bytes] uint8 from `offset` on.

    The bytes of a block lie together; `offset` and the sizes of blocks and rows are multiples of 4 bytes, or all
    is copied byte by byte.
    """
    _launch(tensor, block_ids, out, offset, gathers=True)


def scatter_blocks(tensor: Tensor, block_ids: Tensor, source: Tensor, *, offset: int) -> None:
    """Copies rows [m, bytes] uint8, from `offset` on, to blocks of a tensor; each block is named once."""
    _launch(tensor, block_ids, source, offset, gathers=False)


def _launch(tensor: Tensor, block_ids: Tensor, rows: Tensor, offset: int, *, gathers: bool) -> None:
    if not len(block_ids):
        return
    block_bytes, stride = tensor[0].numel() * tensor.itemsize, tensor.stride(0) * tensor.itemsize
    sizes = (block_bytes, stride, rows.stride(0), offset, tensor.data_ptr(), rows.data_ptr())
    kind = torch.int32 if all(size % 4 == 0 for size in sizes) else torch.uint8
    item = kind.itemsize
    flat = torch.empty(0, dtype=kind, device=tensor.device).set_(
        tensor.untyped_storage(),
        tensor.storage_offset() * tensor.itemsize // item,
        (len(tensor), block_bytes // item),
        (stride // item, 1),
    )
    _copy_blocks[(len(block_ids), blocks(block_bytes // item, _BLOCK))](
        flat, block_ids, rows.view(kind) if item > 1 else rows, block_bytes // item, stride // item,
        rows.stride(0) // item, offset // item, gathers=gathers, block=_BLOCK,
    )  # fmt: skip
