# SPDX-License-Identifier: Apache-2.0
"""Checks of graphs of several operations, and of the ranks of a group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from pagoda.backend import own_rows
from pagoda.backend.base import Backend, Experts, StepInput, UnsupportedError
from pagoda.backend.graph import Graph, Value
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.weights import DenseWeight
from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.devices import BackendUnavailableError
from pagoda.parallel.collectives import HostGroup
from pagoda.plugins.backend_check.products import TOLERANCE
from pagoda.plugins.backend_check.subject import (
    Check,
    FailedError,
    LackingError,
    Subject,
    ensure,
    ensure_close,
    ensure_same,
    outputs,
    random_tensor,
)
from pagoda.plugins.backend_check.threads import ThreadGroup, ThreadRank
from pagoda.telemetry.tracer import Tracer

RANKS = 2
_ROWS = 9


def _graph(backend: Backend[Any, Any], dtype: torch.dtype) -> Graph:
    """A sum, its norm and chosen rows of that, of two inputs; a dense layer behind these."""
    ops = GraphBuilder(backend.group)
    weight = random_tensor(64, seed=1).to(backend.device)
    dense = backend.prepare_linear([DenseWeight(random_tensor(48, 64) / 8)], None, dtype)
    total = ops.add(ops.input("x", 64), ops.input("y", 64))
    normed = ops.rms_norm(total, weight, 1e-6)
    ops.result("total", total)
    chosen = ops.select_rows(normed, ops.input("rows"))
    ops.result("chosen", chosen)
    ops.result("out", ops.linear(chosen, dense))
    return ops.build()


def _parts(subject: Subject) -> str:
    """Whole models are all that a backend computes which says so: it refuses a part of one."""
    backend = subject.backend
    if not backend.capabilities.whole_models:
        return "it computes operations one by one"
    ops = GraphBuilder(backend.group)
    ops.result("total", ops.add(ops.input("x", 64), ops.input("y", 64)))
    try:
        backend.compile(ops.build())
    except UnsupportedError as error:
        return f"a sum is refused: {str(error).removesuffix('.')}"
    raise FailedError("it says that its programs are whole models, but compiles a sum")


def _results(subject: Subject) -> str:
    """Steps get the results that they want, may bring some along, and need no inputs of others."""
    subject.needs("add", "rms_norm", "select_rows", "linear")
    backend = subject.backend
    compiled, expected = (each.compile(_graph(each, subject.dense)) for each in subject.both)
    tensors = {
        "x": random_tensor(_ROWS, 64, seed=2),
        "y": random_tensor(_ROWS, 64, seed=3),
        "rows": torch.tensor([7, 0, 3]),
    }
    step: StepInput[Any] = StepInput(tensors)
    names = ["out", "total", "chosen"]
    whole = [each.cpu() for each in compiled(step, names)]
    for name, own, wanted in zip(names, whole, expected(step, names), strict=True):
        ensure_close(own, wanted, TOLERANCE[subject.dense], f"the result {name} of a graph")
    (total,) = compiled(StepInput({"x": tensors["x"], "y": tensors["y"]}), ["total"])
    ensure_same(total.cpu(), whole[1], "a result that needs fewer inputs")
    given = StepInput[Any]({"chosen": whole[2].to(backend.device)})
    ensure_same(
        compiled(given, ["out"])[0].cpu(), whole[0], "a result computed from one brought along"
    )
    brought = whole[1].to(backend.device, copy=True)
    given = StepInput[Any]({"total": brought, "rows": tensors["rows"]})
    ensure_same(compiled(given, ["out"])[0].cpu(), whole[0], "the norm of a sum brought along")
    ensure_same(brought.cpu(), whole[1], "a result that was brought along, and written to,")
    both = compiled(given, ["total", "out"])
    for own, wanted in zip(both, (whole[1], whole[0]), strict=True):
        ensure_same(own.cpu(), wanted, "a result that was brought along and is wanted as well")
    again = compiled(step, names)
    compiled(
        StepInput({name: -each if name != "rows" else each for name, each in tensors.items()}),
        names,
    )
    for name, own, wanted in zip(names, again, whole, strict=True):
        ensure_same(own.cpu(), wanted, f"the result {name}, once the next step is computed,")
    for lacking in ("y", "rows"):
        try:
            compiled(StepInput({k: v for k, v in tensors.items() if k != lacking}), names)
        except ValueError as error:
            ensure(
                lacking in str(error),
                f"a step without {lacking} is refused without its name: {error}",
            )
        else:
            raise FailedError(f"a step without {lacking} is computed without a ValueError")
    return "wanted, brought along, repeated, and refused where inputs are missing"


def _traced(subject: Subject) -> str:
    """A traced step has the same results, and a time for each operation that is named."""
    subject.needs("add", "rms_norm", "select_rows", "linear")
    compiled = subject.backend.compile(_graph(subject.backend, subject.dense))
    tensors = {
        "x": random_tensor(_ROWS, 64),
        "y": random_tensor(_ROWS, 64),
        "rows": torch.arange(3),
    }
    step: StepInput[Any] = StepInput(tensors)
    plain = compiled(step, ["out"])
    traced, times = compiled.traced(step, ["out"], Tracer("backend check"))
    ensure_same(traced[0].cpu(), plain[0].cpu(), "a traced step")
    operations = compiled.operations(["out"])
    ensure(
        len(times) == len(operations),
        f"a traced step has {len(times)} times of {len(operations)} operations",
    )
    ensure(all(time >= 0 for time in times), "an operation took less than no time")
    return f"{len(operations)} operations with times of their own"


def on_ranks(subject: Subject, work: Callable[[Backend[Any, Any], int], Any]) -> list[Any]:
    """Results of some work on the backends of several ranks.

    Raises LackingError: the machine has no device for a second rank.
    """
    group = ThreadGroup(RANKS)

    def run(rank: int) -> Any:
        member: HostGroup = ThreadRank(group, rank)
        try:
            backend = subject.open(member)
            ensure(
                (backend.group.rank, backend.group.size) == (rank, RANKS),
                "the group of a backend has not the ranks of the group that it has joined",
            )
            return work(backend, rank)
        except BaseException:
            group.abort()
            raise

    with ThreadPoolExecutor(RANKS) as pool:
        tried = [pool.submit(run, rank) for rank in range(RANKS)]
        errors = [each.exception() for each in tried]
    for error in errors:
        if isinstance(error, BackendUnavailableError):
            raise LackingError(f"a second rank cannot be opened here: {error}")
        if isinstance(error, UnsupportedError):
            raise LackingError(str(error).removesuffix("."))
    for error in errors:
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [each.result() for each in tried]


def _all_reduce(subject: Subject) -> str:
    subject.needs("all_reduce")
    parts = [random_tensor(_ROWS, 64, seed=rank) for rank in range(RANKS)]

    def work(backend: Backend[Any, Any], rank: int) -> list[Tensor]:
        def record(ops: GraphBuilder, x: Value) -> Value:
            return ops.all_reduce(ops.scale(x, 1.0))

        return [outputs(backend, record, {"x": parts[rank][:rows]})[0] for rows in (_ROWS, 1, 0)]

    found = on_ranks(subject, work)
    for own, others in zip(found[0], found[1], strict=True):
        ensure_same(own, others, "all_reduce of the other rank")
        ensure_close(own, sum(each[: len(own)] for each in parts), 1e-6, "all_reduce")  # type: ignore[arg-type]
    return f"{RANKS} ranks with the same bits, none, one and several rows"


def _all_gather(subject: Subject) -> str:
    subject.needs("all_gather", "all_gather_argmax", "linear_argmax")
    sizes, x = (33, 31), random_tensor(_ROWS, 96)
    x[4] = 0  # all outputs are equal there
    weight = random_tensor(sum(sizes), 96, seed=1) / 8

    def work(backend: Backend[Any, Any], rank: int) -> list[Tensor]:
        first = sum(sizes[:rank])
        rows = DenseWeight(weight[first : first + sizes[rank]])
        held = backend.prepare_linear([rows], None, subject.dense)

        def record(ops: GraphBuilder, x: Value) -> list[Value]:
            found = ops.linear_argmax(x, held, first)
            return [ops.all_gather(ops.linear(x, held), sizes), ops.all_gather_argmax(found)]

        return outputs(backend, record, {"x": x})

    found = on_ranks(subject, work)
    for own, others, what in zip(found[0], found[1], ("all_gather", "argmax"), strict=True):
        ensure_same(own.float(), others.float(), f"{what} of the other rank")
    logits, best = found[0]
    ensure_close(logits, x @ weight.t(), TOLERANCE[subject.dense], "all_gather")
    ensure(
        torch.equal(best[:, 0], logits.argmax(1)),
        "all_gather_argmax: another than the highest logit",
    )
    ensure(
        bool((best[:, 2] == 1).all()),
        "all_gather_argmax: logits that are finite are not said to be",
    )
    return f"shares of {' and '.join(map(str, sizes))} columns, equal logits"


def _own_rows(subject: Subject) -> str:
    subject.needs("gather_rows", "scatter_rows", "experts", "dispatched_experts")
    routing, first = ExpertRouting(4, 2, renormalize=True), (0, 1)
    x, logits = random_tensor(_ROWS, 64), random_tensor(_ROWS, 4, seed=1)

    def held(backend: Backend[Any, Any], own: range) -> Experts[Any]:
        def maps(outputs: int, inputs: int, seed: int) -> tuple[Any, ...]:
            weights = (random_tensor(outputs, inputs, seed=seed + it) / 8 for it in own)
            dense = (DenseWeight(weight.to(subject.dense)) for weight in weights)
            return tuple(backend.prepare_linear([it], None, subject.dense) for it in dense)

        counts = torch.zeros(4, dtype=torch.int64, device=backend.device)
        parts = maps(48, 64, 10), maps(48, 64, 20), maps(64, 48, 30)
        return Experts(routing, own.start, *parts, counts)

    def work(backend: Backend[Any, Any], rank: int) -> list[list[Tensor]]:
        experts = held(backend, range(first[rank], (*first, 4)[rank + 1]))

        def record(ops: GraphBuilder, x: Value, logits: Value) -> list[Value]:
            summed = own_rows.scatter_rows(ops, ops.scale(own_rows.gather_rows(ops, x), 1.0))
            return [summed, own_rows.dispatched_experts(ops, x, logits, experts, first)]

        found = []
        for split in (_ROWS // 2, _ROWS, 0):
            own = slice(0, split) if rank == 0 else slice(split, _ROWS)
            counts = torch.tensor([split, _ROWS - split])
            given = {"x": x[own], "logits": logits[own], "token_counts": counts}
            found.append(outputs(backend, record, given))
        return found

    one = subject.backend
    whole = held(one, range(4))
    (expected,) = outputs(
        one, lambda ops, x, logits: ops.experts(x, logits, whole), {"x": x, "logits": logits}
    )
    for ours, theirs in zip(*on_ranks(subject, work), strict=True):
        sums, given = (torch.cat(parts) for parts in zip(ours, theirs, strict=True))
        ensure_close(sums, RANKS * x, 1e-6, "scatter_rows of gather_rows")
        ensure_close(given, expected, TOLERANCE[subject.dense], "dispatched_experts")
    return "rows of both ranks, and of one alone"


_REDUCE, _GATHER = Check("all_reduce", _all_reduce), Check("all_gather, argmax", _all_gather)
_OWN = Check("gather_rows, scatter_rows, dispatched_experts", _own_rows)
EXPLICIT = {
    **{"all_reduce": _REDUCE, "all_gather": _GATHER, "all_gather_argmax": _GATHER},
    **dict.fromkeys(("gather_rows", "scatter_rows", "dispatched_experts"), _OWN),
}
"""Checks of operations of several ranks."""
FURTHER = (
    Check("parts of models", _parts),
    Check("results of graphs", _results),
    Check("traced steps", _traced),
)
