"""A trace back from the file that it was written to."""

from __future__ import annotations

import gzip
import sys
import zlib
from collections import defaultdict
from pathlib import Path

import msgspec

from pagoda.errors import ConfigError
from pagoda.telemetry.merge.model import Moment, Origin, Process, Row, Span, Trace


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


class _File(msgspec.Struct, rename="camel"):
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
        data = path.read_bytes()
        file = msgspec.json.decode(gzip.decompress(data) if _is_gzip(data) else data, type=_File)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be read: {reason}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is no trace that `pagoda trace merge` made ({error})."
        ) from error
    events: defaultdict[int, list[_Event]] = defaultdict(list)
    for event in file.trace_events:
        events[event.pid].append(event)
    told = file.other_data
    processes = [_process(pid, told.processes[pid], events[pid]) for pid in sorted(told.processes)]
    return Trace(processes, told.began_ns, told.notes)


def _is_gzip(data: bytes) -> bool:
    return data.startswith(b"\x1f\x8b")


def _process(pid: int, origin: _Origin, events: list[_Event]) -> Process:
    process = Process(pid, origin.role, origin, origin.parent)
    rows: dict[int, Row] = {}
    for event in events:
        args = bytes(event.args)
        at = round(event.ts * 1000)
        match event.ph:
            case "M" if event.name == "process_name":
                process.name = msgspec.json.decode(args, type=_Named).name
            case "M" if event.name == "thread_name":
                name = msgspec.json.decode(args, type=_Named).name
                rows[event.tid] = Row(event.tid, name, [])
            case "X" if event.tid in rows:
                end = at + round(event.dur * 1000)
                rows[event.tid].spans.append(Span(at, end, sys.intern(event.name), args))
            case "i":
                process.instants.append(Moment(at, event.name, event.tid, args))
            case "C":
                process.counters.append(Moment(at, event.name, event.tid, args))
    process.rows = list(rows.values())
    return process
