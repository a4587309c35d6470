# SPDX-License-Identifier: Apache-2.0
"""A GPU through torch: CUDA on NVIDIA's, and HIP, under the same names, on AMD's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from pagoda.backend.kv_store import DeviceEvent
from pagoda.kv.memory import DirectMemory, Region
from pagoda.parallel.collectives import Collectives, HostGroup
from pagoda.plugins.cuda.collectives import open_device_group
from pagoda.plugins.cuda.networks import DeviceContext, check_reachable
from pagoda.plugins.cuda.runtime import Work

_cuda: Any = torch.cuda
"""Type checkers know too little of it."""
_MEASURED_GRAPHS = 4
"""Graphs whose memory is measured: the driver takes memory for several at once."""
_LEAST_GRAPH_BYTES = 1 << 20
"""Bytes that count for a graph which seems to take less, as it fits into what the driver has already."""


class TorchEvent:
    def __init__(self, event: Any) -> None:
        self.event = event

    @property
    def done(self) -> bool:
        finished: bool = self.event.query()
        return finished

    def wait(self) -> None:
        self.event.synchronize()


class TorchStream:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def run(self, work: Work) -> None:
        with _cuda.stream(self._stream):
            work()

    def record(self) -> DeviceEvent:
        return TorchEvent(self._stream.record_event())

    def wait(self, event: DeviceEvent) -> None:
        if isinstance(event, TorchEvent):
            self._stream.wait_event(event.event)
        else:
            event.wait()


class TorchMemory:
    """Memory of the device as torch's allocator has it."""

    on_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_bytes(self) -> int:
        """Bytes that the driver has, and those that the allocator keeps and does not use."""
        free, _ = _cuda.mem_get_info(self._device)
        kept = _cuda.memory_reserved(self._device) - _cuda.memory_allocated(self._device)
        return int(free + kept)

    def taken_bytes(self) -> int:
        return int(_cuda.memory_allocated(self._device))


class TorchRuntime:
    def __init__(self, number: int) -> None:
        self.device = torch.device("cuda", number)
        _cuda.set_device(self.device)
        # Not TF32, which NVIDIA's containers ask for by TORCH_ALLOW_TF32_CUBLAS_OVERRIDE.
        torch.set_float32_matmul_precision("highest")
        self.name = _cuda.get_device_name(self.device)
        self.number_formats: tuple[str, ...] = ("float32", "bfloat16", "float16")
        # What others do to results goes to torch's default stream; streams of copies do not wait for it.
        self.steps = TorchStream(_cuda.default_stream(self.device))
        self.reads, self.writes = (TorchStream(_cuda.Stream(self.device)) for _ in range(2))
        # Libraries keep memory for each stream that they were ever called on.
        self._captures = _cuda.Stream(self.device)
        self.memory = TorchMemory(self.device)
        self._context = DeviceContext(self.device)
        capability = _cuda.get_device_capability(self.device)
        self.is_hopper = torch.version.hip is None and capability == (9, 0)
        self.has_library = self._multiplies()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def upload(self, values: Tensor) -> Tensor:
        return values.to(self.device, copy=True, memory_format=torch.contiguous_format)

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def direct_memory(self, tensors: Sequence[Tensor]) -> DirectMemory:
        check_reachable(tensors)
        regions = tuple(Region(values.data_ptr(), values.nbytes) for values in tensors)
        return DirectMemory(regions, "VRAM", self.device.index, self._context.enter)

    def _multiplies(self) -> bool:
        """Returns True if torch sums products of bfloat16 to float32: from 2.8 on, for ROCm from later on."""
        ones = torch.ones(16, 16, dtype=torch.bfloat16, device=self.device)
        out = self.empty((16, 16), torch.float32)
        try:
            self.library_product(ones, ones, out)
        except (RuntimeError, TypeError):
            return False
        return True

    def library_product(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        if x.dtype == out.dtype:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.mm(x, weight.t(), out.dtype, out=out)

    def capture(self, work: Work) -> Work:
        graph, stream = _cuda.CUDAGraph(), self._captures
        stream.wait_stream(_cuda.current_stream(self.device))
        with _cuda.stream(stream):
            graph.capture_begin(
                capture_error_mode="thread_local"
            )  # other threads copy KV meanwhile
            try:
                work()
            finally:
                graph.capture_end()
        replay: Work = graph.replay
        return replay

    def captured_bytes(self, work: Work) -> int:
        self.steps.run(work)  # kernels are compiled and loaded, and libraries get their memory
        kept = [self._replayed(work)]  # with the first graph comes what all share
        before = self._driver_bytes()
        kept += [self._replayed(work) for _ in range(_MEASURED_GRAPHS)]
        taken = before - self._driver_bytes()
        return max(_LEAST_GRAPH_BYTES, -(-taken // len(kept[1:])))

    def _replayed(self, work: Work) -> Work:
        """Captured work that was done once: some memory is taken then only."""
        replay = self.capture(work)
        self.steps.run(replay)
        return replay

    def _driver_bytes(self) -> int:
        """Bytes that the driver has for whoever asks, once all work is done."""
        _cuda.synchronize(self.device)
        free, _ = _cuda.mem_get_info(self.device)
        return int(free)

    def timed(self, works: Sequence[Work]) -> list[int]:
        marks = [_cuda.Event(enable_timing=True) for _ in range(len(works) + 1)]
        with _cuda.stream(_cuda.default_stream(self.device)):
            marks[0].record()
            for work, mark in zip(works, marks[1:], strict=True):
                work()
                mark.record()
        marks[-1].synchronize()
        return [int(1e6 * one.elapsed_time(other)) for one, other in pairwise(marks)]

    def is_lost(self) -> bool:
        try:
            _cuda.synchronize(self.device)
        except RuntimeError:  # the driver gives a kernel's error again and again
            return True
        return False

    def shown(self, result: Tensor) -> Tensor:
        return result

    def held(self, values: Tensor) -> Tensor | None:
        return None if values.is_cpu else values

    def open_group(self, group: HostGroup) -> Collectives:
        return open_device_group(group)
