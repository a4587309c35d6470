"""Memory of torch's allocator that networks may be given, which keep hold of where it lies physically."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pagoda.pd.transport.base import TransportError

_cuda: Any = torch.cuda
"""Type checkers know too little of it."""


def check_reachable(tensors: Sequence[Tensor]) -> None:
    """Raises TransportError: the allocator has mapped the tensors, which it does not of what `cudaMalloc` gives.

    What is mapped may lie in several pieces, and be mapped otherwise later: UCX takes it, and reads it slowly, or
    not at all.
    """
    allocator = _cuda.get_allocator_backend()
    if allocator != "native":
        raise TransportError(
            f"the KV cache lies in memory of the allocator {allocator}, which networks cannot reach: "
            "leave backend out of PYTORCH_CUDA_ALLOC_CONF"
        )
    expandable = [
        range(segment["address"], segment["address"] + segment["total_size"])
        for segment in _cuda.memory_snapshot()
        if segment["is_expandable"]
    ]
    if any(tensor.data_ptr() in segment for tensor in tensors for segment in expandable):
        raise TransportError(
            "the KV cache lies in expandable segments, which networks cannot reach: "
            "leave expandable_segments out of PYTORCH_CUDA_ALLOC_CONF"
        )
