# SPDX-License-Identifier: Apache-2.0
"""One trace out of the fragments of all processes."""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pagoda.ipc.machine import format_bytes
from pagoda.plugins.trace.merge.chrome import write_chrome_trace
from pagoda.plugins.trace.merge.model import (
    ClockSource,
    Moment,
    Process,
    Row,
    Trace,
    TraceSpan,
    read_args,
)
from pagoda.plugins.trace.merge.reading import ClockEdge, Fragment, read_fragments
from pagoda.plugins.trace.merge.roles import in_order
from pagoda.plugins.trace.merge.steps import StepArgs
from pagoda.telemetry.fragments import ProcessHeader

_FIRST_TID = 1_000
"""Rows beside the main one count from here, so that none has the number of a process: that marks main rows."""
_MAIN_ROW = 0


FILE_NAME = "trace.json"


@dataclass(frozen=True)
class MergedFile:
    """One trace as a file for Perfetto."""

    path: Path
    trace: Trace
    num_requests: int
    """Requests that can be followed."""

    def __str__(self) -> str:
        num_processes, size = len(self.trace.processes), format_bytes(self.path.stat().st_size)
        return (
            f"{self.path}: {num_processes} processes, {self.num_requests:,} requests followed, "
            f"{self.trace.end / 1e9:.3f} s, {size}."
        )


def merge_into_file(
    directories: Sequence[Path], output: Path | None = None, *, run: str | None = None
) -> MergedFile:
    """Writes all that was traced into the directories, or that of one run, to `output`, which is `trace.json` in
    the first directory unless it is given.

    Raises ConfigError if there is nothing to merge, or the file cannot be written.
    """
    trace = merge_fragments(directories, run)
    path = output or directories[0] / FILE_NAME
    return MergedFile(path, trace, write_chrome_trace(trace, path))


def merge_fragments(directories: Iterable[Path], run: str | None = None) -> Trace:
    """All that was traced into the directories, or that of one run.

    Raises ConfigError if a path is not a directory or no directory has a fragment.
    """
    fragments, notes = read_fragments(directories, run)
    by_uid: defaultdict[str, list[Fragment]] = defaultdict(list)
    for fragment in sorted(fragments, key=lambda it: it.header.clock_ns):
        by_uid[fragment.header.uid].append(fragment)
    if not by_uid:
        return Trace([], 0, tuple(notes))
    edges = {uid: [edge for part in parts for edge in part.edges] for uid, parts in by_uid.items()}
    processes = in_order([parts[0].header for parts in by_uid.values()])
    shifts = find_shifts([it.header for it in processes], edges)
    main = processes[0].header
    zero_ns = min((at + shifts[uid].ns for uid, at in _beginnings(by_uid)), default=0)
    for process in processes:
        shift = shifts[process.header.uid]
        process.clock = shift.source
        if shift.source == "wall":
            notes.append(
                f"{process.name} is placed by the time of day: no measured clock leads to it."
            )
        num_cut = _fill(process, by_uid[process.header.uid], shift.ns - zero_ns)
        if num_cut:
            notes.append(f"{process.name}: {num_cut:,} spans went beyond the one around them; cut.")
    return Trace(processes, main.wall_ns - main.clock_ns + zero_ns, tuple(notes))


def _beginnings(by_uid: Mapping[str, Sequence[Fragment]]) -> Iterator[tuple[str, int]]:
    """The start of each span and the time of each event, with the process's uid, by its own clock."""
    for uid, parts in by_uid.items():
        for part in parts:
            yield from ((uid, span.start) for spans in part.spans.values() for span in spans)
            yield from ((uid, moment.at) for moment in (*part.instants, *part.counters))


def _fill(process: Process, parts: Sequence[Fragment], shift_ns: int) -> int:
    """Moves the events of all fragments of a process into it, by `shift_ns`; the fragments give their spans up.

    Returns the number of spans that had to be cut to nest.
    """
    process.header = parts[-1].header
    process.began = tuple(part.header.clock_ns + shift_ns for part in parts)
    names: dict[int, str] = {}
    merged: defaultdict[int, list[TraceSpan]] = defaultdict(list)

    def tid_of(row: int) -> int:
        return process.pid if row == _MAIN_ROW else _FIRST_TID + row

    def moved(moment: Moment) -> Moment:
        merged[moment.tid]  # a row of its own, also without spans
        return Moment(moment.at + shift_ns, moment.name, tid_of(moment.tid), moment.args)

    for part in parts:
        names |= part.rows
        process.descriptions |= part.descriptions
        process.instants += map(moved, part.instants)
        process.counters += map(moved, part.counters)
        for number, spans in part.spans.items():
            for span in spans:
                span.start += shift_ns
                span.end += shift_ns
                if span.name == "step" and number != _MAIN_ROW:
                    span.args = _with_rows(span.args, tid_of)
            merged[number] += spans
        part.spans.clear()
    names[_MAIN_ROW] = "main"
    merged[_MAIN_ROW]  # there also where nothing happened in it
    num_cut = sum(map(nest, merged.values()))
    rows = (
        Row(tid_of(number), names.get(number) or f"row {number}", spans)
        for number, spans in merged.items()
    )
    process.rows = sorted(rows, key=_row_order)
    return num_cut


def _with_rows(args: bytes, tid_of: Callable[[int], int]) -> bytes:
    """The arguments of an engine's step, with the numbers that the rows of its requests have in the trace."""
    step = read_args(args, StepArgs)
    if step is None:
        return args
    return msgspec.json.encode(
        {**msgspec.json.decode(args), "rows": [tid_of(row) for row in step.rows]}
    )


def _row_order(row: Row) -> tuple[bool, bool, str, int]:
    """The main row, then the steps, then requests as they came."""
    is_main = row.tid < _FIRST_TID
    is_steps = row.name.startswith("steps ")
    first = row.spans[0].start if row.spans else sys.maxsize
    return (not is_main, not is_steps, row.name if is_steps else "", first)


_Graph = Mapping[str, Mapping[str, ClockEdge]]
"""The best measurement between two clocks, both ways."""


@dataclass(frozen=True)
class Shift:
    """Nanoseconds to add to a process's own time to get the trace's."""

    ns: int
    source: ClockSource


def find_shifts(
    processes: Sequence[ProcessHeader], edges: Mapping[str, Iterable[ClockEdge]]
) -> dict[str, Shift]:
    """The shift of each process, by `uid`.

    The clock of the first process is the trace's. Measured offsets lead from there to other clocks, over as few
    measurements as possible; between two clocks the one with the shortest round trip counts. Processes with the
    same `clock_id` share a clock. A clock to which no measurement leads is placed by the time of day.
    """
    clocks = {process.uid: process.clock_id or process.uid for process in processes}
    graph = _graph(edges, clocks)
    main = processes[0]
    shifts: dict[str, Shift] = {}
    for process in processes:
        offset_ns = _ahead_of_wall(main) - _ahead_of_wall(process)
        first = Shift(0, "main") if process is main else Shift(offset_ns, "wall")
        reached: ClockSource = "measured" if process is main else "wall"
        queue = deque([(clocks[process.uid], first)])
        while queue:
            clock, shift = queue.popleft()
            if clock not in shifts:
                shifts[clock] = shift
                for peer, edge in graph.get(clock, {}).items():
                    queue.append((peer, Shift(shift.ns - edge.offset_ns, reached)))
    return {uid: shifts[clock] for uid, clock in clocks.items()}


def _ahead_of_wall(process: ProcessHeader) -> int:
    return process.clock_ns - process.wall_ns


def _graph(edges: Mapping[str, Iterable[ClockEdge]], clocks: Mapping[str, str]) -> _Graph:
    graph: defaultdict[str, dict[str, ClockEdge]] = defaultdict(dict)
    for uid, measured in edges.items():
        own = clocks[uid]
        for edge in measured:
            peer = clocks.get(edge.peer, edge.peer)
            best = graph[own].get(peer)
            if best is None or edge.round_trip_ns < best.round_trip_ns:
                graph[own][peer] = ClockEdge(peer, edge.offset_ns, edge.round_trip_ns)
                graph[peer][own] = ClockEdge(own, -edge.offset_ns, edge.round_trip_ns)
    return graph


_ROUNDING_NS = 1_000
"""Times are rounded on their way through a fragment, the more the longer a host has been up: of spans that
touched, one may begin so long before the other ends."""


def nest(spans: list[TraceSpan]) -> int:
    """Sorts the spans, outer ones first, and makes what touches touch again.

    A span that really goes beyond the one around it is cut; returns how many were.
    """
    spans.sort(key=lambda span: (span.start, -span.end))
    around: list[TraceSpan] = []
    num_cut = 0
    earliest = spans[0].start if spans else 0
    for span in spans:
        span.start = max(span.start, earliest)  # what is around it may have been moved
        span.end = max(span.end, span.start)
        _leave_ended(around, span)
        if around and span.end > around[-1].end:
            span.end = around[-1].end
            num_cut += 1
        around.append(span)
        earliest = span.start
    return num_cut


def _leave_ended(around: list[TraceSpan], span: TraceSpan) -> None:
    """Afterwards the last of `around` holds the beginning of the span."""
    while around:
        outer = around[-1]
        if span.end > outer.end and outer.end - span.start <= _ROUNDING_NS:
            span.start = max(span.start, outer.end)
        if outer.end > span.start:
            return
        around.pop()
