# SPDX-License-Identifier: Apache-2.0
"""Needs of networks: memory of torch's that stays where it is, and threads that have the device's context."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pagoda.errors import TransportError

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


class DeviceContext:
    """The context of a device in the threads of this process, of which each has its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._entered = threading.local()

    def enter(self) -> None:
        """Makes the context that of the calling thread, which has none before it calls the runtime."""
        if not hasattr(self._entered, "by_call"):
            _cuda.set_device(self._device)  # which calls nothing where the device is the first
            self._entered.by_call = torch.zeros(1, device=self._device)
