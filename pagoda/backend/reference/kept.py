# SPDX-License-Identifier: Apache-2.0
"""Keys and values as a cache keeps them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pagoda.backend import fp8
from pagoda.backend.base import KVCache

if TYPE_CHECKING:
    from pagoda.backend.reference.attention import AttentionMetadata


def write_kv(cache: KVCache, keys: Tensor, values: Tensor, plan: AttentionMetadata) -> None:
    """Stores K and V [n, kv_heads, d] of the step's tokens in the blocks of their sequences."""
    place = (plan.block_ids, slice(None), plan.offsets)
    here = plan.block_ids >= 0
    if not here.all():  # others lie on other ranks
        place = (plan.block_ids[here], slice(None), plan.offsets[here])
        keys, values = keys[here], values[here]
    for stored, scales, new in (
        (cache.keys, cache.key_scales, keys),
        (cache.values, cache.value_scales, values),
    ):
        stored[place], own_scales = as_kept(new, stored.dtype)
        if scales is not None:
            scales[place] = own_scales


def as_kept(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Any]:
    """x [..., d] float32 as a cache of `dtype` keeps it, and the scales [...] float32 of formats with scales."""
    if dtype == torch.int8:
        return _quantize(x)
    return fp8.rounded(x, dtype) if dtype.itemsize == 1 else x.to(dtype), None


def _quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x as int8 and the scales that bring it back; the largest of d elements is 127."""
    scales = x.abs().amax(-1) / 127
    divisors = scales.masked_fill(scales == 0, 1)
    return (x / divisors[..., None]).round().to(torch.int8), scales
