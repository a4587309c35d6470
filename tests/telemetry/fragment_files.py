# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pagoda.telemetry.fragments import FRAGMENT_SUFFIX, ProcessHeader

_EPSILON_US = 0.01
"""Microseconds since the machine started are rounded."""


@dataclass(frozen=True)
class Fragment:
    header: ProcessHeader
    events: list[dict[str, Any]]
    clocks: list[dict[str, Any]]
    is_cut: bool
    """True if the last line has no end."""

    @property
    def rows(self) -> dict[int, str]:
        return {e["tid"]: e["args"]["name"] for e in self.events if e["name"] == "thread_name"}

    def named(self, name: str) -> list[dict[str, Any]]:
        """All events of this name but descriptions, in order of time."""
        return sorted(
            (e for e in self.events if e["name"] == name and e["ph"] != "M"), key=lambda e: e["ts"]
        )

    def request(self, request_id: str) -> list[dict[str, Any]]:
        """The spans in the row of a request, as they were written: that of all of it comes last."""
        (row,) = [tid for tid, name in self.rows.items() if name == f"request {request_id}"]
        return [e for e in self.events if e["ph"] == "X" and e["tid"] == row]

    def spans(self) -> dict[int, list[dict[str, Any]]]:
        """The spans of each row, in order; of spans that begin together, the longest first."""
        by_row = defaultdict(list)
        for event in self.events:
            if event["ph"] == "X":
                by_row[event["tid"]].append(event)
        for spans in by_row.values():
            spans.sort(key=lambda e: (e["ts"], -e["dur"]))
        return by_row


def read_fragment(path: Path) -> Fragment:
    *whole, rest = path.read_bytes().split(b"\n")
    first, *events = [json.loads(line) for line in whole]
    header = msgspec.convert(first["fragment"], ProcessHeader)
    clocks = [event["clock"] for event in events if "clock" in event]
    return Fragment(header, [e for e in events if "clock" not in e], clocks, rest != b"")


def read_fragments(directory: Path) -> list[Fragment]:
    """All that have a whole first line, in order of their beginning."""
    paths = directory.glob(f"*{FRAGMENT_SUFFIX}")
    whole = [path for path in paths if b"\n" in path.read_bytes()]
    return sorted(map(read_fragment, whole), key=lambda it: it.header.wall_ns)


def fragments_of(directory: Path, role: str) -> list[Fragment]:
    return [it for it in read_fragments(directory) if it.header.role == role]


def end_of(span: dict[str, Any]) -> float:
    end: float = span["ts"] + span["dur"]
    return end


def assert_nested(fragment: Fragment) -> None:
    """Checks that of two spans of a row that overlap, one has the other within it."""
    for row, spans in fragment.spans().items():
        around: list[dict[str, Any]] = []
        for span in spans:
            while around and end_of(around[-1]) <= span["ts"] + _EPSILON_US:
                around.pop()
            assert not around or end_of(span) <= end_of(around[-1]) + _EPSILON_US, (row, span)
            around.append(span)


def phases_of(fragment: Fragment, request_id: str) -> list[str]:
    """The names of what follows each other in the row of an engine's request, without a gap."""
    *phases, whole = fragment.request(request_id)
    assert whole["name"] == "request"
    at = whole["ts"]
    for phase in phases:
        assert abs(phase["ts"] - at) < _EPSILON_US
        at = end_of(phase)
    assert abs(at - end_of(whole)) < _EPSILON_US
    return [phase["name"] for phase in phases]
