# SPDX-License-Identifier: Apache-2.0
"""The chips of a rank: the worker that drives them, memory there, and memory of the host that it sees."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from pagoda.backend.base import DeviceLostError
from pagoda.plugins.pypto.library import DeviceTensor, DistributedWorker, KernelLibrary, RunHandle

T = TypeVar("T")


def shared_tensor(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Unwritten memory of the host that workers see which are opened later."""
    num_bytes = math.prod(shape) * dtype.itemsize
    # `share_memory_` would take memory twice, and write all of it.
    storage = torch.UntypedStorage._new_shared(num_bytes, device="cpu")  # type: ignore[no-untyped-call]
    shared: Tensor = torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape))  # type: ignore[call-overload]
    return shared


class Submitted:
    """A program that was submitted; what goes wrong with it is an error of the device."""

    def __init__(self, handle: RunHandle) -> None:
        self._handle: RunHandle | None = handle
        self.device_ns = 0

    def wait(self) -> None:
        """Returns when the program has ended. Raises DeviceLostError: it failed, or took too long."""
        handle, self._handle = self._handle, None
        if handle is not None:
            _guarded(handle.result)
            self.device_ns = handle.device_ns


class Device:
    """An open worker. Its methods may be called by several threads, and take place in their order."""

    def __init__(
        self, library: KernelLibrary, programs: Sequence[object], chips: Sequence[int]
    ) -> None:
        """Forks the worker: memory of the host that is passed to it must have been shared by now.

        Raises DeviceLostError: it does not start.
        """
        self.chips = len(chips)
        self._library = library
        self._lock = threading.Lock()
        self._worker: DistributedWorker = _guarded(library.open_worker, programs, chips)

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, chip: int = 0, init: Tensor | None = None
    ) -> DeviceTensor:
        """Memory of a chip, which holds `init`, or anything. Raises DeviceLostError: there is too little."""
        with self._lock:
            return _guarded(
                lambda: self._worker.alloc_tensor(shape, dtype, init=init, worker_id=chip)
            )

    def free(self, tensor: DeviceTensor, chip: int = 0) -> None:
        with self._lock:
            _guarded(lambda: self._worker.free_tensor(tensor, worker_id=chip))

    def stacked(self, shards: Sequence[DeviceTensor]) -> object:
        """The argument of a program that lies on all chips."""
        return shards[0] if len(shards) == 1 else self._library.stack(shards)

    def upload(self, address: int, source: Tensor, chip: int = 0) -> None:
        """Copies shared memory of the host to an address of a chip, behind all that was submitted."""
        with self._lock:
            _guarded(
                lambda: self._worker.copy_to(
                    address, source.data_ptr(), source.nbytes, worker_id=chip
                )
            )

    def download(self, target: Tensor, address: int, chip: int = 0) -> None:
        """Copies from an address of a chip to shared memory of the host, behind all that was submitted."""
        with self._lock:
            _guarded(
                lambda: self._worker.copy_from(
                    target.data_ptr(), address, target.nbytes, worker_id=chip
                )
            )

    def submit(self, program: object, args: Sequence[object]) -> Submitted:
        """Begins a program behind all that was submitted before it."""
        with self._lock:
            return Submitted(_guarded(self._worker.submit, program, *args))

    def memory(self) -> list[tuple[int, int, int]]:
        """Free bytes, all bytes, and bytes that this worker holds, of each chip."""
        with self._lock:
            return _guarded(
                lambda: [
                    (
                        *self._worker.device_memory_info(chip),
                        self._worker.committed_device_memory(chip),
                    )
                    for chip in range(self.chips)
                ]
            )

    def close(self) -> None:
        with self._lock:
            _guarded(self._worker.close)


def _guarded(call: Callable[..., T], *args: object) -> T:
    """The result of a call of the runtime. Raises DeviceLostError: it failed, and so will all that follow."""
    try:
        return call(*args)
    except (RuntimeError, OSError, MemoryError) as error:  # TimeoutError is an OSError
        raise DeviceLostError(f"the chips fail: {error}") from error


def view_of(tensor: DeviceTensor, first_row: int, rows: int) -> DeviceTensor:
    """Some rows of memory of a chip."""
    _, *rest = tensor.shape
    offset = first_row * math.prod(rest) * tensor.dtype.itemsize
    made: DeviceTensor = type(tensor)(tensor.data_ptr + offset, (rows, *rest), tensor.dtype)  # type: ignore[call-arg]
    return made


class ChipMemory:
    """Memory of all chips of a rank; of equal parts, the smallest counts for each."""

    on_host = False

    def __init__(self, library: KernelLibrary, chips: Sequence[int]) -> None:
        self._library, self._chips = library, chips
        self.device: Device | None = None
        """The open worker."""

    def free_bytes(self) -> int:
        """Bytes that are left: a driver may not see what a worker has taken of its own pool."""
        if self.device is None:
            return len(self._chips) * min(self._library.memory_info(it)[0] for it in self._chips)
        left = [total - max(total - free, held) for free, total, held in self.device.memory()]
        return len(left) * min(left)

    def taken_bytes(self) -> int:
        """Bytes that the worker holds: weights, caches, rings and what programs work in."""
        return 0 if self.device is None else sum(held for _, _, held in self.device.memory())
