# SPDX-License-Identifier: Apache-2.0
"""A device of CPU tensors, for tests: kernels run in Triton's interpreter, and all comes as late as it may.

Work is done when somebody waits for its event, or looks at a result, or when another rank's device waits for
what this one gives it, and only in the order of its stream and of the events that it waits for. Until then, and
for ever if it was not awaited, memory is full of bytes that are NaN. So a missing event, host memory that is
changed before it was copied, and memory that is used again too early give wrong numbers, every time.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.runtime.interpreter import (  # type: ignore[import-untyped]
    InterpreterBuilder,
    TensorHandle,
)

from pagoda.backend.kv_store import DeviceEvent
from pagoda.ipc.machine import available_memory_bytes
from pagoda.kv.memory import DirectMemory, Region
from pagoda.parallel.collectives import Collectives, HostGroup, sum_in_order
from pagoda.plugins.cuda.mesh import Mesh
from pagoda.plugins.cuda.runtime import Work

POISON = 0xFF
"""Byte of which NaN, and numbers below zero, consist."""
GRAPH_BYTES = 1 << 20
"""Bytes that the driver takes for a captured graph."""
_interpreter = threading.Lock()
"""Triton's interpreter runs one kernel of a process at a time."""


_create_dot: Any = InterpreterBuilder.create_dot


def sum_in_float64() -> None:
    """Lets the interpreter sum up products in float64, and round what a tile gives once.

    Numpy's library sums them up in float32, on some processors in another order at other places of a tile, so that
    bits of a row would depend on its neighbours.
    """
    InterpreterBuilder.create_dot = _dot


def _dot(builder: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
    if any(each.data.dtype.kind != "f" for each in (a, b, total)):
        return _create_dot(builder, a, b, total, *options)
    product = np.matmul(a.data, b.data, dtype=np.float64) + total.data
    return TensorHandle(product.astype(total.data.dtype), total.dtype.scalar)


def _in_mode(work: Work, inference: bool) -> None:
    """Does work as whoever gave it would have done it."""
    with torch.inference_mode(inference):
        work()


class EmulatedEvent:
    def __init__(self, stream: EmulatedStream, place: int) -> None:
        self._stream, self._place = stream, place

    @property
    def done(self) -> bool:
        return self._stream.num_done >= self._place

    def wait(self) -> None:
        self._stream.advance(self._place)


class EmulatedStream:
    """Work and events to wait for, in their order."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device
        self._left: deque[Work | DeviceEvent] = deque()
        self._num_submitted = 0
        self.num_done = 0

    def run(self, work: Work) -> None:
        self._submit(partial(_in_mode, work, torch.is_inference_mode_enabled()))

    def wait(self, event: DeviceEvent) -> None:
        self._submit(event)

    def _submit(self, entry: Work | DeviceEvent) -> None:
        with self._device.lock:
            self._left.append(entry)
            self._num_submitted += 1
            self._device.submitted.notify_all()

    def record(self) -> DeviceEvent:
        return EmulatedEvent(self, self._num_submitted)

    def advance(self, place: int) -> None:
        """Does all up to a place. Raises RuntimeError: some work has failed, and the device with it."""
        with self._device.lock:
            while self.num_done < place:
                self._device.check()
                entry = self._left.popleft()
                try:
                    if callable(entry):
                        with _interpreter:
                            entry()
                    else:
                        entry.wait()
                except Exception as error:
                    self._device.failed = error
                    self._device.submitted.notify_all()
                    raise
                self.num_done += 1

    def advance_until(self, reached: Callable[[], bool]) -> None:
        """Does work, also such as is submitted meanwhile, until something is true. Raises what `advance` does."""
        with self._device.lock:
            while not reached():
                self._device.submitted.wait_for(lambda: self._left or self._device.failed)
                self._device.check()
                self.advance(self.num_done + 1)

    def synchronize(self) -> None:
        self.advance(self._num_submitted)


class EmulatedDevice:
    """All that is said of one device."""

    on_host = False

    def __init__(self) -> None:
        sum_in_float64()
        self.lock = threading.RLock()
        self.submitted = threading.Condition(self.lock)
        self.failed: Exception | None = None
        """Error that broke the device, as an illegal access does."""
        self.name = "emulated in Triton's interpreter"
        self.device = torch.device("cpu")
        # The interpreter rounds to bfloat16 as GPUs do not.
        self.number_formats: tuple[str, ...] = ("float32", "float16")
        self.steps, self.reads, self.writes = (EmulatedStream(self) for _ in range(3))
        self.memory = self
        self._size = available_memory_bytes()
        self._taken = 0
        self._num_graphs = 0

    def check(self) -> None:
        if self.failed is not None:
            raise RuntimeError("the emulated device has failed before") from self.failed

    # ---- memory

    def free_bytes(self) -> int:
        return self._size - self._taken - self._num_graphs * GRAPH_BYTES

    def taken_bytes(self) -> int:
        return self._taken

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        values = torch.empty(shape, dtype=dtype)
        values.view(-1).view(torch.uint8).fill_(POISON)
        self._taken += values.nbytes
        weakref.finalize(values.untyped_storage(), self._give_back, values.nbytes)
        return values

    def _give_back(self, num_bytes: int) -> None:
        self._taken -= num_bytes

    def upload(self, values: Tensor) -> Tensor:
        return self.empty(tuple(values.shape), values.dtype).copy_(values)

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), POISON, dtype=torch.uint8)

    def direct_memory(self, tensors: Sequence[Tensor]) -> DirectMemory:
        """Host memory, which is what the tensors lie in."""
        regions = tuple(Region(values.data_ptr(), values.nbytes) for values in tensors)
        return DirectMemory(regions, "DRAM", 0, lambda: None)

    # ---- steps

    is_hopper = False
    has_library = True

    def library_product(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        torch.mm(x.float(), weight.float().t(), out=out)

    def capture(self, work: Work) -> Work:
        def replay() -> None:
            work()

        self._num_graphs += 1
        weakref.finalize(replay, self._drop_graph)
        return replay

    def _drop_graph(self) -> None:
        self._num_graphs -= 1

    def captured_bytes(self, work: Work) -> int:  # noqa: ARG002 - all graphs take as much
        return GRAPH_BYTES

    def timed(self, works: Sequence[Work]) -> list[int]:
        times = []
        for work in works:
            self.steps.synchronize()
            began = time.perf_counter_ns()
            self.steps.run(work)
            self.steps.synchronize()
            times.append(time.perf_counter_ns() - began)
        return times

    def is_lost(self) -> bool:
        with contextlib.suppress(Exception):
            self.steps.synchronize()
        return self.failed is not None

    def shown(self, result: Tensor) -> Tensor:
        shown = result.as_subclass(LateTensor)
        shown.source = self
        return shown

    def held(self, values: Tensor) -> Tensor | None:
        return values.as_subclass(Tensor) if isinstance(values, LateTensor) else None

    def open_group(self, group: HostGroup) -> Collectives:
        return EmulatedGroup(group, self.steps)


class LateTensor(Tensor):
    """A result of which only the shape is known: whoever computes with it waits for the stream of steps."""

    source: EmulatedDevice

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func == Tensor.is_cpu.__get__:  # type: ignore[attr-defined]
            return False
        if func == Tensor.__getitem__ and isinstance(args[1], slice):
            whole: LateTensor = args[0]
            return whole.source.shown(whole.as_subclass(Tensor)[args[1]])
        name = getattr(func, "__name__", "")
        if name not in _OF_SHAPE:
            for late in (each for each in args if isinstance(each, LateTensor)):
                late.source.steps.synchronize()
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        is_view = name == "__get__" and isinstance(found, Tensor)
        return args[0].source.shown(found) if is_view else found


_OF_SHAPE = frozenset(
    ("__get__", "__len__", "as_subclass", "dim", "size", "numel", "stride", "__hash__")
)
"""Functions that read no elements."""


class EmulatedGroup:
    """Ranks whose devices are emulated, and exchange what they have in work without their hosts."""

    def __init__(self, group: HostGroup, steps: EmulatedStream) -> None:
        self.rank, self.size = group.rank, group.size
        self._mesh = Mesh(group, steps.advance_until)

    def all_reduce(self, x: Tensor) -> Tensor:
        return sum_in_order(self.all_gather(x))

    def all_gather(self, x: Tensor) -> Tensor:
        """Exchanges tensors, while other ranks of this process may use the interpreter."""
        own = x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        _interpreter.release()
        try:
            parts = self._mesh.all_give(own)
        finally:
            _interpreter.acquire()
        whole = bytearray().join(parts)
        return torch.frombuffer(whole, dtype=x.dtype).view(self.size, *x.shape)

    def all_to_all(self, x: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        most = max(map(sum, counts))
        padded = x.new_zeros((most, *x.shape[1:]))
        padded[: len(x)] = x
        parts = zip(self.all_gather(padded), counts, strict=True)
        ends = [(part, sum(row[: self.rank]), row[self.rank]) for part, row in parts]
        return torch.cat([part[first : first + count] for part, first, count in ends])
