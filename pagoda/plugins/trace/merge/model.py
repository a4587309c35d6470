# SPDX-License-Identifier: Apache-2.0
"""A trace: all processes of all hosts, on one clock.

Times are whole nanoseconds, so that what touches still touches after any arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec

from pagoda.telemetry.fragments import ProcessHeader

T = TypeVar("T")

_PART = re.compile(r"(/prefill\d+)?(#\d+)?$")
"""Ends of ids that clients cannot choose, as neither sign is in theirs."""

ClockSource = Literal["main", "measured", "wall"]
"""The way in which the clock of a process was found: the trace's own clock; measured offsets; the time of day."""


class TraceSpan(msgspec.Struct, gc=False):
    """Something that took time. There are millions: not frozen, since their times are moved and cut in place."""

    start: int
    end: int
    name: str
    args: bytes
    """A JSON object, or nothing."""

    @property
    def interval(self) -> tuple[int, int]:
        return self.start, self.end

    @property
    def ns(self) -> int:
        return self.end - self.start


class Moment(msgspec.Struct, gc=False):
    """An instant, or what a counter is from then on."""

    at: int
    name: str
    tid: int
    args: bytes


@dataclass
class Row:
    """One line of the picture; its spans are in order and nest."""

    tid: int
    name: str
    spans: list[TraceSpan]

    @property
    def request(self) -> str | None:
        """The id of the request, which a prefill host, or one that has it twice, knows by an id made of it."""
        kind, _, request = self.name.partition(" ")
        return (_PART.sub("", request) or None) if kind == "request" else None

    @property
    def is_prefill(self) -> bool:
        """True if the row is the part of a request that a prefill host computes."""
        return "/prefill" in self.name

    def named(self, *names: str) -> list[TraceSpan]:
        """The spans of these names, in order."""
        return [span for span in self.spans if span.name in names]


@dataclass
class Process:
    pid: int
    """The number in the trace: small, in the order of the picture."""
    name: str
    header: ProcessHeader
    """The header of its last fragment."""
    parent: int | None = None
    """The `pid` of the process that started it."""
    clock: ClockSource = "main"
    descriptions: dict[str, Any] = field(default_factory=dict)
    """Things that events refer to, such as `forward_ops`."""
    began: tuple[int, ...] = ()
    """Each time at which tracing began in the process; below 0 where nothing happened at first."""
    rows: list[Row] = field(default_factory=list)
    instants: list[Moment] = field(default_factory=list)
    counters: list[Moment] = field(default_factory=list)

    @property
    def main(self) -> Row:
        """The row of the process's own work."""
        return next((row for row in self.rows if row.tid == self.pid), Row(self.pid, "main", []))

    def description(self, name: str, kind: type[T]) -> T | None:
        """A thing that the process has described, such as `forward_ops`; None if it has not."""
        try:
            return msgspec.convert(self.descriptions.get(name), kind)
        except msgspec.ValidationError:
            return None


@dataclass(frozen=True)
class Trace:
    """All of it. Time 0 is where the first event is."""

    processes: list[Process]
    began_ns: int
    """Time 0 in nanoseconds since 1970, by the clock of the main process's host."""
    notes: tuple[str, ...] = ()
    """Sentences about what was missing or could not be read."""

    @property
    def end(self) -> int:
        """The end of the last span, in nanoseconds. The last span of a row may lie within a longer one."""
        rows = (row for process in self.processes for row in process.rows)
        return max((span.end for row in rows for span in row.spans), default=0)


def arguments(args: bytes) -> Mapping[str, Any]:
    decoded: Mapping[str, Any] = msgspec.json.decode(args) if args else {}
    return decoded


def read_args(args: bytes, kind: type[T]) -> T | None:
    """The arguments of an event as a struct; None if there are none, or others."""
    try:
        return msgspec.json.decode(args, type=kind) if args else None
    except msgspec.DecodeError:
        return None
