# SPDX-License-Identifier: Apache-2.0
"""Spans, instants and counters of one process, in Chrome's trace-event format.

Off, a span costs one call that gives 0 and one test of it:

    began = tracer.e2e()
    plan = scheduler.schedule()
    if began:
        tracer.span("schedule", began, {"tokens": 17})

There are three clocks, one for each level; each gives nanoseconds of the process's clock while tracing is on at
its level or above, else 0. Whoever holds a tracer may emit at any time; while it is off that goes nowhere.

Events are kept in memory, as JSON and 64 MiB at most, and written by a thread of their own a few times a second
(`pagoda.telemetry.fragments`), so that what a process loses when it is killed is what it did in its last moments.
What cannot be written ends tracing, never the process.
"""

from __future__ import annotations

import enum
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pagoda.telemetry.fragments import CLOSING_S, FragmentWriter, ProcessHeader

_log = logging.getLogger(__name__)

MAIN_ROW = 0
"""The row of what a process does by itself: one thing at a time."""

Args = Mapping[str, Any]
"""Arguments of an event; values are those of JSON."""


class TraceLevel(enum.IntEnum):
    """Levels of detail; each includes the levels before it."""

    E2E = 1
    """Requests and steps."""
    KERNEL = 2
    """Operations of each forward pass."""
    VERBOSE = 3
    """Each token on its way out."""


DEFAULT_DIRECTORY = Path("pagoda-trace")
LEVELS = {level.name.lower(): level for level in TraceLevel}


@dataclass(frozen=True)
class ProfileConfig:
    """The directory of traces, and the level of a trace from the start."""

    directory: Path = DEFAULT_DIRECTORY
    level: TraceLevel | None = None


class TraceSession(msgspec.Struct, frozen=True, kw_only=True):
    """One time of tracing, as all processes of a server are told of it."""

    level: TraceLevel
    directory: str
    """The directory of fragments on the host of each process."""
    run: str
    """Tells the fragments of this server from those of others in the directory."""
    parent_uid: str = ""
    """The process that started the one told (`ProcessHeader.uid`)."""


def _off() -> int:
    return 0


class Tracer:
    """One for each process, made at its start and handed to whoever has something to tell."""

    def __init__(self, role: str, *, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        """`role` is how rows of this process are headed: `frontend`, `engine dp0`, `worker dp0 tp1 pp0`.

        `clock_ns` gives nanoseconds of a clock that never goes back; other processes have other clocks
        (`clock_offset`).
        """
        self.role = role
        self.clock_ns = clock_ns
        self.process = ProcessHeader.of_this_process(role, clock_ns)
        self.e2e: Callable[[], int] = _off
        self.kernel: Callable[[], int] = _off
        self.verbose: Callable[[], int] = _off
        self.session: TraceSession | None = None
        """The running session; None while tracing is off."""
        self.problems: list[str] = []
        """Sentences about why tracing has ended by itself since its last start."""
        self._writer: FragmentWriter | None = None
        self._lock = threading.Lock()
        """Guards session, writer and problems: a writer that fails says so in a thread of its own."""
        self._rows: dict[int, str] = {MAIN_ROW: "main"}
        self._row_numbers = itertools.count(1)

    # ---- on and off

    def start(self, session: TraceSession) -> None:
        """Traces into a new fragment. What runs already goes on in the rows that it has. Does not wait for the
        fragment before it."""
        self.end()
        header = msgspec.structs.replace(
            self.process,
            parent_uid=session.parent_uid,
            run=session.run,
            level=session.level.name.lower(),
            clock_ns=self.clock_ns(),
            wall_ns=time.time_ns(),
        )
        writer = FragmentWriter(session.directory, header, self._fail)
        with self._lock:
            self.problems = []
            self._writer = writer
            self.session = session
        for row, name in list(self._rows.items()):  # threads may open others
            self._name_row(row, name)
        self.e2e = self.clock_ns
        self.kernel = self.clock_ns if session.level >= TraceLevel.KERNEL else _off
        self.verbose = self.clock_ns if session.level >= TraceLevel.VERBOSE else _off
        writer.start()

    def session_for_children(self, session: TraceSession) -> TraceSession:
        """The session as processes are told of it that this one has started."""
        return msgspec.structs.replace(session, parent_uid=self.process.uid)

    def stop(self, timeout_s: float = CLOSING_S) -> None:
        """Returns when all that was emitted is written, or so many seconds later. May be called twice."""
        self.end()(timeout_s)

    def end(self) -> Callable[[float], list[str]]:
        """Emits nothing more, and does not wait.

        The function returned does, for all that was emitted, at most so many seconds; any thread may call it. It
        returns why something is missing: sentences.
        """
        self._turn_off()
        writer = self._writer
        if writer is not None:
            writer.end()
        return partial(self._finish, writer)

    def _finish(self, writer: FragmentWriter | None, timeout_s: float) -> list[str]:
        if writer is not None:
            writer.close(timeout_s)
        with self._lock:
            if self._writer is writer:
                self._writer = None
            return self.problems

    def _turn_off(self) -> None:
        self.session = None
        self.e2e = self.kernel = self.verbose = _off

    def _fail(self, writer: FragmentWriter, reason: str) -> None:
        """Ends tracing, in any thread. Failures of an earlier fragment's writer are ignored."""
        with self._lock:
            if writer is not self._writer or self.problems:
                return
            self._turn_off()
            self.problems = [f"{self.role}: {reason}"]
        writer.drop()
        _log.warning("tracing has stopped: %s", reason)

    def _emit(self, event: dict[str, Any]) -> None:
        writer = self._writer
        if writer is not None:
            writer.append(event)

    # ---- rows

    def open_row(self, name: str) -> int:
        """A row of its own for something that goes on beside other things, until `close_row`."""
        row = next(self._row_numbers)
        self._rows[row] = name
        if self.session is not None:
            self._name_row(row, name)
        return row

    def close_row(self, row: int) -> None:
        self._rows.pop(row, None)

    def _name_row(self, row: int, name: str) -> None:
        self._emit({"ph": "M", "name": "thread_name", "tid": row, "args": {"name": name}})

    # ---- events

    def span(
        self,
        name: str,
        began: int,
        args: Args | None = None,
        *,
        row: int = MAIN_ROW,
        ended: int | None = None,
    ) -> None:
        """Emits a span from `began` to `ended` (now), both in nanoseconds of the clock; nothing if `began` is 0.

        Spans of a row nest: of two that overlap, one has the other within it.
        """
        if not began or self.session is None:
            return
        end = self.clock_ns() if ended is None else ended
        duration = max(0, end - began) / 1000
        event = {"ph": "X", "name": name, "ts": began / 1000, "dur": duration, "tid": row}
        if args:
            event["args"] = args
        self._emit(event)

    def instant(self, name: str, args: Args | None = None, *, row: int = MAIN_ROW) -> None:
        if self.session is None:
            return
        at = self.clock_ns() / 1000
        event: dict[str, Any] = {"ph": "i", "name": name, "ts": at, "tid": row, "s": "t"}
        if args:
            event["args"] = args
        self._emit(event)

    def counter(self, name: str, values: Mapping[str, float]) -> None:
        """Emits values that hold from now on; values of one name are drawn together."""
        if self.session is None:
            return
        at = self.clock_ns() / 1000
        self._emit({"ph": "C", "name": name, "ts": at, "tid": MAIN_ROW, "args": dict(values)})

    def describe(self, name: str, args: Args) -> None:
        """Says once what events of this fragment refer to, such as the operations of a forward pass."""
        if self.session is not None:
            self._emit({"ph": "M", "name": name, "tid": MAIN_ROW, "args": args})

    def clock_offset(self, peer: str, offset_ns: int, round_trip_ns: int) -> None:
        """Writes a measurement: the clock of the process `peer` (`ProcessHeader.uid`) is ahead of this one's by
        `offset_ns`, give or take half of `round_trip_ns`."""
        if self.session is not None:
            clock = {"peer": peer, "offset_ns": offset_ns, "round_trip_ns": round_trip_ns}
            self._emit({"clock": clock})
