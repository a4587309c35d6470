# SPDX-License-Identifier: Apache-2.0
"""The requests in each step of an engine, and the steps of workers that computed it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from pagoda.plugins.trace.merge.model import Process, Row, Trace, TraceSpan, arguments, read_args

_TOLERATED_NS = 100_000_000
"""The longest time between an engine's step and a worker's that can be the error of clocks."""


class StepArgs(msgspec.Struct, frozen=True):
    """An engine's description of a step."""

    step: int
    rows: list[int]
    """Rows of the requests in the step."""
    tokens: list[int] = []
    """Tokens computed for each of these requests."""
    cut: bool = False
    """Tracing ended before it did."""
    lost: bool = False
    """The worker was lost before the step had a result."""


class _WorkerStepArgs(msgspec.Struct, frozen=True):
    step: int


@dataclass(frozen=True)
class PlacedSpan:
    pid: int
    tid: int
    span: TraceSpan


@dataclass(frozen=True)
class Step:
    place: PlacedSpan
    args: StepArgs
    workers: list[PlacedSpan] = field(default_factory=list)
    """The same step at each worker."""

    @property
    def is_whole(self) -> bool:
        """True if the duration of the step is known."""
        return not (self.args.cut or self.args.lost)


StepsByRow = Mapping[tuple[int, int], Sequence[Step]]
"""The steps of a request, by `pid` and `tid` of its row in an engine."""


def steps_of(trace: Trace) -> dict[int, list[Step]]:
    """The steps of each engine, in order, by the engine's `pid`."""
    engines = [it for it in trace.processes if it.header.kind == "engine"]
    steps = {engine.pid: _engine_steps(engine) for engine in engines}
    numbered: defaultdict[tuple[int, int], list[Step]] = defaultdict(list)
    for pid, found in steps.items():
        for step in found:
            numbered[pid, step.args.step].append(step)
    for worker in trace.processes:
        if worker.header.kind == "worker":
            own = [engine.pid for engine in engines_of(worker, engines)]
            for span in worker.main.named("step"):
                args = read_args(span.args, _WorkerStepArgs)
                if args is None:
                    continue
                same = [it for pid in own for it in numbered.get((pid, args.step), ())]
                nearest = _nearest(same, span)
                if nearest is not None:
                    nearest.workers.append(PlacedSpan(worker.pid, worker.pid, span))
    return steps


def steps_by_row(steps: Mapping[int, Sequence[Step]]) -> StepsByRow:
    """All steps of engines (`steps_of`), by the rows of their requests."""
    index: defaultdict[tuple[int, int], list[Step]] = defaultdict(list)
    for pid, found in steps.items():
        for step in found:
            for tid in step.args.rows:
                index[pid, tid].append(step)
    return index


def _engine_steps(engine: Process) -> list[Step]:
    found = []
    for row in engine.rows:
        for span in row.named("step") if row.tid != engine.pid else ():
            args = read_args(span.args, StepArgs)
            if args is not None:
                found.append(Step(PlacedSpan(engine.pid, row.tid, span), args))
    found.sort(key=lambda step: step.place.span.start)
    return found


def engines_of(worker: Process, engines: Sequence[Process]) -> list[Process]:
    """The engine that started a worker; else all that had its part of the model."""
    parents = [engine for engine in engines if engine.pid == worker.parent]
    return parents or [engine for engine in engines if _part(engine) == _part(worker)]


def _part(process: Process) -> tuple[str, list[str]]:
    """The run, and the part of the role that an engine and its workers share: `dp0`."""
    return process.header.run, process.header.role.split()[1:2]


def _nearest(candidates: Sequence[Step], span: TraceSpan) -> Step | None:
    """Engines count anew when they start anew, so of steps with the same number the time decides."""

    def apart(step: Step) -> int:
        engine = step.place.span
        return max(engine.start - span.end, span.start - engine.end, 0)

    best = min(
        candidates,
        key=lambda step: (apart(step), abs(step.place.span.start - span.start)),
        default=None,
    )
    return None if best is None or apart(best) > _TOLERATED_NS else best


class _Durations(msgspec.Struct):
    ops_ns: list[int] = []


class Operations(msgspec.Struct, frozen=True):
    """A worker's description of the operations of its forward pass; each list has an entry for each operation."""

    names: list[str]
    kinds: list[str] = []
    weight_bytes: list[float] = []
    flops_per_token: list[float] = []

    def name(self, index: int) -> str:
        return self.names[index] if index < len(self.names) else f"operation {index}"

    def kind(self, index: int) -> str:
        return self.kinds[index] if index < len(self.kinds) else "operation"


def operations_of(process: Process) -> Operations:
    """The operations that the process has described; none if it has not."""
    return process.description("forward_ops", Operations) or Operations([])


def operation_spans(forward: TraceSpan, operations: Operations) -> Iterator[tuple[TraceSpan, str]]:
    durations = read_args(forward.args, _Durations) or _Durations()
    at = forward.start
    for index, ns in enumerate(durations.ops_ns):
        end = min(at + max(0, ns), forward.end)
        yield TraceSpan(at, end, operations.name(index), b""), operations.kind(index)
        at = end


def operations_within(
    row: Row, index: int, operations: Operations
) -> Iterator[tuple[str, str, int]]:
    """Name, kind and nanoseconds of each operation of the forward pass that is the span at `index`.

    They are in what is said of it, or are spans within it.
    """
    forward = row.spans[index]
    if b'"ops_ns"' in forward.args:
        for span, kind in operation_spans(forward, operations):
            yield span.name, kind, span.ns
        return
    kinds = dict(zip(operations.names, operations.kinds, strict=False))
    for position in range(index + 1, len(row.spans)):
        span = row.spans[position]
        if span.start >= forward.end:
            return
        kind = kinds.get(span.name) or str(arguments(span.args).get("kind", "operation"))
        yield span.name, kind, span.ns
