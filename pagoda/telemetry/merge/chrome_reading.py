"""A trace back from the file that it was written to, which has an event in each line."""

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Iterable, Iterator
from io import BufferedReader
from pathlib import Path

import msgspec

from pagoda.errors import ConfigError
from pagoda.telemetry.merge.model import Moment, Origin, Process, Row, Span, Trace

_GZIP = b"\x1f\x8b"


class _Event(msgspec.Struct, gc=False):
    ph: str
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: int = 0
    tid: int = 0
    args: msgspec.Raw = msgspec.Raw()


class _Origin(Origin, frozen=True, kw_only=True):
    parent: int | None = None


class _OtherData(msgspec.Struct):
    processes: dict[int, _Origin]
    began_ns: int = 0
    notes: tuple[str, ...] = ()


class _Head(msgspec.Struct, rename="camel"):
    other_data: _OtherData
    trace_events: list[_Event]


class _Named(msgspec.Struct):
    name: str


def read_chrome_trace(path: Path) -> Trace:
    """The trace that `write_chrome_trace` wrote to `path`.

    Raises:
        ConfigError: the file cannot be read, or somebody else has written it.
    """
    try:
        with _open(path) as file:
            return _read(file)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be read: {reason}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError) as error:
        raise ConfigError(
            f"{path} is no trace that `pagoda trace merge` made ({error})."
        ) from error


def _open(path: Path) -> BufferedReader | gzip.GzipFile:
    with open(path, "rb") as file:
        is_packed = file.read(len(_GZIP)) == _GZIP
    return gzip.open(path) if is_packed else open(path, "rb")


def _read(file: BufferedReader | gzip.GzipFile) -> Trace:
    head = msgspec.json.decode(file.readline().rstrip() + b"]}", type=_Head).other_data
    processes = {
        pid: Process(pid, origin.role, origin, origin.parent)
        for pid, origin in sorted(head.processes.items())
    }
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
            process.name = msgspec.json.decode(args, type=_Named).name
        case "M" if event.name == "thread_name":
            row = Row(event.tid, msgspec.json.decode(args, type=_Named).name, [])
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
