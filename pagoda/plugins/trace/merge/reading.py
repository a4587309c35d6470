# SPDX-License-Identifier: Apache-2.0
"""Fragments as they lie on disk, whatever has become of them: what can be understood of each.

A process that was killed leaves a file that ends in the middle of a line. Anything that is no event is left out
and counted; a file that does not say whose it is cannot be placed and is left out as a whole.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pagoda.errors import ConfigError
from pagoda.plugins.trace.merge.model import Moment, TraceSpan
from pagoda.telemetry.fragments import FRAGMENT_SUFFIX, ProcessHeader, run_prefix

_MAX_MICROSECONDS = 2.0**62 / 1000
"""146 years of a clock; more is no time."""

_Time = Annotated[float, Meta(ge=0, le=_MAX_MICROSECONDS)]
_Duration = Annotated[int, Meta(ge=0, le=2**62)]
_Tid = Annotated[int, Meta(ge=0, lt=2**31)]
_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class ClockEdge(msgspec.Struct, frozen=True):
    """A measured offset: the peer's clock is this many nanoseconds ahead."""

    peer: str
    offset_ns: Annotated[int, Meta(gt=-(2**62), lt=2**62)]
    round_trip_ns: _Duration


class _FragmentLine(msgspec.Struct, gc=False):
    fragment: ProcessHeader | None = None
    clock: ClockEdge | None = None
    ph: Literal["X", "i", "C", "M", ""] = ""
    name: str = ""
    ts: _Time = 0.0
    dur: _Time = 0.0
    tid: _Tid = 0
    args: msgspec.Raw = msgspec.Raw()


class RowName(msgspec.Struct):
    name: str


@dataclass
class Fragment:
    """The readable events of one file. Times are nanoseconds of the process's own clock."""

    path: Path
    header: ProcessHeader
    rows: dict[int, str] = field(default_factory=dict)
    spans: defaultdict[int, list[TraceSpan]] = field(default_factory=lambda: defaultdict(list))
    instants: list[Moment] = field(default_factory=list)
    counters: list[Moment] = field(default_factory=list)
    descriptions: dict[str, Any] = field(default_factory=dict)
    edges: list[ClockEdge] = field(default_factory=list)
    num_bytes: int = 0


def read_fragments(
    directories: Iterable[Path], run: str | None = None
) -> tuple[list[Fragment], list[str]]:
    """All fragments in the directories, or those of one run, and sentences about what could not be read.

    A fragment that was gathered twice counts once, in its longer form.

    Raises ConfigError if a path is not a directory or no directory has a fragment.
    """
    notes: list[str] = []
    found: dict[tuple[str, int], Fragment] = {}
    for path in _fragment_paths(directories, "" if run is None else run_prefix(run)):
        try:
            fragment = _read(path, notes)
        except OSError as error:
            notes.append(f"{path.name} was left out: {error.strerror or error}.")
            continue
        if fragment is None:
            continue
        key = (fragment.header.uid, fragment.header.clock_ns)
        twin = found.get(key)
        if twin is not None:
            notes.append(f"{path.name} is there twice; the longer one counts.")
        if twin is None or twin.num_bytes < fragment.num_bytes:
            found[key] = fragment
    return list(found.values()), notes


def _fragment_paths(directories: Iterable[Path], prefix: str) -> list[Path]:
    names = list(directories)
    paths: list[Path] = []
    for directory in names:
        if not directory.is_dir():
            raise ConfigError(
                f"{directory} is no directory; name one that fragments were traced to."
            )
        paths += sorted(directory.glob(f"{prefix}*{FRAGMENT_SUFFIX}"))
    if not paths:
        where = " and ".join(map(str, names))
        raise ConfigError(f"{where} holds no fragments of a trace (*{FRAGMENT_SUFFIX}).")
    return paths


def _read(path: Path, notes: list[str]) -> Fragment | None:
    decoder = msgspec.json.Decoder(_FragmentLine)
    with open(path, "rb") as file:
        header = _header(decoder, file.readline())
        if header is None:
            notes.append(
                f"{path.name} was left out: its first line does not say which process it is of."
            )
            return None
        fragment = Fragment(path, header)
        bad: list[int] = []
        number = 1
        for number, line in enumerate(file, start=2):
            if not _add_line(fragment, decoder, line):
                bad.append(number)
        fragment.num_bytes = file.tell()
    if bad:
        notes.append(f"{path.name}: {_describe_bad(bad, number)}")
    return fragment


def _header(decoder: msgspec.json.Decoder[_FragmentLine], line: bytes) -> ProcessHeader | None:
    try:
        header = decoder.decode(line.decode()).fragment
    except _DECODE_ERRORS:
        return None
    if header is None or min(header.clock_ns, header.wall_ns) <= 0:
        return None
    return header


def _describe_bad(bad: Sequence[int], num_lines: int) -> str:
    if bad == [num_lines]:
        return "its last line is cut off; the process was killed, or still runs."
    which = f"line {bad[0]}" if len(bad) == 1 else f"{len(bad):,} lines, the first is {bad[0]},"
    return f"{which} cannot be read and was left out."


def _add_line(
    fragment: Fragment, decoder: msgspec.json.Decoder[_FragmentLine], line: bytes
) -> bool:
    """Adds the event of a line; False if the line cannot be understood."""
    try:
        return _add_event(fragment, decoder.decode(line.decode()))
    except _DECODE_ERRORS:
        return False


def _add_event(fragment: Fragment, line: _FragmentLine) -> bool:
    if line.clock is not None:
        fragment.edges.append(line.clock)
        return True
    args = bytes(line.args)
    name = sys.intern(line.name)
    if not line.ph or not name or (args and not isinstance(msgspec.json.decode(args), dict)):
        return False
    at = round(line.ts * 1000)
    match line.ph:
        case "X":
            span = TraceSpan(at, at + round(line.dur * 1000), name, args)
            fragment.spans[line.tid].append(span)
        case "i":
            fragment.instants.append(Moment(at, name, line.tid, args))
        case "C":
            msgspec.json.decode(args, type=dict[str, float])
            fragment.counters.append(Moment(at, name, line.tid, args))
        case "M" if name == "thread_name":
            fragment.rows[line.tid] = msgspec.json.decode(args, type=RowName).name
        case "M":
            fragment.descriptions[name] = msgspec.json.decode(args)
    return True
