# SPDX-License-Identifier: Apache-2.0
"""Checks of files against Chrome's trace-event format, and against what Pagoda promises besides.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

Event = Mapping[str, Any]
Place = tuple[int, int]


_PLACED = {"name", "pid", "tid"}
_FIELDS = {
    "X": {*_PLACED, "ts", "dur"},
    "i": {*_PLACED, "ts", "s"},
    "C": {*_PLACED, "ts", "args"},
    "M": {*_PLACED, "args"},
    **{phase: {*_PLACED, "ts", "cat", "id", "bp"} for phase in "stf"},
}


def read_trace(path: Path) -> dict[str, Any]:
    """The file as it stands; times as exact decimals."""
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    trace: dict[str, Any] = json.loads(text, parse_float=Decimal, parse_constant=_refuse)
    return trace


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")


def problems_of(trace: Mapping[str, Any]) -> list[str]:
    """All that is wrong, a sentence each; the first of many."""
    events = trace["traceEvents"]
    spans = spans_by_row(events)
    found = [
        *_problems_of_fields(events),
        *_problems_of_names(events),
        *_problems_of_nesting(spans),
        *_problems_of_flows(events, spans),
    ]
    return found[:20]


def _problems_of_fields(events: Sequence[Event]) -> Iterator[str]:
    for event in events:
        phase = event.get("ph", "")
        if not _FIELDS.get(phase, {"ph of some kind"}) <= event.keys():
            yield f"a field is missing: {event}"
        elif not all(isinstance(event[name], int) for name in ("pid", "tid")):
            yield f"pid and tid are numbers: {event}"
        elif any(time < 0 or time * 1000 % 1 for time in (event.get("ts", 0), event.get("dur", 0))):
            yield f"times are not negative and of whole nanoseconds: {event}"
        elif not isinstance(event.get("args", {}), dict):
            yield f"args are an object: {event}"
        elif phase == "C" and not all(type(it) in (int, Decimal) for it in event["args"].values()):
            yield f"a counter counts: {event}"
        elif event.get("s", "t") != "t" or event.get("bp", "e") != "e":
            yield f"it belongs to its row, and is bound to the span around it: {event}"
    earliest = min((event["ts"] for event in events if "ts" in event), default=0)
    if earliest != 0:
        yield f"time begins at {earliest}"


def _problems_of_names(events: Sequence[Event]) -> Iterator[str]:
    said = [(e["name"], e["pid"], e["tid"]) for e in events if e["ph"] == "M"]
    needed = set()
    for pid, tid in {(e["pid"], e["tid"]) for e in events if e["ph"] != "M"}:
        needed |= {(f"process_{what}", pid, pid) for what in ("name", "sort_index")}
        needed |= {(f"thread_{what}", pid, tid) for what in ("name", "sort_index")}
    if len(said) != len(set(said)) or not needed <= set(said):
        yield f"rows have no name or several: {sorted(needed - set(said))} of {sorted(said)}"
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    if len(names) != len(set(names)):
        yield f"processes share a name: {sorted(names)}"


Spans = Sequence[tuple[Decimal, Decimal, str]]


def spans_by_row(events: Sequence[Event]) -> dict[Place, Spans]:
    """Begin, end and name of the spans of each row, in the order of the file."""
    rows: defaultdict[Place, list[tuple[Decimal, Decimal, str]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            span = (event["ts"], event["ts"] + event["dur"], event["name"])
            rows[event["pid"], event["tid"]].append(span)
    return dict(rows)


def _problems_of_nesting(rows: Mapping[Place, Spans]) -> Iterator[str]:
    for place, spans in rows.items():
        around: list[tuple[Decimal, Decimal, str]] = []
        last = Decimal(-1)
        for span in spans:
            if span[0] < last:
                yield f"{place}: {span} comes after a span that began later"
            last = span[0]
            while around and around[-1][1] <= span[0]:
                around.pop()
            if around and span[1] > around[-1][1]:
                yield f"{place}: {span} goes beyond {around[-1]}"
            around.append(span)


def _problems_of_flows(events: Sequence[Event], rows: Mapping[Place, Spans]) -> Iterator[str]:
    flows: defaultdict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
            at, spans = event["ts"], rows.get((event["pid"], event["tid"]), ())
            if not any(begin <= at < end for begin, end, _ in spans):
                yield f"bound to nothing: {event}"
    for number, points in flows.items():
        phases = "".join(point["ph"] for point in points)
        if phases != "s" + "t" * (len(points) - 2) + "f":
            yield f"flow {number} goes {phases}"
        if [point["ts"] for point in points] != sorted(point["ts"] for point in points):
            yield f"flow {number} goes back in time"
