# SPDX-License-Identifier: Apache-2.0
"""A report of a trace: where the time of requests and steps went."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pagoda.plugins.trace.merge.chrome import read_chrome_trace
from pagoda.plugins.trace.merge.merging import merge_fragments
from pagoda.plugins.trace.merge.model import Process, Trace
from pagoda.plugins.trace.merge.steps import Step, engines_of, steps_of
from pagoda.plugins.trace.report.data import Part, Percentiles, Report, RequestReport, percentiles
from pagoda.plugins.trace.report.intervals import Interval, covered
from pagoda.plugins.trace.report.requests import BEFORE, PARTS, request_reports
from pagoda.plugins.trace.report.steps import engine_report, step_times, worker_report, working

NUM_SLOWEST = 10


def load_trace(path: Path) -> Trace:
    """Reads a file of `pagoda trace merge`, or a directory of fragments.

    Raises ConfigError if there is no trace at `path`.
    """
    return merge_fragments([path]) if path.is_dir() else read_chrome_trace(path)


def report_of(trace: Trace) -> Report:
    steps = steps_of(trace)
    found = list(request_reports(trace, steps))
    requests = sorted((request for request, _ in found), key=lambda it: it.arrived)
    ended = [it for it in requests if not it.is_running]
    token_times = [time for _, times in found for time in times]
    engines = [it for it in trace.processes if it.header.kind == "engine"]
    workers = [it for it in trace.processes if it.header.kind == "worker"]
    busy = {worker.pid: working(worker) for worker in workers}

    def of_engine(engine: Process) -> dict[int, list[Interval]]:
        own = (worker for worker in workers if engine in engines_of(worker, engines))
        return {worker.pid: busy[worker.pid] for worker in own}

    reported = [worker_report(worker, engines_of(worker, engines)) for worker in workers]
    in_workers = [covered(busy[it.pid], *step) / 1e9 for it in workers for step in step_times(it)]
    return Report(
        seconds=trace.end / 1e9,
        began_ns=trace.began_ns,
        processes=tuple(process.name for process in trace.processes),
        requests=tuple(requests),
        parts=_parts(requests),
        percentiles=tuple(_percentiles(requests, token_times, steps, in_workers)),
        slowest=tuple(sorted(ended, key=lambda it: -it.end_to_end)[:NUM_SLOWEST]),
        engines=tuple(engine_report(it, steps[it.pid], of_engine(it)) for it in engines),
        workers=tuple(it for it in reported if it is not None),
        notes=trace.notes,
    )


def _parts(requests: Sequence[RequestReport]) -> tuple[Part, ...]:
    """Parts that no request has are left out."""
    took = {
        name: sum(part.seconds for it in requests for part in it.parts if part.name == name)
        for name in PARTS
    }
    total = sum(took.values())
    return tuple(Part(name, value, value / total) for name, value in took.items() if value)


def _has_left_queue(request: RequestReport) -> bool:
    """True if the request has left the queue and all of its wait was traced."""
    waits = request.is_running and all(it.name == "queued" for it in request.phases)
    return not waits and not request.took[BEFORE]


def _percentiles(
    requests: Sequence[RequestReport],
    token_times: Sequence[float],
    steps: Mapping[int, Sequence[Step]],
    in_workers: Sequence[float],
) -> Iterator[Percentiles]:
    in_engine = [it.place.span.ns / 1e9 for found in steps.values() for it in found if it.is_whole]
    for name, times in (
        ("time to first token", [it.first_token for it in requests if it.first_token is not None]),
        ("time per output token", [it.per_token for it in requests if it.per_token is not None]),
        ("between tokens", token_times),
        ("end to end", [it.end_to_end for it in requests if not it.is_running]),
        ("in the queue", [it.took["queued"] for it in requests if _has_left_queue(it)]),
        ("step, in the engine", in_engine),
        ("step, in the worker", in_workers),
    ):
        if times:
            yield percentiles(name, times)
