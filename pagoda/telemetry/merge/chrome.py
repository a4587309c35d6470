"""A trace as Chrome's trace-event format has it, which Perfetto and `chrome://tracing` open.

Times are microseconds there. They are written with three decimals, so that no nanosecond is lost, and spans of a
row from the outer to the inner, so that a reader who goes by their order nests them alike.
"""

from __future__ import annotations

import gzip
import os
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import msgspec

from pagoda.errors import ConfigError
from pagoda.telemetry.fragments import ProcessHeader
from pagoda.telemetry.merge.model import ClockSource, Moment, Process, Row, Span, Trace, arguments
from pagoda.telemetry.merge.reading import RowName
from pagoda.telemetry.merge.steps import (
    PlacedSpan,
    operation_spans,
    operations_of,
    steps_by_row,
    steps_of,
)

_COMPRESSION = 5


def write_chrome_trace(trace: Trace, path: Path) -> int:
    """Writes the trace, compressed if the name ends in `.gz`; nothing half is left under that name.

    Returns the number of flows.

    Raises:
        ConfigError: the file cannot be written.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        with _open(part, compressed=path.suffix == ".gz") as file:
            num_flows = _write(trace, file.write)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ConfigError(
            f"--output: {path} cannot be written: {error.strerror or error}."
        ) from error
    return num_flows


def _open(path: Path, *, compressed: bool) -> TextIO:
    if compressed:
        return gzip.open(path, "wt", compresslevel=_COMPRESSION, encoding="utf-8")
    return open(path, "w", encoding="utf-8")


def _write(trace: Trace, write: Callable[[str], Any]) -> int:
    write('{"displayTimeUnit":"ms","otherData":' + _json(_other_data(trace)))
    write(',"traceEvents":[')
    separator = "\n"
    num_flows = 0
    for process in trace.processes:
        for event in _events_of(process):
            write(separator + event)
            separator = ",\n"
    for num_flows, flow in enumerate(_flows_of(trace), start=1):
        for event in _flow_events(flow, num_flows):
            write(separator + event)
            separator = ",\n"
    write("\n]}\n")
    return num_flows


def _other_data(trace: Trace) -> dict[str, Any]:
    began = datetime.fromtimestamp(trace.began_ns / 1e9, UTC)
    return {
        "producer": "pagoda trace merge",
        "began": began.isoformat(timespec="milliseconds"),
        "began_ns": trace.began_ns,
        "notes": trace.notes,
        "processes": {
            str(it.pid): {
                **msgspec.to_builtins(it.header),
                "parent": it.parent,
                "clock": it.clock,
                "descriptions": it.descriptions,
                "began": it.began,
            }
            for it in trace.processes
        },
    }


def _events_of(process: Process) -> Iterator[str]:
    yield from _names_of(process)
    category = _json(process.header.storey)
    operations = operations_of(process)
    for row in process.rows:
        place = f'"pid":{process.pid},"tid":{row.tid}'
        for index, span in enumerate(row.spans):
            if b'"ops_ns"' not in span.args or _has_inner(row, index):
                yield _span_event(span, place, category)
                continue
            bare = {name: it for name, it in arguments(span.args).items() if name != "ops_ns"}
            args = msgspec.json.encode(bare) if bare else b""
            yield _span_event(Span(span.start, span.end, span.name, args), place, category)
            for inner, kind in operation_spans(span, operations):
                yield _span_event(inner, place, _json(kind))
    for moment in process.instants:
        yield _moment_event("i", moment, process.pid, ',"s":"t"')
    for moment in process.counters:
        yield _moment_event("C", moment, process.pid, "")


def _has_inner(row: Row, index: int) -> bool:
    """True if the span has spans within it already."""
    span = row.spans[index]
    return index + 1 < len(row.spans) and row.spans[index + 1].start < span.end


def _names_of(process: Process) -> Iterator[str]:
    yield _name_event("process_name", process.pid, process.pid, {"name": process.name})
    yield _name_event("process_sort_index", process.pid, process.pid, {"sort_index": process.pid})
    for index, row in enumerate(process.rows):
        yield _name_event("thread_name", process.pid, row.tid, {"name": row.name})
        yield _name_event("thread_sort_index", process.pid, row.tid, {"sort_index": index})


def _name_event(name: str, pid: int, tid: int, args: dict[str, Any]) -> str:
    return f'{{"ph":"M","name":"{name}","pid":{pid},"tid":{tid},"args":{_json(args)}}}'


def _span_event(span: Span, place: str, category: str) -> str:
    args = f',"args":{span.args.decode()}' if span.args else ""
    return (
        f'{{"ph":"X","name":{_quoted(span.name)},"cat":{category},"ts":{_microseconds(span.start)},'
        f'"dur":{_microseconds(span.end - span.start)},{place}{args}}}'
    )


def _moment_event(phase: str, moment: Moment, pid: int, more: str) -> str:
    args = f',"args":{moment.args.decode()}' if moment.args else ""
    return (
        f'{{"ph":"{phase}","name":{_quoted(moment.name)},"ts":{_microseconds(moment.at)},'
        f'"pid":{pid},"tid":{moment.tid}{more}{args}}}'
    )


def _flow_events(points: Sequence[_Point], number: int) -> Iterator[str]:
    last = len(points) - 1
    for index, point in enumerate(points):
        phase = "s" if index == 0 else "f" if index == last else "t"
        yield (
            f'{{"ph":"{phase}","name":"request","cat":"request","id":{number},"bp":"e",'
            f'"ts":{_microseconds(point.at)},"pid":{point.pid},"tid":{point.tid}}}'
        )


def _microseconds(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"


@lru_cache(1024)
def _quoted(name: str) -> str:
    return _json(name)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


_WAYPOINTS = frozenset({"queued", "waiting for KV", "preempted", "recovering"})
"""Phases of a request that no step shows."""


class _Point(NamedTuple):
    """A point at which an arrow touches a row, within a span."""

    at: int
    pid: int
    tid: int


def _flows_of(trace: Trace) -> Iterator[list[_Point]]:
    """The way of each request that has at least two points, in the order of time."""
    steps = steps_by_row(steps_of(trace))
    found: defaultdict[str, list[_Point]] = defaultdict(list)
    for process in trace.processes:
        for row in process.rows:
            if row.request is not None:
                found[row.request] += _points_of(process, row)
                for step in steps.get((process.pid, row.tid), ()):
                    for place in (step.place, *step.workers):
                        found[row.request] += _placed(place, step.place.span.start)
    for points in found.values():
        points.sort(key=lambda point: point.at)
        if len(points) > 1:
            yield points


def _points_of(process: Process, row: Row) -> Iterator[_Point]:
    """Points of a row: in an engine, phases that no step shows; else the beginning and the end of the request."""
    is_engine = process.header.storey == "engine"
    for span in row.spans:
        if is_engine and span.name in _WAYPOINTS:
            yield from _point(process.pid, row.tid, span, span.start)
        elif not is_engine and span.name == "request":
            yield from _point(process.pid, row.tid, span, span.start)
            yield from _point(process.pid, row.tid, span, span.end)


def _placed(place: PlacedSpan, not_before: int) -> Iterator[_Point]:
    return _point(place.pid, place.tid, place.span, max(place.span.start, not_before))


def _point(pid: int, tid: int, span: Span, at: int) -> Iterator[_Point]:
    """Nothing can be bound to a span that took no time."""
    if span.end > span.start:
        yield _Point(min(max(at, span.start), span.end - 1), pid, tid)


_GZIP = b"\x1f\x8b"


class _Event(msgspec.Struct, gc=False):
    ph: str
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: int = 0
    tid: int = 0
    args: msgspec.Raw = msgspec.Raw()


class _ProcessData(msgspec.Struct):
    parent: int | None = None
    clock: ClockSource = "main"
    descriptions: dict[str, Any] = {}
    began: tuple[int, ...] = ()


class _OtherData(msgspec.Struct):
    processes: dict[int, msgspec.Raw]
    """The fields of `_ProcessData` and of a `ProcessHeader` together."""
    began_ns: int = 0
    notes: tuple[str, ...] = ()


class _Head(msgspec.Struct, rename="camel"):
    other_data: _OtherData
    trace_events: list[_Event]


def read_chrome_trace(path: Path) -> Trace:
    """The trace that `write_chrome_trace` wrote to `path`.

    Raises:
        ConfigError: the file cannot be read, or somebody else has written it.
    """
    try:
        with _open_any(path) as file:
            return _read(file)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be read: {reason}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError) as error:
        raise ConfigError(
            f"{path} is no trace that `pagoda trace merge` made ({error})."
        ) from error


def _open_any(path: Path) -> BufferedReader | gzip.GzipFile:
    with open(path, "rb") as file:
        is_packed = file.read(len(_GZIP)) == _GZIP
    return gzip.open(path) if is_packed else open(path, "rb")


def _read(file: BufferedReader | gzip.GzipFile) -> Trace:
    head = msgspec.json.decode(file.readline().rstrip() + b"]}", type=_Head).other_data
    processes = {}
    for pid, data in sorted(head.processes.items()):
        header = msgspec.json.decode(data, type=ProcessHeader)
        own = msgspec.json.decode(data, type=_ProcessData)
        processes[pid] = Process(pid, header.role, header, **msgspec.structs.asdict(own))
    rows: dict[tuple[int, int], Row] = {}
    for event in _events(file):
        _place(event, processes[event.pid], rows)
    return Trace(list(processes.values()), head.began_ns, head.notes)


def _events(file: Iterable[bytes]) -> Iterator[_Event]:
    decoder = msgspec.json.Decoder(_Event)
    for line in file:
        if line.startswith(b"]"):
            return
        yield decoder.decode(line.rstrip(b",\n"))


def _place(event: _Event, process: Process, rows: dict[tuple[int, int], Row]) -> None:
    args = bytes(event.args)
    at = round(event.ts * 1000)
    match event.ph:
        case "M" if event.name == "process_name":
            process.name = msgspec.json.decode(args, type=RowName).name
        case "M" if event.name == "thread_name":
            row = Row(event.tid, msgspec.json.decode(args, type=RowName).name, [])
            rows[event.pid, event.tid] = row
            process.rows.append(row)
        case "X":
            end = at + round(event.dur * 1000)
            span = Span(at, end, sys.intern(event.name), args)
            rows[event.pid, event.tid].spans.append(span)
        case "i":
            process.instants.append(Moment(at, event.name, event.tid, args))
        case "C":
            process.counters.append(Moment(at, event.name, event.tid, args))
