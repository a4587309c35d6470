# SPDX-License-Identifier: Apache-2.0
"""A trace as Chrome's trace-event format has it, which Perfetto and `chrome://tracing` open.

Times are microseconds there. They are written with three decimals, so that no nanosecond is lost. An outer span
comes before the spans within it, so that a reader who goes by their order nests them alike.
"""

from __future__ import annotations

import gzip
import os
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pagoda.errors import ConfigError
from pagoda.plugins.trace.merge.model import (
    ClockSource,
    Moment,
    Process,
    Row,
    Trace,
    TraceSpan,
    arguments,
)
from pagoda.plugins.trace.merge.reading import RowName
from pagoda.plugins.trace.merge.steps import (
    operation_spans,
    operations_of,
    steps_by_row,
    steps_of,
)
from pagoda.telemetry.fragments import ProcessHeader

_COMPRESSION = 5
_NOTHING = msgspec.Raw()


class _Event(msgspec.Struct, omit_defaults=True, gc=False):
    """An event in the file, one a line; which fields there are depends on the phase `ph`."""

    ph: str
    pid: int
    tid: int = 0
    name: str = ""
    cat: str = ""
    ts: msgspec.Raw = _NOTHING
    dur: msgspec.Raw = _NOTHING
    args: msgspec.Raw = _NOTHING
    s: str = ""
    """The scope of an instant."""
    id: int = 0
    """The number of a flow."""
    bp: str = ""
    """The binding point of a flow."""


def _microseconds(ns: int) -> msgspec.Raw:
    return msgspec.Raw(b"%d.%03d" % divmod(ns, 1000))


def _nanoseconds(microseconds: msgspec.Raw) -> int:
    """Raises ValueError if `_microseconds` did not write the time."""
    return int(bytes(microseconds).replace(b".", b""))


def write_chrome_trace(trace: Trace, path: Path) -> int:
    """Writes the trace, compressed if the name ends in `.gz`; nothing half is left under that name.

    Returns the number of flows.

    Raises ConfigError if the file cannot be written.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        with (
            gzip.open(part, "wb", _COMPRESSION)
            if path.suffix == ".gz"
            else open(part, "wb") as file
        ):
            num_flows = _write(trace, file.write)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ConfigError(f"--output: cannot write {path}: {error.strerror or error}.") from error
    return num_flows


def _write(trace: Trace, write: Callable[[bytes], Any]) -> int:
    encode = msgspec.json.Encoder().encode
    write(b'{"displayTimeUnit":"ms","otherData":' + encode(_other_data(trace)))
    write(b',"traceEvents":[')
    flows = list(_flows_of(trace))
    separator = b"\n"
    for event in chain(
        *map(_events_of, trace.processes),
        *(_flow_events(flow, number) for number, flow in enumerate(flows, start=1)),
    ):
        write(separator + encode(event))
        separator = b",\n"
    write(b"\n]}\n")
    return len(flows)


class _ProcessData(ProcessHeader, frozen=True, kw_only=True):
    parent: int | None = None
    clock: ClockSource = "main"
    descriptions: dict[str, Any] = msgspec.field(default_factory=dict)
    began: tuple[int, ...] = ()


class _OtherData(msgspec.Struct):
    """The part of a file before its events."""

    processes: dict[int, _ProcessData]
    began_ns: int = 0
    notes: tuple[str, ...] = ()
    began: str = ""
    producer: str = "pagoda trace merge"


def _other_data(trace: Trace) -> _OtherData:
    processes = {
        it.pid: _ProcessData(
            **msgspec.structs.asdict(it.header),
            parent=it.parent,
            clock=it.clock,
            descriptions=it.descriptions,
            began=it.began,
        )
        for it in trace.processes
    }
    try:
        since = datetime.fromtimestamp(trace.began_ns / 1e9, UTC)
        began = since.isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):  # a clock that shows no year of ours
        began = ""
    return _OtherData(processes, trace.began_ns, trace.notes, began)


def _events_of(process: Process) -> Iterator[_Event]:
    pid = process.pid

    def describe(what: str, tid: int, **args: object) -> _Event:
        return _Event("M", pid, tid, what, args=msgspec.Raw(msgspec.json.encode(args)))

    def span(it: TraceSpan, tid: int, category: str, args: bytes) -> _Event:
        start, duration = _microseconds(it.start), _microseconds(it.end - it.start)
        said = msgspec.Raw(args) if args else _NOTHING
        return _Event("X", pid, tid, it.name, category, start, duration, said)

    yield describe("process_name", pid, name=process.name)
    yield describe("process_sort_index", pid, sort_index=pid)
    for index, row in enumerate(process.rows):
        yield describe("thread_name", row.tid, name=row.name)
        yield describe("thread_sort_index", row.tid, sort_index=index)
    category = process.header.kind
    operations = operations_of(process)
    for row in process.rows:
        for index, it in enumerate(row.spans):
            if b'"ops_ns"' not in it.args or _has_inner(row, index):
                yield span(it, row.tid, category, it.args)
                continue
            bare = {name: value for name, value in arguments(it.args).items() if name != "ops_ns"}
            yield span(it, row.tid, category, msgspec.json.encode(bare) if bare else b"")
            for inner, kind in operation_spans(it, operations):
                yield span(inner, row.tid, kind, b"")
    for phase, scope, moments in (("i", "t", process.instants), ("C", "", process.counters)):
        for moment in moments:
            at = _microseconds(moment.at)
            args = msgspec.Raw(moment.args) if moment.args else _NOTHING
            yield _Event(phase, pid, moment.tid, moment.name, ts=at, args=args, s=scope)


def _has_inner(row: Row, index: int) -> bool:
    """True if the span has spans within it already."""
    span = row.spans[index]
    return index + 1 < len(row.spans) and row.spans[index + 1].start < span.end


def _flow_events(points: Sequence[_Point], number: int) -> Iterator[_Event]:
    last = len(points) - 1
    for index, point in enumerate(points):
        phase = "s" if index == 0 else "f" if index == last else "t"
        at = _microseconds(point.at)
        yield _Event(phase, point.pid, point.tid, "request", "request", at, id=number, bp="e")


_WAYPOINTS = frozenset({"queued", "waiting for KV", "preempted", "recovering"})
"""Phases of a request that no step shows."""


class _Point(NamedTuple):
    """A point at which an arrow touches a row, within a span."""

    at: int
    pid: int
    tid: int


def _flows_of(trace: Trace) -> Iterator[list[_Point]]:
    """The way of each request that has at least two points, in the order of time.

    In an engine, these are its steps, and phases that no step shows; elsewhere the beginning and the end.
    """
    steps = steps_by_row(steps_of(trace))
    found: defaultdict[str, list[_Point]] = defaultdict(list)

    def add(request: str, pid: int, tid: int, span: TraceSpan, at: int) -> None:
        if span.end > span.start:  # nothing can be bound to a span that took no time
            found[request].append(_Point(min(max(at, span.start), span.end - 1), pid, tid))

    for process in trace.processes:
        is_engine = process.header.kind == "engine"
        for row in process.rows:
            if row.request is None:
                continue
            for span in row.named(*(_WAYPOINTS if is_engine else ("request",))):
                for at in (span.start,) if is_engine else (span.start, span.end):
                    add(row.request, process.pid, row.tid, span, at)
            for step in steps.get((process.pid, row.tid), ()):
                for place in (step.place, *step.workers):
                    add(row.request, place.pid, place.tid, place.span, step.place.span.start)
    for points in found.values():
        points.sort(key=lambda point: point.at)
        if len(points) > 1:
            yield points


_GZIP = b"\x1f\x8b"


class _Head(msgspec.Struct, rename="camel"):
    other_data: _OtherData
    trace_events: list[_Event]


def read_chrome_trace(path: Path) -> Trace:
    """The trace that `write_chrome_trace` wrote to `path`.

    Raises ConfigError if the file cannot be read or `pagoda trace` did not write it.
    """
    try:
        with open(path, "rb") as file:
            is_packed = file.peek(len(_GZIP)).startswith(_GZIP)
            return _read(gzip.GzipFile(fileobj=file) if is_packed else file)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be read: {reason}.") from error
    except (msgspec.DecodeError, ValueError, RecursionError, KeyError) as error:
        raise ConfigError(
            f"{path} is no trace that `pagoda trace merge` made ({error})."
        ) from error


def _read(file: BufferedReader | gzip.GzipFile) -> Trace:
    head = msgspec.json.decode(file.readline().rstrip() + b"]}", type=_Head).other_data
    processes = {
        pid: Process(pid, it.role, it, it.parent, it.clock, it.descriptions, it.began)
        for pid, it in sorted(head.processes.items())
    }
    rows: dict[tuple[int, int], Row] = {}
    decode = msgspec.json.Decoder(_Event).decode
    for line in iter(file.readline, b"]}\n"):
        event = decode(line.rstrip(b",\n"))
        _add_event(event, processes[event.pid], rows)
    if file.read(1):  # at its end a compressed file is checked against its sum
        raise ValueError("more follows its end")
    return Trace(list(processes.values()), head.began_ns, head.notes)


def _add_event(event: _Event, process: Process, rows: dict[tuple[int, int], Row]) -> None:
    args = bytes(event.args)
    at = _nanoseconds(event.ts) if event.ts else 0
    match event.ph:
        case "M" if event.name == "process_name":
            process.name = msgspec.json.decode(args, type=RowName).name
        case "M" if event.name == "thread_name":
            row = Row(event.tid, msgspec.json.decode(args, type=RowName).name, [])
            rows[event.pid, event.tid] = row
            process.rows.append(row)
        case "X":
            end = at + _nanoseconds(event.dur)
            span = TraceSpan(at, end, sys.intern(event.name), args)
            rows[event.pid, event.tid].spans.append(span)
        case "i":
            process.instants.append(Moment(at, event.name, event.tid, args))
        case "C":
            process.counters.append(Moment(at, event.name, event.tid, args))
