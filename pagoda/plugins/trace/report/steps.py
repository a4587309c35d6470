# SPDX-License-Identifier: Apache-2.0
"""Parts of the time of steps: in the engine, on the way, in the worker."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean as mean

import msgspec

from pagoda.plugins.trace.merge.model import Process, Row, TraceSpan, read_args
from pagoda.plugins.trace.merge.steps import Operations, Step, operations_of, operations_within
from pagoda.plugins.trace.report.data import (
    EngineReport,
    ForwardReport,
    OperationReport,
    WorkerReport,
    parts_of,
)
from pagoda.plugins.trace.report.intervals import Interval, covered, length, union, within, without

_LOOP = ("schedule", "submit", "update", "send")
_PHASES = ("prepare", "forward", "sample", "await stage")


class _DescribedModel(msgspec.Struct, frozen=True):
    """A worker's description of its part of the model."""

    weight_bytes: float = 0.0
    flops_per_token: float = 0.0
    kv_bytes_per_token: float = 0.0
    expert_bytes: float = 0.0
    """Bytes of the weights that belong to experts."""
    experts_held: int = 0
    """Experts in each layer that has any."""
    experts_per_token: int = 0

    def share_of_experts(self, tokens: int) -> float:
        """The largest share of the experts' weights that a pass over `tokens` tokens reads."""
        if not self.experts_held:
            return 1.0
        return min(1.0, tokens * self.experts_per_token / self.experts_held)

    def weights_read(self, tokens: int) -> float:
        """The largest number of bytes that a pass over `tokens` tokens reads."""
        return self.weight_bytes - self.expert_bytes * (1 - self.share_of_experts(tokens))


class _Batch(msgspec.Struct, frozen=True):
    """A worker's description of a step."""

    tokens: int = 0
    seqs: int = 0
    context_tokens: int = 0


def working(worker: Process) -> list[Interval]:
    """Times of the worker in steps, without its waits for the previous stage of a pipeline."""
    waits = union(_times(worker, "await stage"))
    steps = step_times(worker)
    return union(part for step in steps for part in without(step, within(waits, *step)))


def step_times(worker: Process) -> Iterator[Interval]:
    """Times of the worker's steps, waits included."""
    return _times(worker, "step")


def _times(process: Process, name: str) -> Iterator[Interval]:
    return (span.interval for span in process.main.named(name))


def engine_report(
    engine: Process, steps: Sequence[Step], workers: Mapping[int, Sequence[Interval]]
) -> EngineReport:
    """`workers`: when each worker of this engine was working, by its `pid`."""
    present = _present(engine)
    loop = {name: length(_times(engine, name)) / 1e9 for name in _LOOP}
    steps = [step for step in steps if step.is_whole]
    busy = union(it for intervals in workers.values() for it in intervals)
    whole = own = waited = 0
    for step in steps:
        span = step.place.span
        whole += span.ns
        mine = (within(workers.get(it.pid, ()), *it.span.interval) for it in step.workers)
        in_own = covered(union(chain.from_iterable(mine)), *span.interval)
        own += in_own
        waited += covered(busy, *span.interval) - in_own
    parts = {
        "in the worker": own / 1e9,
        "behind other steps": waited / 1e9,
        "IPC": (whole - own - waited) / 1e9,
    }
    return EngineReport(
        name=engine.name,
        num_steps=len(steps),
        loop=parts_of(loop, length(present) / 1e9),
        steps=parts_of(parts, whole / 1e9),
    )


def _present(engine: Process) -> list[Interval]:
    """Times in which the engine had a request."""
    rows = (row.spans for row in engine.rows if row.request is not None)
    return union(span.interval for span in chain.from_iterable(rows))


@dataclass
class _WorkerStep:
    span: TraceSpan
    batch: _Batch
    inner: list[int] = field(default_factory=list)
    """Places of the spans within the step, in its row."""


def _steps(row: Row) -> list[_WorkerStep]:
    """Steps of a worker; spans outside of steps, such as those of start-up, are left out."""
    steps: list[_WorkerStep] = []
    for index, span in enumerate(row.spans):
        if span.name == "step":
            steps.append(_WorkerStep(span, read_args(span.args, _Batch) or _Batch()))
        elif steps and span.end <= steps[-1].span.end:
            steps[-1].inner.append(index)
    return steps


def worker_report(worker: Process, engines: Sequence[Process]) -> WorkerReport | None:
    """None for a worker that computed nothing. `engines` may have been those that it worked for."""
    row = worker.main
    steps = _steps(row)
    if not steps:
        return None
    took = dict.fromkeys(_PHASES, 0)
    for span in (row.spans[index] for step in steps for index in step.inner):
        if span.name in took:
            took[span.name] += span.ns
    present = union(it for engine in engines for it in _present(engine))
    busy = union(step.span.interval for step in steps)
    between = 0
    if busy:  # there is none where all steps took no time
        between = covered(present, busy[0][0], busy[-1][1]) - sum(
            covered(present, start, end) for start, end in busy
        )
    took["rest of the step"] = length(busy) - sum(took.values())
    took["idle, with requests there"] = between
    seconds = {name: max(0, ns) / 1e9 for name, ns in took.items() if ns or name in _PHASES[:3]}
    return WorkerReport(
        name=worker.name,
        num_steps=len(steps),
        parts=parts_of(seconds, sum(seconds.values())),
        operations=_operation_reports(worker, steps),
        forwards=_forward_reports(worker, steps),
    )


# ---- forward passes


@dataclass
class _OperationSums:
    ns: int = 0
    num_bytes: float = 0.0
    flops: float = 0.0


def _operation_reports(
    worker: Process, steps: Sequence[_WorkerStep]
) -> tuple[OperationReport, ...]:
    """Operations by kind, the longest time first."""
    row = worker.main
    operations, model = (
        operations_of(worker),
        worker.description("model", _DescribedModel) or _DescribedModel(),
    )
    costs = _costs(operations)
    kinds: defaultdict[str, _OperationSums] = defaultdict(_OperationSums)
    for tokens, index in ((step.batch.tokens, index) for step in steps for index in step.inner):
        if row.spans[index].name == "forward":
            for name, kind, ns in operations_within(row, index, operations):
                num_bytes, flops_per_token = costs.get(name, (0.0, 0.0))
                share = model.share_of_experts(tokens) if kind == "experts" else 1.0
                kinds[kind].ns += ns
                kinds[kind].num_bytes += num_bytes * share
                kinds[kind].flops += flops_per_token * tokens
    total = sum(kind.ns for kind in kinds.values())
    ordered = sorted(kinds.items(), key=lambda it: -it[1].ns)
    return tuple(
        OperationReport(
            kind=name,
            seconds=it.ns / 1e9,
            share=it.ns / total if total else 0.0,
            bytes_per_s=it.num_bytes / it.ns * 1e9 if it.num_bytes and it.ns else None,
            flops_per_s=it.flops / it.ns * 1e9 if it.flops and it.ns else None,
        )
        for name, it in ordered
    )


def _costs(operations: Operations) -> dict[str, tuple[float, float]]:
    """Bytes of weights and operations a token, by name: the mean where several have one.

    Every pass has them all, so that their sum is right, and spans of a merged file have nothing but names.
    """
    by_name: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for name, num_bytes, flops in zip(
        operations.names, operations.weight_bytes, operations.flops_per_token, strict=False
    ):
        by_name[name].append((num_bytes, flops))
    return {
        name: (mean(num_bytes for num_bytes, _ in costs), mean(flops for _, flops in costs))
        for name, costs in by_name.items()
    }


def _forward_reports(worker: Process, steps: Sequence[_WorkerStep]) -> tuple[ForwardReport, ...]:
    """Rates of steps in which every request computed one token, and of other steps."""
    model = worker.description("model", _DescribedModel) or _DescribedModel()
    if not model.weight_bytes:
        return ()
    found: defaultdict[str, list[tuple[_Batch, int]]] = defaultdict(list)
    spans = worker.main.spans
    for step in steps:
        inner = (spans[index] for index in step.inner)
        if ns := sum(it.ns for it in inner if it.name == "forward"):
            is_decode = step.batch.tokens <= step.batch.seqs
            found["decode" if is_decode else "with prompts"].append((step.batch, ns))
    return tuple(_forward_report(name, passes, model) for name, passes in sorted(found.items()))


def _forward_report(
    name: str, passes: Sequence[tuple[_Batch, int]], model: _DescribedModel
) -> ForwardReport:
    seconds = sum(ns for _, ns in passes) / 1e9
    tokens = sum(batch.tokens for batch, _ in passes)
    context = sum(batch.context_tokens for batch, _ in passes)
    weights = sum(model.weights_read(batch.tokens) for batch, _ in passes)
    return ForwardReport(
        steps=name,
        count=len(passes),
        tokens=tokens,
        seconds=seconds,
        bytes_per_s=(weights + model.kv_bytes_per_token * context) / seconds,
        flops_per_s=model.flops_per_token * tokens / seconds,
    )
