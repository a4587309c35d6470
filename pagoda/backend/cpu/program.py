# SPDX-License-Identifier: Apache-2.0
"""A graph of the cpu backend as one native call; see csrc/lowering.h and csrc/program.h."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pagoda.backend.base import (
    Experts,
    HeadLinears,
    KVCache,
    LatentCache,
    NeededInputs,
    StateCache,
    StepInput,
)
from pagoda.backend.cpu.collectives import SharedMemoryCollectives
from pagoda.backend.cpu.weights import NativeAttentionMetadata, PackedLinear, WeightSegment, address
from pagoda.backend.graph import Attribute, Graph, Node, Value
from pagoda.backend.host import position_scale, rotary_table
from pagoda.backend.low_rank import LowRankMaps
from pagoda.backend.operation import Operation, OperationNamer, WeightNames
from pagoda.backend.operations import OPERATIONS
from pagoda.parallel.collectives import Collectives
from pagoda.telemetry.tracer import Tracer

if TYPE_CHECKING:
    from pagoda.backend import _native
    from pagoda.backend.cpu.backend import CpuBackend

_BEFORE: Mapping[str, Callable[..., Any]] = {
    "rotary_table": rotary_table,
    "position_scale": position_scale,
}
"""Operations on the step's inputs that are computed before the native call."""
_ITEM_BYTES = {"float32": 4, "int64": 8, "metadata": 0, "counts": 0}


@dataclass(frozen=True)
class _NativeSchedule:
    """Operations of steps that want some results and bring some along."""

    number: int
    """Number of the native program's schedule."""
    inputs: NeededInputs
    results: tuple[tuple[str, Value, torch.dtype], ...]
    """Name, value and dtype of each result that is wanted."""
    before: tuple[Node, ...]
    operations: tuple[Operation, ...]


class CompiledGraph:
    def __init__(
        self, backend: CpuBackend, graph: Graph, program: type[_native.Program], names: WeightNames
    ) -> None:
        """Lowers the graph to a native program. Operations are named after `names`."""
        self._graph = graph
        self._names = names
        self._schedules: dict[tuple[tuple[str, ...], tuple[str, ...]], _NativeSchedule] = {}
        self._native_nodes = [i for i, node in enumerate(graph.nodes) if node.op not in _BEFORE]
        self._tensors = [(name, value.index) for name, value in graph.inputs.items()]
        computed = [v for node in graph.nodes if node.op in _BEFORE for v in node.outputs]
        self._inputs = [*(index for _, index in self._tensors), *computed]
        # The program has no more than their addresses.
        self._kept = [_handle(backend, weight) for weight in graph.weights]
        nodes = [graph.nodes[i] for i in self._native_nodes]
        self._program = program(
            backend.kernels,
            [(value.width, _ITEM_BYTES[value.dtype], value.row_kind) for value in graph.values],
            [*self._inputs, *(value.index for value in graph.metadata.values())],
            [value.index for value in graph.results.values()],
            graph.inputs["rows"].index if "rows" in graph.inputs else -1,
            graph.inputs["adapters"].index if "adapters" in graph.inputs else -1,
            [
                (node.op, [*node.inputs], [*node.outputs], [*node.weights], _numbers(node))
                for node in nodes
            ],
            self._kept,
        )

    def operations(self, results: Sequence[str]) -> Sequence[Operation]:
        return self._schedule(results, ()).operations

    def __call__(
        self, step: StepInput[NativeAttentionMetadata], results: Sequence[str]
    ) -> tuple[Tensor, ...]:
        return self._run(step, results, None)

    def traced(
        self,
        step: StepInput[NativeAttentionMetadata],
        results: Sequence[str],
        tracer: Tracer,  # noqa: ARG002 - the program keeps the time
    ) -> tuple[tuple[Tensor, ...], Sequence[int]]:
        times: list[int] = []
        return self._run(step, results, times), times

    def profile(self, step: StepInput[NativeAttentionMetadata], results: Sequence[str]) -> int:
        """Computes nothing: the program counts what it would take, of which it keeps all but the results."""
        given = step.given(self._graph)
        schedule = self._schedule(results, given)
        rows = schedule.inputs.check(step)
        read = {"rows", "adapters", "token_counts", "row_counts"}
        tensors = {
            index: step.tensors[name]
            for name, index in self._tensors
            if name in read and name in step.tensors
        }
        num_bytes = self._program.step_bytes(
            schedule.number,
            rows,
            [address(tensors.get(index)) for index in self._inputs],
            [step.metadata[g].native if g in step.metadata else None for g in self._graph.metadata],
        )
        own = [value for _, value, _ in schedule.results]
        own += [self._graph.values[index] for node in schedule.before for index in node.outputs]
        return num_bytes + sum(
            rows.of(value) * value.width * _ITEM_BYTES[value.dtype] for value in own
        )

    def _run(
        self,
        step: StepInput[NativeAttentionMetadata],
        results: Sequence[str],
        times: list[int] | None,
    ) -> tuple[Tensor, ...]:
        """The results; `times` gets the nanoseconds of each operation."""
        graph = self._graph
        given = step.given(graph)
        schedule = self._schedule(results, given)
        rows = schedule.inputs.check(step)
        for group in schedule.inputs.groups:
            planned = step.metadata[group].native.num_tokens
            if rows.tokens != planned:
                raise ValueError(f"{rows.tokens} tokens do not fit metadata of {planned}.")
        values: dict[int, Tensor] = {}
        for name, index in self._tensors:
            tensor = step.tensors.get(name)
            if tensor is not None and name in schedule.inputs.names:
                values[index] = tensor.contiguous()
        for node in schedule.before:
            began = time.perf_counter_ns()
            self._compute_before(node, values)
            if times is not None:
                times.append(time.perf_counter_ns() - began)
        known = {name: step.tensors[name].contiguous() for name in given}
        for name, value, dtype in schedule.results:
            if name in known:
                continue
            computed = values.get(value.index)
            if computed is None:
                computed = torch.empty((rows.of(value), value.width), dtype=dtype)
            known[name] = computed
        native_times = (
            None
            if times is None
            else torch.zeros(len(schedule.operations) - len(schedule.before), dtype=torch.int64)
        )
        self._program.run(
            schedule.number,
            rows,
            [address(values.get(index)) for index in self._inputs],
            [step.metadata[g].native if g in step.metadata else None for g in graph.metadata],
            [address(known.get(name)) for name in graph.results],
            address(native_times),
        )
        if times is not None and native_times is not None:
            times += native_times.tolist()
        return tuple(known[name] for name in results)

    def _compute_before(self, node: Node, values: dict[int, Tensor]) -> None:
        """Computes a node before the native call."""
        inputs = [values[value] for value in node.inputs]
        weights: list[Any] = [self._graph.weights[weight] for weight in node.weights]
        attributes: dict[str, Any] = {**node.attributes}
        computed: Any = _BEFORE[node.op](*inputs, *weights, **attributes)
        outputs = computed if len(node.outputs) > 1 else (computed,)
        for value, out in zip(node.outputs, outputs, strict=True):
            values[value] = out.contiguous()

    def _schedule(self, results: Sequence[str], given: Sequence[str]) -> _NativeSchedule:
        key = (tuple(results), tuple(given))
        schedule = self._schedules.get(key)
        if schedule is None:
            schedule = self._schedules[key] = self._new_schedule(*key)
        return schedule

    def _new_schedule(self, results: tuple[str, ...], given: tuple[str, ...]) -> _NativeSchedule:
        graph, needed = self._graph, self._graph.needed(results, given)
        place = {node: i for i, node in enumerate(self._native_nodes)}
        external = [graph.results[name].index for name in (*results, *given)]
        number = self._program.schedule([place[i] for i in needed if i in place], external)
        before = [i for i in needed if i not in place]
        wanted = [(name, graph.results[name]) for name in results]
        namer = OperationNamer(self._names)
        noted = [(node, 0, 0) for node in before]
        noted += [
            (self._native_nodes[node], num_bytes, flops)
            for node, num_bytes, flops in self._program.operations(number)
        ]
        operations = [self._operation(namer, *note) for note in noted]
        return _NativeSchedule(
            number,
            NeededInputs(graph, needed, given),
            tuple((name, value, getattr(torch, value.dtype)) for name, value in wanted),
            tuple(graph.nodes[i] for i in before),
            tuple(operations),
        )

    def _operation(
        self, namer: OperationNamer, index: int, weight_bytes: int, flops: int
    ) -> Operation:
        node = self._graph.nodes[index]
        kind = OPERATIONS[node.op].kind
        weight = self._graph.weights[node.weights[0]] if node.weights else None
        return Operation(namer.name(kind, weight), kind, weight_bytes, flops)


class _GroupMemory:
    """A group of ranks without memory in common, as a native program calls it."""

    def __init__(self, group: Collectives) -> None:
        self.size, self.rank = group.size, group.rank
        self._group = group

    def all_reduce(self, rows: int, n: int, d: int) -> None:
        """Makes the floats [n, d] at an address the sum of those of all ranks."""
        own = _floats(rows, n * d).view(n, d)
        total = self._group.all_reduce(own)
        if total is not own:
            own.copy_(total)

    def all_gather(self, x: int, num_bytes: int, out: int) -> None:
        """Copies the bytes of all ranks to `out`, one behind the other."""
        gathered = self._group.all_gather(_bytes(x, num_bytes))
        _bytes(out, num_bytes * self.size).copy_(gathered.flatten())

    def all_to_all(self, x: int, num_bytes: list[int], out: int) -> None:
        """Copies to `out` the bytes that all ranks have for this one: from each to each there are `num_bytes`."""
        counts = [num_bytes[self.size * rank :][: self.size] for rank in range(self.size)]
        found = self._group.all_to_all(_bytes(x, sum(counts[self.rank])), counts)
        _bytes(out, len(found)).copy_(found)


def _floats(where: int, count: int) -> Tensor:
    return _bytes(where, 4 * count).view(torch.float32)


def _bytes(where: int, count: int) -> Tensor:
    if not count:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_uint8 * count).from_address(where), dtype=torch.uint8)


def _numbers(node: Node) -> list[float]:
    """Attributes in the order of the operation's; 0 for None."""
    numbers: list[float] = []
    for name in OPERATIONS[node.op].attributes:
        value: Attribute = node.attributes[name]
        numbers += value if isinstance(value, tuple) else [0 if value is None else value]
    return [float(number) for number in numbers]


def _of_heads(weight: HeadLinears[PackedLinear]) -> list[WeightSegment]:
    """The maps of all heads. Raises ValueError: they are none that kernels take."""
    segments = [segment for head in weight.heads for segment in head.segments]
    shape = segments[0].shape
    if not isinstance(shape, tuple) or len(segments) != len(weight.heads):
        raise ValueError("The maps of heads are dense.")
    if any(segment.shape != shape or segment.bias is not None for segment in segments):
        raise ValueError("The maps of heads are of one shape, and have no biases.")
    return segments


def _handle(backend: CpuBackend, weight: object) -> object:
    """Object or address that a native program takes for a weight of the graph."""
    if isinstance(weight, PackedLinear):
        return backend.native_layer(weight.segments)
    if isinstance(weight, HeadLinears):
        return backend.native_layer(_of_heads(weight))
    if isinstance(weight, LatentCache):
        return backend.native_latents(weight)
    if isinstance(weight, Experts):
        return backend.native_experts(weight)
    if isinstance(weight, LowRankMaps):
        return backend.native_maps(weight)
    if isinstance(weight, KVCache):
        return backend.native_cache(weight)
    if isinstance(weight, StateCache):
        return backend.native_states(weight)
    if isinstance(weight, SharedMemoryCollectives):
        return weight.native
    if not isinstance(weight, Tensor):
        return _GroupMemory(weight)  # type: ignore[arg-type]
    if not weight.is_contiguous() or weight.dtype != torch.float32:
        raise ValueError("Vectors must be contiguous float32.")
    return weight.data_ptr()
