"""Memory for weights in large pages.

A step reads all weights from one end to the other; in pages of 4 KiB the processor spends much of that time on
finding where they lie. Large pages are whole and aligned, so weights that are smaller lie in one chunk together.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_LARGE_PAGE = 2**21
_CHUNK = 2**27
_ALIGNMENT = 64


class WeightMemory:
    """Gives out bytes that live as long as their tensors. What is never written takes no memory."""

    def __init__(self, advise_large_pages: Callable[[int, int], None]) -> None:
        self._advise = advise_large_pages
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, unwritten, at a cache line."""
        if num_bytes > len(self._free):
            self._free = self._chunk(max(num_bytes, _CHUNK))
        taken = self._free[:num_bytes]
        self._free = self._free[-(-num_bytes // _ALIGNMENT) * _ALIGNMENT :]
        return taken

    def _chunk(self, num_bytes: int) -> Tensor:
        size = -(-num_bytes // _LARGE_PAGE) * _LARGE_PAGE
        memory = torch.empty(size + _LARGE_PAGE, dtype=torch.uint8)
        start = -memory.data_ptr() % _LARGE_PAGE
        self._advise(memory.data_ptr() + start, size)
        return memory[start : start + size]
