# SPDX-License-Identifier: Apache-2.0
"""The seam between the backend and what computes: streams, events, pinned memory, capture and figures of memory.

`torch_runtime` is a GPU through torch; `emulation` is a device of CPU tensors that computes as late as it may, for
tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pagoda.backend.base import Memory
from pagoda.backend.kv_store import DeviceEvent
from pagoda.kv.memory import DirectMemory
from pagoda.parallel.collectives import Collectives, HostGroup

Work = Callable[[], None]
"""Launches of kernels and copies. It reads nothing back, and may run in another thread than that which gave it."""


class Stream(Protocol):
    """Work that is done one after the other, beside that of others. Methods may be called from any thread."""

    def run(self, work: Work) -> None:
        """Submits work, and does not wait for it."""

    def record(self) -> DeviceEvent:
        """The event of all that was submitted so far."""

    def wait(self, event: DeviceEvent) -> None:
        """Lets what is submitted from now on begin behind an event of another stream of the device."""


class Runtime(Protocol):
    """One device of one rank."""

    name: str
    """Name such as `NVIDIA H200`."""
    device: torch.device
    number_formats: tuple[str, ...]
    """Number formats that the device computes with."""

    @property
    def steps(self) -> Stream:
        """Stream of steps, on which what others do to results comes, too."""

    @property
    def reads(self) -> Stream:
        """Stream of copies of KV to host memory."""

    @property
    def writes(self) -> Stream:
        """Stream of copies of KV to the device."""

    @property
    def memory(self) -> Memory: ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Unwritten memory of the device, for work of the stream of steps."""

    def upload(self, values: Tensor) -> Tensor:
        """The values, contiguous in memory of the device; they are there when it returns."""

    def pinned(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 of host memory that the device copies from and to by itself."""

    def direct_memory(self, tensors: Sequence[Tensor]) -> DirectMemory:
        """Places of contiguous tensors of the device for networks, which reach them as long as the tensors live.

        Raises TransportError: networks cannot reach them, for the reason that it gives.
        """

    @property
    def is_hopper(self) -> bool:
        """True for NVIDIA's GPUs of compute capability 9.0, for which there are kernels of their own."""

    @property
    def has_library(self) -> bool:
        """True if there is `library_product`."""

    def library_product(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """Product of x [n, in] and a weight [out, in], both float32 or both bfloat16, by the vendor's library:
        out [n, out] float32, summed in float32. It is launched on the current stream. Bits may depend on n.
        """

    def capture(self, work: Work) -> Work:
        """Work that replays what `work` launches on the stream of steps, which is not computed now.

        It reads and writes the same memory each time, which `work` keeps. The driver has memory of its own for it,
        as long as it is there.
        """

    def captured_bytes(self, work: Work) -> int:
        """Bytes of the device's memory that the driver takes for `work` once it is captured.

        Work is done a few times to measure that, by all ranks at once where it has exchanges.
        """

    def timed(self, works: Sequence[Work]) -> list[int]:
        """Does work on the stream of steps, and returns how many nanoseconds each took on the device."""

    def is_lost(self) -> bool:
        """Waits for the device. Returns True if it has failed: whatever it is asked for fails from then on."""

    def shown(self, result: Tensor) -> Tensor:
        """A result of the stream of steps as others may use it, who have not waited for it."""

    def held(self, values: Tensor) -> Tensor | None:
        """The memory of a tensor that `shown` gave, or that lies on the device; None of one in host memory."""

    def open_group(self, group: HostGroup) -> Collectives:
        """Sums and gathers of the ranks' tensors on their devices, used in work; each rank calls it once."""
