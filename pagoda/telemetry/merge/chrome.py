"""A trace as Chrome's trace-event format has it, which Perfetto and `chrome://tracing` open.

Times are microseconds there. They are written with three decimals, so that no nanosecond is lost, and spans of a
row from the outer to the inner, so that a reader who goes by their order nests them alike.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO

import msgspec

from pagoda.errors import ConfigError
from pagoda.telemetry.merge.flows import Flow, flows_of
from pagoda.telemetry.merge.model import Moment, Process, Row, Span, Trace, arguments
from pagoda.telemetry.merge.operations import operation_spans, operations_of

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
    for num_flows, flow in enumerate(flows_of(trace), start=1):
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
            str(process.pid): {"parent": process.parent, **msgspec.to_builtins(process.origin)}
            for process in trace.processes
        },
    }


def _events_of(process: Process) -> Iterator[str]:
    yield from _names_of(process)
    category = _json(process.origin.storey)
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


def _flow_events(flow: Flow, number: int) -> Iterator[str]:
    last = len(flow.points) - 1
    for index, point in enumerate(flow.points):
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
