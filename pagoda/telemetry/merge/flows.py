"""One arrow for each request: through every process, queue and step that it went through."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pagoda.telemetry.merge.model import Process, Row, Span, Trace
from pagoda.telemetry.merge.steps import PlacedSpan, Step, steps_by_row, steps_of

_WAYPOINTS = frozenset({"queued", "waiting for KV", "preempted", "recovering"})
"""Phases of a request that no step shows."""


@dataclass(frozen=True)
class Point:
    """A point at which an arrow touches a row, within a span."""

    at: int
    pid: int
    tid: int


@dataclass(frozen=True)
class Flow:
    """The way of a request, in the order of time; at least two points."""

    request: str
    points: list[Point]


@dataclass(frozen=True)
class _Rows:
    """All rows of one request."""

    edges: list[tuple[Process, Row]]
    """Rows at frontends and routers."""
    engines: list[tuple[Process, Row]]


def flows_of(trace: Trace) -> Iterator[Flow]:
    """The flow of each request that has at least two points."""
    steps = steps_by_row(steps_of(trace))
    for request, rows in _rows_of_requests(trace).items():
        points = [point for process, row in rows.edges for point in _ends(process, row)]
        for process, row in rows.engines:
            points += _waypoints(process, row)
            for step in steps.get((process.pid, row.tid), ()):
                points += _points_of_step(step)
        points.sort(key=lambda point: point.at)
        if len(points) > 1:
            yield Flow(request, points)


def _rows_of_requests(trace: Trace) -> dict[str, _Rows]:
    found: dict[str, _Rows] = {}
    for process in trace.processes:
        for row in process.rows:
            if row.request is not None:
                rows = found.setdefault(row.request, _Rows([], []))
                is_engine = process.origin.storey == "engine"
                (rows.engines if is_engine else rows.edges).append((process, row))
    return found


def _ends(process: Process, row: Row) -> Iterator[Point]:
    """The points where a request comes in and where its last byte goes out."""
    for span in row.spans:
        if span.name == "request":
            yield from _point(process.pid, row.tid, span, span.start)
            yield from _point(process.pid, row.tid, span, span.end)


def _waypoints(process: Process, row: Row) -> Iterator[Point]:
    for span in row.spans:
        if span.name in _WAYPOINTS:
            yield from _point(process.pid, row.tid, span, span.start)


def _points_of_step(step: Step) -> Iterator[Point]:
    yield from _placed(step.place, step.place.span.start)
    for worker in step.workers:
        yield from _placed(worker, step.place.span.start)


def _placed(place: PlacedSpan, not_before: int) -> Iterator[Point]:
    return _point(place.pid, place.tid, place.span, max(place.span.start, not_before))


def _point(pid: int, tid: int, span: Span, at: int) -> Iterator[Point]:
    """Nothing can be bound to a span that took no time."""
    if span.end > span.start:
        yield Point(min(max(at, span.start), span.end - 1), pid, tid)
