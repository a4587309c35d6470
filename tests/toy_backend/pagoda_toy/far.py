# SPDX-License-Identifier: Apache-2.0
"""The toy with KV in memory of its own, which only copies reach, and each copy comes as late as it may.

A copy is done when somebody waits for it (or a test runs it), behind the one that it was told to come after. Until
then, and for ever if it was not ordered behind the step that wrote or used its blocks, there is NaN in its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from pagoda.backend.base import (
    UNNAMED,
    Compiled,
    KVCache,
    LatentCache,
    NewTensor,
    new_tensor,
)
from pagoda.backend.graph import Graph, Node
from pagoda.backend.interpreter import InterpretedGraph
from pagoda.backend.kv_store import (
    DONE,
    DeviceEvent,
    block_extents,
    check_blocks,
    check_extents,
    describe_tensors,
)
from pagoda.backend.operation import WeightNames
from pagoda.devices import DeviceSet
from pagoda.kv.memory import Extent
from pagoda_toy.backend import Metadata, ToyBackend, compute_node

Array = np.ndarray[Any, Any]
POISON = b"\xff"
"""Bytes of a NaN."""


def open_backend(devices: DeviceSet) -> FarBackend:  # noqa: ARG001
    return FarBackend()


class _Memory:
    """One tensor on the device."""

    def __init__(self, stand_in: torch.Tensor) -> None:
        self.stand_in = stand_in
        self.values: Array = np.full(tuple(stand_in.shape), np.nan, dtype=np.float32)
        self.bytes = self.values.reshape(-1).view(np.uint8)
        self.written = np.zeros(len(stand_in), dtype=np.int64)
        """Number of the operation that wrote to each block last."""
        self.used = np.zeros(len(stand_in), dtype=np.int64)


class FarDevice:
    def __init__(self) -> None:
        self.now = 0
        """Operations on KV that were computed."""
        self.copies: list[FarCopy] = []
        """Copies that are not done, the oldest first."""
        self.is_held = False
        """Copies are not done for being awaited: a test runs them."""
        self.submitted = threading.Semaphore(0)
        """Released for each copy."""
        self._memory: dict[int, _Memory] = {}
        self.lock = threading.RLock()

    def new(self, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor without memory of the host's."""
        stand_in = torch.empty(shape, dtype=torch.float32, device="meta")
        self._memory[id(stand_in)] = _Memory(stand_in)
        return stand_in

    def memory(self, stand_in: torch.Tensor) -> _Memory:
        return self._memory[id(stand_in)]

    def reach(self, op: str, cache: KVCache, metadata: Metadata) -> KVCache:
        """The cache as an operation on the device finds it."""
        with self.lock:
            self.now += 1
            parts = [self.memory(tensor) for tensor in (cache.keys, cache.values)]
            for part in parts:
                size = part.values.shape[2]
                rows = np.arange(len(metadata.positions))
                if op == "rotate_and_cache":
                    part.written[metadata.tables[rows, metadata.positions // size]] = self.now
                for table, position in zip(metadata.tables, metadata.positions, strict=True):
                    part.used[table[: position // size + 1]] = self.now
            return KVCache(*(torch.from_numpy(part.values) for part in parts))


class _Computed:
    """Behind the operations so far."""

    done = True

    def __init__(self, now: int) -> None:
        self.now = now

    def wait(self) -> None:
        """Operations are computed when they are called."""


class FarCopy:
    """A copy, which is its own event."""

    def __init__(self, device: FarDevice, work: Callable[[int], None], after: DeviceEvent) -> None:
        self._device, self._work, self._after = device, work, after
        self._ended = threading.Event()
        device.copies.append(self)
        device.submitted.release()

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    @property
    def now(self) -> int:
        """The last operation that it comes behind."""
        return getattr(self._after, "now", 0)

    def run(self) -> None:
        with self._device.lock:
            if self.done:
                return
            if isinstance(self._after, FarCopy):
                self._after.run()
            self._work(self.now)
            self._device.copies.remove(self)
            self._ended.set()

    def wait(self) -> None:
        if not self._device.is_held:
            self.run()
        if not self._ended.wait(60):
            raise RuntimeError("nobody has run this copy")


class FarStore:
    batch_blocks = 3

    def __init__(self, device: FarDevice, caches: Sequence[KVCache | LatentCache]) -> None:
        self.tensors = describe_tensors(caches)
        self._device = device
        self._parts = [device.memory(each) for cache in caches for each in cache.tensors.values()]
        self.num_blocks = len(self._parts[0].values)
        self.block_bytes = sum(tensor.block_bytes for tensor in self.tensors)

    def computed(self) -> DeviceEvent:
        return _Computed(self._device.now)

    def read(
        self, block_ids: Sequence[int], into: Sequence[memoryview], after: DeviceEvent = DONE
    ) -> DeviceEvent:
        check_blocks(self, block_ids, into)
        return self._read(block_extents(self.tensors, block_ids), into, after)

    def write(
        self, block_ids: Sequence[int], sources: Sequence[memoryview], after: DeviceEvent = DONE
    ) -> DeviceEvent:
        check_blocks(self, block_ids, sources)
        return self._write(block_extents(self.tensors, block_ids), sources, after)

    def read_extents(
        self, extents: Sequence[Extent], into: memoryview, after: DeviceEvent = DONE
    ) -> DeviceEvent:
        check_extents(self, extents, into)
        return self._read(extents, [into], after)

    def write_extents(
        self, extents: Sequence[Extent], source: memoryview, after: DeviceEvent = DONE
    ) -> DeviceEvent:
        check_extents(self, extents, source)
        return self._write(extents, [source], after)

    def _read(
        self, extents: Sequence[Extent], into: Sequence[memoryview], after: DeviceEvent
    ) -> DeviceEvent:
        for buffer in into:
            buffer[:] = POISON * len(buffer)

        def copy(now: int) -> None:
            found = b"".join(
                self._bytes(extent).tobytes()
                if self._stamps(extent, "written") <= now
                else POISON * extent.num_bytes
                for extent in extents
            )
            at = 0
            for buffer in into:
                buffer[:] = found[at : at + len(buffer)]
                at += len(buffer)

        return self._submit(copy, after)

    def _write(
        self, extents: Sequence[Extent], sources: Sequence[memoryview], after: DeviceEvent
    ) -> DeviceEvent:
        with self._device.lock:
            used = [self._stamps(extent, "used") for extent in extents]
            if not isinstance(after, FarCopy):
                for extent in extents:
                    self._bytes(extent)[:] = POISON[0]

        def copy(now: int) -> None:
            given, at = b"".join(sources), 0
            for extent, stamp in zip(extents, used, strict=True):
                own = (
                    given[at : at + extent.num_bytes] if stamp <= now else POISON * extent.num_bytes
                )
                self._bytes(extent)[:] = np.frombuffer(own, dtype=np.uint8)
                at += extent.num_bytes

        return self._submit(copy, after)

    def _submit(self, work: Callable[[int], None], after: DeviceEvent) -> FarCopy:
        with self._device.lock:
            return FarCopy(self._device, work, after)

    def _bytes(self, extent: Extent) -> Array:
        return self._parts[extent.region].bytes[extent.offset : extent.offset + extent.num_bytes]

    def _stamps(self, extent: Extent, kind: str) -> int:
        """The last operation that wrote or used the blocks."""
        stride = self.tensors[extent.region].block_stride
        first, last = extent.offset // stride, (extent.offset + extent.num_bytes - 1) // stride
        return int(getattr(self._parts[extent.region], kind)[first : last + 1].max())

    def regions(self) -> tuple[()]:
        return ()

    def file(self) -> None:
        return None

    def open_pages(self) -> None:
        return None


class FarBackend:
    """The toy, but for where KV lies."""

    def __init__(self) -> None:
        self._toy = ToyBackend("toy:0")  # whose bits are the same
        self.memory_of_kv = FarDevice()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._toy, name)

    def allocate_kv_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,  # noqa: ARG002
        kv_dtype: torch.dtype | None = None,  # noqa: ARG002
        new: NewTensor = new_tensor,  # noqa: ARG002
    ) -> KVCache:
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        return KVCache(*(self.memory_of_kv.new(shape) for _ in range(2)))

    def open_kv_store(self, caches: Sequence[KVCache | LatentCache]) -> FarStore:
        return FarStore(self.memory_of_kv, caches)

    def compile(self, graph: Graph, names: WeightNames = UNNAMED) -> Compiled[Metadata]:
        def compute(node: Node, inputs: Sequence[Any]) -> Any:
            operands = [*inputs, *(graph.weights[name] for name in node.weights)]
            for at, operand in enumerate(operands):
                if isinstance(operand, KVCache):
                    (metadata,) = (each for each in inputs if isinstance(each, Metadata))
                    operands[at] = self.memory_of_kv.reach(node.op, operand, metadata)
            return compute_node(node, operands)

        return InterpretedGraph(graph, compute, names)
