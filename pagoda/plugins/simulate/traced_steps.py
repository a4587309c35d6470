# SPDX-License-Identifier: Apache-2.0
"""Steps of a server as its trace shows them: what was in each, and how long its worker computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from pagoda.plugins.simulate.step_times import StepSample
from pagoda.plugins.trace.merge.model import Process, read_args
from pagoda.plugins.trace.merge.steps import Step, steps_of
from pagoda.plugins.trace.report.reporting import load_trace


class _Batch(msgspec.Struct, frozen=True):
    """A worker's description of a step."""

    tokens: int
    seqs: int
    context_tokens: int
    """Tokens of all requests behind the step."""


class _Request(msgspec.Struct, frozen=True):
    """An engine's description of a request."""

    cached_tokens: int


def traced_samples(path: Path) -> list[StepSample]:
    """The steps of all engines in a file of `pagoda trace merge` or a directory of fragments. Of several workers
    the slowest counts. Steps with prompts of which the trace lacks the beginning are left out.

    Raises ConfigError: there is no trace.
    """
    trace = load_trace(path)
    steps = steps_of(trace)
    engines = [it for it in trace.processes if it.pid in steps]
    return [sample for it in engines for sample in _samples(it, steps[it.pid])]


def _samples(engine: Process, steps: list[Step]) -> Iterator[StepSample]:
    contexts = _cached_tokens(engine)
    for step in steps:
        rows = list(zip(step.args.rows, step.args.tokens, strict=False))
        in_front = [contexts.get(row, 0) for row, _ in rows]
        contexts |= {row: front + count for (row, count), front in zip(rows, in_front, strict=True)}
        spans = [placed.span for placed in step.workers]
        batches = [read_args(span.args, _Batch) for span in spans]
        batch = next(iter(batches), None)
        if not step.is_whole or batch is None or not max(span.ns for span in spans):
            continue
        context_tokens = batch.context_tokens - batch.tokens
        has_prompts = batch.tokens > batch.seqs
        if has_prompts and (len(rows) < batch.seqs or sum(in_front) != context_tokens):
            continue
        chunks = zip(rows, in_front, strict=True)
        yield StepSample(
            num_tokens=batch.tokens,
            num_seqs=batch.seqs,
            num_requests=sum(n > 1 for _, n in rows),
            context_tokens=context_tokens,
            pairs=sum(n * (front + n / 2) for (_, n), front in chunks if n > 1),
            time_s=max(span.ns for span in spans) / 1e9,
        )


def _cached_tokens(engine: Process) -> dict[int, int]:
    """Tokens of requests, by row, that were there before their first step."""
    found = {}
    for row in engine.rows:
        for span in row.named("request"):
            args = read_args(span.args, _Request)
            if args is not None:
                found[row.tid] = args.cached_tokens
    return found
