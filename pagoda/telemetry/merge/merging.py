"""One trace out of the fragments of all processes."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pagoda.telemetry.merge.clocks import Shift, find_shifts
from pagoda.telemetry.merge.model import Moment, Origin, Process, Row, Span, Trace, read_args
from pagoda.telemetry.merge.nesting import nest
from pagoda.telemetry.merge.reading import Fragment, read_fragments
from pagoda.telemetry.merge.roles import Named, in_order
from pagoda.telemetry.merge.steps import StepArgs

_FIRST_TID = 1_000
"""Rows beside the main one count from here, so that none has the number of a process: that marks main rows."""
_MAIN_ROW = 0
"""The main row's number in a fragment."""


def merge_fragments(directories: Iterable[Path]) -> Trace:
    """All that was traced into the directories.

    Raises:
        ConfigError: a directory is none, or there is no fragment in any.
    """
    fragments, notes = read_fragments(directories)
    by_uid: defaultdict[str, list[Fragment]] = defaultdict(list)
    for fragment in sorted(fragments, key=lambda it: it.header.clock_ns):
        by_uid[fragment.header.uid].append(fragment)
    if not by_uid:
        return Trace([], 0, tuple(notes))
    edges = {uid: [edge for part in parts for edge in part.edges] for uid, parts in by_uid.items()}
    named = in_order([parts[0].header for parts in by_uid.values()], edges)
    shifts = find_shifts([it.header for it in named], edges)
    zero_ns = min((at + shifts[uid].ns for uid, at in _beginnings(by_uid)), default=0)
    pids = {it.header.uid: pid for pid, it in enumerate(named, start=1)}
    processes = []
    for it in named:
        shift = shifts[it.header.uid]
        if shift.source == "wall":
            notes.append(f"{it.name} is placed by the time of day: no measured clock leads to it.")
        one = _Process(it, pids, Shift(shift.ns - zero_ns, shift.source), by_uid[it.header.uid])
        process, num_cut = one.merged()
        if num_cut:
            notes.append(f"{it.name}: {num_cut:,} spans went beyond the one around them; cut.")
        processes.append(process)
    main = named[0].header
    return Trace(processes, main.wall_ns - main.clock_ns + zero_ns, tuple(notes))


def _beginnings(by_uid: Mapping[str, Sequence[Fragment]]) -> Iterator[tuple[str, int]]:
    """The start of each span and the time of each event, with the process's uid, by its own clock."""
    for uid, parts in by_uid.items():
        for part in parts:
            yield from ((uid, span.start) for spans in part.spans.values() for span in spans)
            yield from ((uid, moment.at) for moment in (*part.instants, *part.counters))


@dataclass(frozen=True)
class _Process:
    """All fragments of one process, which may have been traced several times."""

    named: Named
    pids: dict[str, int]
    shift: Shift
    parts: Sequence[Fragment]

    @property
    def _pid(self) -> int:
        return self.pids[self.named.header.uid]

    def merged(self) -> tuple[Process, int]:
        """The process, and how many of its spans had to be cut to nest."""
        parent = self.named.parent
        process = Process(
            self._pid,
            self.named.name,
            self._origin(),
            None if parent is None else self.pids[parent],
        )
        names = {tid: name for part in self.parts for tid, name in part.rows.items()}
        num_cut = 0
        rows = {_MAIN_ROW: Row(self._pid, "main", [])}
        for tid, spans in self._spans().items():
            num_cut += nest(spans)
            rows[tid] = Row(self._tid(tid), names.get(tid) or f"row {tid}", spans)
        for part in self.parts:
            process.instants += map(self._moved, part.instants)
            process.counters += map(self._moved, part.counters)
            for moment in (*part.instants, *part.counters):
                tid = moment.tid
                rows.setdefault(tid, Row(self._tid(tid), names.get(tid) or f"row {tid}", []))
        process.rows = sorted(rows.values(), key=_row_order)
        return process, num_cut

    def _origin(self) -> Origin:
        header = self.parts[-1].header
        descriptions = {name: it for part in self.parts for name, it in part.descriptions.items()}
        return Origin(
            role=header.role,
            uid=header.uid,
            pid=header.pid,
            host=header.host,
            run=header.run,
            level=header.level,
            clock=self.shift.source,
            descriptions=descriptions,
            began=tuple(part.header.clock_ns + self.shift.ns for part in self.parts),
        )

    def _spans(self) -> dict[int, list[Span]]:
        """Spans by the number of their row in the fragments. The fragments give their spans up."""
        shift = self.shift.ns
        merged: defaultdict[int, list[Span]] = defaultdict(list)
        for part in self.parts:
            for tid, spans in part.spans.items():
                for span in spans:
                    span.start += shift
                    span.end += shift
                    if span.name == "step" and tid != _MAIN_ROW:
                        span.args = self._with_rows(span.args)
                merged[tid] += spans
            part.spans.clear()
        return merged

    def _with_rows(self, args: bytes) -> bytes:
        """The arguments of an engine's step, with the numbers that the rows of its requests have in the trace."""
        step = read_args(args, StepArgs)
        if step is None:
            return args
        told = {**msgspec.json.decode(args), "rows": [self._tid(row) for row in step.rows]}
        return msgspec.json.encode(told)

    def _moved(self, moment: Moment) -> Moment:
        tid = self._tid(moment.tid)
        return Moment(moment.at + self.shift.ns, moment.name, tid, moment.args)

    def _tid(self, row: int) -> int:
        return self._pid if row == _MAIN_ROW else _FIRST_TID + row


def _row_order(row: Row) -> tuple[bool, bool, str, int]:
    """The main row, then the steps, then requests as they came."""
    is_main = row.tid < _FIRST_TID
    is_steps = row.name.startswith("steps ")
    first = row.spans[0].start if row.spans else sys.maxsize
    return (not is_main, not is_steps, row.name if is_steps else "", first)
