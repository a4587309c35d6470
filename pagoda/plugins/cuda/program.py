# SPDX-License-Identifier: Apache-2.0
"""A graph of the GPU backend: launches that are made once, and captured for steps of a token of each sequence."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pagoda.backend.base import StepInput
from pagoda.backend.graph import Graph, Node
from pagoda.backend.operation import Operation, OperationNamer, WeightNames
from pagoda.backend.operations import OPERATIONS
from pagoda.plugins.cuda.adapters import AdapterTables
from pagoda.plugins.cuda.delivery import deliver_step
from pagoda.plugins.cuda.kernels.numbers import power_of_two
from pagoda.plugins.cuda.lost import device_errors
from pagoda.plugins.cuda.lowering import FUSED
from pagoda.plugins.cuda.nodes import Launch
from pagoda.plugins.cuda.runtime import Runtime, Work
from pagoda.plugins.cuda.schedule import Bound, Rows, Schedule, launch_all
from pagoda.plugins.cuda.slot_mapping import FEW_TILES, MOST_CAPTURED, SlotMapping
from pagoda.plugins.cuda.staging import PinnedPool
from pagoda.plugins.cuda.weights import DeviceLinear
from pagoda.telemetry.tracer import Tracer

MOST_GRAPHS = 64
"""Captured steps that a graph keeps, for each of which the driver has memory of its own."""


class _SharedMemory:
    """Memory that captured steps use in turn, by key: as much as the largest so far asked for.

    Pieces are of sizes that are powers of two, so that all that graphs captured before keep is less than the last.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._held: dict[Hashable, Tensor] = {}

    def take(self, key: Hashable, num_bytes: int) -> Tensor:
        held = self._held.get(key)
        if held is None or len(held) < num_bytes:
            # Graphs that were captured before go on using what they had.
            size = power_of_two(num_bytes, 1)
            held = self._held[key] = self._runtime.empty((size,), torch.uint8)
        return held[:num_bytes]

    @staticmethod
    def most_bytes(num_bytes: int) -> int:
        """Bytes that a key of which at most `num_bytes` are asked comes to hold, with what graphs keep."""
        return 2 * power_of_two(num_bytes, 1)


class CudaCompiledGraph:
    def __init__(
        self,
        runtime: Runtime,
        pool: PinnedPool,
        graph: Graph,
        names: WeightNames,
        products_of: Callable[[Any], torch.dtype],
        adapters: AdapterTables,
    ) -> None:
        """`products_of` is that of `Lowering`. Operations are named after `names`."""
        self._runtime, self._pool = runtime, pool
        self._graph = graph
        self._names = names
        self._products_of, self._adapters = products_of, adapters
        self._schedules: dict[tuple[tuple[str, ...], tuple[str, ...]], Schedule] = {}
        self._met: set[Hashable] = set()
        """Shapes of steps that were computed once, so that their kernels are compiled."""
        self._captured: dict[Hashable, tuple[Bound, Work]] = {}
        """Captured steps by shape, those that were used last behind others."""
        self._graph_bytes: dict[Schedule, int] = {}
        """Bytes that the driver takes for a captured step."""
        self._shared = _SharedMemory(runtime)

    # ---- what is asked of it

    def operations(self, results: Sequence[str]) -> Sequence[Operation]:
        namer = OperationNamer(self._names)
        return [self._operation(namer, node) for node in self._schedule(results, ()).nodes]

    def __call__(self, step: StepInput[SlotMapping], results: Sequence[str]) -> tuple[Tensor, ...]:
        """Launches a step. Raises DeviceLostError: the device has failed."""
        with device_errors(self._runtime):
            return self._computed(step, results)

    def _computed(self, step: StepInput[SlotMapping], results: Sequence[str]) -> tuple[Tensor, ...]:
        schedule = self._schedule(results, step.given(self._graph))
        rows = schedule.rows(step)
        if not (schedule.can_be_captured and rows.is_padded):
            return self._launched(schedule, rows, step, results)
        key = (tuple(results), schedule.shape_key(rows, step))
        if key not in self._met:
            self._met.add(key)
            return self._launched(schedule, rows, step, results)
        captured = self._captured.pop(key, None)
        if captured is None:
            self._make_room()
            bound = schedule.bind(rows, step, self._runtime, self._shared.take)
            work = partial(launch_all, schedule.launches, bound.values)
            captured = bound, self._runtime.capture(work)
        self._captured[key] = captured
        return self._replayed(schedule, rows, step, results, captured)

    def traced(
        self,
        step: StepInput[SlotMapping],
        results: Sequence[str],
        tracer: Tracer,  # noqa: ARG002
    ) -> tuple[tuple[Tensor, ...], Sequence[int]]:
        schedule = self._schedule(results, step.given(self._graph))
        rows = schedule.rows(step)
        with device_errors(self._runtime):
            bound = schedule.bind(rows, step, self._runtime, self._own_memory)
            self._submit(bound, rows, step, _nothing)
            times = self._runtime.timed([partial(each, bound.values) for each in schedule.launches])
        return self._outcome(schedule, rows, step, results, bound), times

    def _make_room(self) -> None:
        """Drops the captured step that was not used for longest, if there are as many as there may be."""
        if len(self._captured) >= MOST_GRAPHS:
            self._runtime.steps.record().wait()  # the device may be at it
            del self._captured[next(iter(self._captured))]

    def profile(self, step: StepInput[SlotMapping], results: Sequence[str]) -> int:
        """Bytes of a step's inputs, values and scratch memory, and what captured steps share and the driver takes
        for them. To measure that, a step of nothing but padding is computed."""
        schedule = self._schedule(results, step.given(self._graph))
        memory = self._runtime.memory
        before = memory.taken_bytes()
        rows = schedule.rows(step)
        bound = schedule.bind(rows, step, self._runtime, self._own_memory)
        taken = memory.taken_bytes() - before
        del bound
        if schedule.can_be_captured:
            taken += self._captured_bytes(schedule, rows, step)
            taken += MOST_GRAPHS * self._driver_bytes(schedule, rows, step)
        return taken

    def _driver_bytes(self, schedule: Schedule, rows: Rows, step: StepInput[SlotMapping]) -> int:
        """Bytes that the driver takes for a captured step, whatever the number of its rows."""
        if schedule not in self._graph_bytes:
            padding = rows.captured(FEW_TILES)
            bound = schedule.bind(padding, step, self._runtime, self._own_memory)
            work = partial(_compute_padding, schedule.launches, bound)
            with device_errors(self._runtime):
                self._graph_bytes[schedule] = self._runtime.captured_bytes(work)
        return self._graph_bytes[schedule]

    def _captured_bytes(self, schedule: Schedule, rows: Rows, step: StepInput[SlotMapping]) -> int:
        """Bytes that captured steps share at most, of contexts as long as those of `rows`."""
        most: dict[Hashable, int] = {}

        def count(key: Hashable, num_bytes: int) -> Tensor:
            most[key] = max(most.get(key, 0), num_bytes)
            return torch.empty(num_bytes, dtype=torch.uint8, device="meta")

        for size in (FEW_TILES, MOST_CAPTURED):  # few share contexts, which takes memory of its own
            schedule.bind(rows.captured(size), step, self._runtime, count)
        return sum(map(_SharedMemory.most_bytes, most.values()))

    # ---- steps

    def _launched(
        self, schedule: Schedule, rows: Rows, step: StepInput[SlotMapping], results: Sequence[str]
    ) -> tuple[Tensor, ...]:
        """A step in memory of its own."""
        bound = schedule.bind(rows, step, self._runtime, self._own_memory)
        self._submit(bound, rows, step, partial(launch_all, schedule.launches, bound.values))
        return self._outcome(schedule, rows, step, results, bound)

    def _replayed(
        self,
        schedule: Schedule,
        rows: Rows,
        step: StepInput[SlotMapping],
        results: Sequence[str],
        captured: tuple[Bound, Work],
    ) -> tuple[Tensor, ...]:
        """A captured step, whose results are copied: the next one writes to the same memory."""
        bound, replay = captured
        copies: dict[str, tuple[Tensor, Tensor]] = {}
        for name, value in schedule.computed.items():
            kept: Tensor = bound.values[value.index][: rows.without_padding(value)]
            copies[name] = self._runtime.empty(tuple(kept.shape), kept.dtype), kept

        def run() -> None:
            replay()
            for own, kept in copies.values():
                own.copy_(kept)

        self._submit(bound, rows, step, run)
        return tuple(self._runtime.shown(copies[name][0]) for name in results)

    def _submit(self, bound: Bound, rows: Rows, step: StepInput[SlotMapping], run: Work) -> None:
        """Submits copies of all that the step brings along, and what comes behind them."""
        deliver, pinned = deliver_step(self._runtime, self._pool, bound, rows, step)

        def work() -> None:
            deliver()
            run()

        self._runtime.steps.run(work)
        done = self._runtime.steps.record()
        for each in pinned:
            each.used_until(done)

    def _outcome(
        self,
        schedule: Schedule,
        rows: Rows,
        step: StepInput[SlotMapping],
        results: Sequence[str],
        bound: Bound,
    ) -> tuple[Tensor, ...]:
        """The results of a step that is not captured, without padding."""
        found = []
        for name in results:
            value = schedule.computed.get(name)
            if value is None:
                found.append(step.tensors[name])
                continue
            own: Tensor = bound.values[value.index][: rows.without_padding(value)]
            found.append(self._runtime.shown(own))
        return tuple(found)

    def _own_memory(self, key: Hashable, num_bytes: int) -> Tensor:  # noqa: ARG002
        return self._runtime.empty((num_bytes,), torch.uint8)

    # ---- schedules

    def _schedule(self, results: Sequence[str], given: Sequence[str]) -> Schedule:
        key = (tuple(results), tuple(given))
        schedule = self._schedules.get(key)
        if schedule is None:
            schedule = self._schedules[key] = Schedule(
                self._graph, *key, self._runtime, self._products_of, self._adapters
            )
        return schedule

    def _operation(self, namer: OperationNamer, node: Node) -> Operation:
        kind = OPERATIONS["rms_norm" if node.op == FUSED else node.op].kind
        weight = self._graph.weights[node.weights[0]] if node.weights else None
        if not isinstance(weight, DeviceLinear):
            return Operation(namer.name(kind, weight), kind)
        flops = 0 if node.op == "embedding" else 2 * weight.inputs * weight.outputs
        return Operation(namer.name(kind, weight), kind, weight.num_bytes, flops)


def _compute_padding(launches: Sequence[Launch], bound: Bound) -> None:
    """Computes a step whose inputs are 0 and whose places are all -1, so that it writes to no cache."""
    bound.packed.zero_()
    for places in bound.places.values():
        places.fill_(0xFF)
    launch_all(launches, bound.values)


def _nothing() -> None:
    """Stands for launches that are measured one by one."""
