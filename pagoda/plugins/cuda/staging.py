# SPDX-License-Identifier: Apache-2.0
"""Pinned host memory on its way to the device and back, used again once the device is done with it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from pagoda.backend.kv_store import DONE, DeviceEvent
from pagoda.plugins.cuda.runtime import Runtime

_ALIGNMENT = 16
"""Bytes at a multiple of which tensors of a parcel begin."""

Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape and number format of a tensor."""


class Pinned:
    """Memory out of a pool, which takes it back when nobody has this object any more."""

    def __init__(self, pool: PinnedPool, whole: Tensor, num_bytes: int, until: DeviceEvent) -> None:
        self._pool, self._whole, self._until = pool, whole, until
        self.memory = whole[:num_bytes]
        """[num_bytes] uint8."""

    def used_until(self, event: DeviceEvent) -> None:
        """Keeps the memory from others until the event, which comes behind those that were said before."""
        self._until = event

    def __del__(self) -> None:
        self._pool.give_back(self._whole, self._until)


class PinnedPool:
    """Pinned memory in sizes that are powers of two. Threads may share it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._free: list[tuple[Tensor, DeviceEvent]] = []
        self._lock = threading.RLock()  # garbage may be collected, and given back, while it is held

    def take(self, num_bytes: int) -> Pinned:
        """Unwritten memory of `num_bytes`."""
        with self._lock:
            for place, (whole, until) in enumerate(self._free):
                if num_bytes <= len(whole) <= 4 * max(num_bytes, 1024) and until.done:
                    del self._free[place]
                    return Pinned(self, whole, num_bytes, DONE)
        size = 1 << max(10, (num_bytes - 1).bit_length())
        # Steps are computed in torch's inference mode; what is made there cannot be written to elsewhere.
        with torch.inference_mode(mode=False):
            whole = self._runtime.pinned(size)
        return Pinned(self, whole, num_bytes, DONE)

    def give_back(self, whole: Tensor, until: DeviceEvent) -> None:
        with self._lock:
            self._free.append((whole, until))


class Parcel:
    """Places of tensors that lie one behind the other in one piece of memory, and so take one copy."""

    def __init__(self, specs: Sequence[Spec]) -> None:
        self._places: list[tuple[int, int, tuple[int, ...], torch.dtype]] = []
        end = 0
        for shape, dtype in specs:
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = begin + torch.Size(shape).numel() * dtype.itemsize
            self._places.append((begin, end, shape, dtype))
        self.num_bytes = end

    def views(self, memory: Tensor) -> list[Tensor]:
        """The tensors in memory [num_bytes] uint8 that begins at a multiple of 16."""
        return [
            memory[begin:end].view(dtype).view(shape) for begin, end, shape, dtype in self._places
        ]
