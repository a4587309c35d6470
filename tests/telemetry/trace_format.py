"""Whether a file is what Chrome's trace-event format asks for, and what Pagoda promises of it besides.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

Event = Mapping[str, Any]
Place = tuple[int, int]

_FIELDS = {
    "X": {"name", "ts", "dur", "pid", "tid"},
    "i": {"name", "ts", "pid", "tid", "s"},
    "C": {"name", "ts", "pid", "args"},
    "M": {"name", "pid", "args"},
    "s": {"name", "cat", "id", "ts", "pid", "tid"},
    "t": {"name", "cat", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"},
}
_NAMES = {"process_name": "name", "thread_name": "name"}
_SORTS = {"process_sort_index": "sort_index", "thread_sort_index": "sort_index"}


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
    found = [
        *_problems_of_fields(events),
        *_problems_of_names(events),
        *_problems_of_nesting(events),
        *_problems_of_flows(events),
    ]
    times = [event["ts"] for event in events if "ts" in event]
    if times and min(times) != 0:
        found.append(f"time begins at {min(times)}")
    return found[:20]


def _problems_of_fields(events: Sequence[Event]) -> Iterator[str]:
    for event in events:
        phase = event.get("ph")
        if phase not in _FIELDS:
            yield f"no such phase: {event}"
        elif missing := _FIELDS[phase] - event.keys():
            yield f"{', '.join(sorted(missing))} missing: {event}"
        elif not all(isinstance(event.get(name, 0), int) for name in ("pid", "tid")):
            yield f"pid and tid are numbers: {event}"
        elif not all(_is_time(event.get(name, 0)) for name in ("ts", "dur")):
            yield f"times are not negative and of whole nanoseconds: {event}"
        elif not isinstance(event.get("args", {}), dict):
            yield f"args are an object: {event}"
        elif phase == "C" and not all(_is_number(it) for it in event["args"].values()):
            yield f"a counter counts: {event}"
        elif phase == "i" and event["s"] not in ("g", "p", "t"):
            yield f"no such scope: {event}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def _is_time(value: object) -> bool:
    return isinstance(value, int | Decimal) and value >= 0 and value * 1000 % 1 == 0


def _problems_of_names(events: Sequence[Event]) -> Iterator[str]:
    named: defaultdict[tuple[str, int, int], list[Any]] = defaultdict(list)
    for event in events:
        field = {**_NAMES, **_SORTS}.get(event["name"])
        if event["ph"] == "M" and field is not None:
            tid = event["tid"] if event["name"].startswith("thread") else 0
            named[event["name"], event["pid"], tid].append(event["args"][field])
    for what, values in named.items():
        if len(values) != 1:
            yield f"{what} is said {len(values)} times"
    for pid, tid in {(event["pid"], event.get("tid", 0)) for event in events if event["ph"] != "M"}:
        for name in (*_NAMES, *_SORTS):
            key = (name, pid, tid if name.startswith("thread") else 0)
            if key not in named:
                yield f"no {name} for {pid} {tid}"
    names = [values[0] for (name, _, _), values in named.items() if name == "process_name"]
    if len(names) != len(set(names)):
        yield f"processes share a name: {sorted(names)}"


def spans_by_row(events: Sequence[Event]) -> dict[Place, list[tuple[Decimal, Decimal, str]]]:
    """Begin, end and name of the spans of each row, in the order of the file."""
    rows: defaultdict[Place, list[tuple[Decimal, Decimal, str]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            span = (event["ts"], event["ts"] + event["dur"], event["name"])
            rows[event["pid"], event["tid"]].append(span)
    return rows


def _problems_of_nesting(events: Sequence[Event]) -> Iterator[str]:
    for place, spans in spans_by_row(events).items():
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


def _problems_of_flows(events: Sequence[Event]) -> Iterator[str]:
    rows = {place: _outermost(spans) for place, spans in spans_by_row(events).items()}
    flows: defaultdict[tuple[str, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["cat"], event["id"]].append(event)
            if not _is_within(event["ts"], rows.get((event["pid"], event["tid"]), ())):
                yield f"bound to nothing: {event}"
    for key, points in flows.items():
        phases = "".join(point["ph"] for point in points)
        if len(points) < 2 or phases != "s" + "t" * (len(points) - 2) + "f":
            yield f"flow {key} goes {phases}"
        if [point["ts"] for point in points] != sorted(point["ts"] for point in points):
            yield f"flow {key} goes back in time"
        if any(point.get("bp") != "e" for point in points):
            yield f"flow {key} is not bound to the spans around it"


def _outermost(spans: Sequence[tuple[Decimal, Decimal, str]]) -> list[tuple[Decimal, Decimal]]:
    """Begin and end of what has no span around it; they do not overlap."""
    found: list[tuple[Decimal, Decimal]] = []
    for begin, end, _ in sorted(spans, key=lambda span: (span[0], -span[1])):
        if not found or begin >= found[-1][1]:
            found.append((begin, end))
    return found


def _is_within(at: Decimal, spans: Sequence[tuple[Decimal, Decimal]]) -> bool:
    index = bisect_right(spans, at, key=lambda span: span[0]) - 1
    return index >= 0 and at < spans[index][1]
