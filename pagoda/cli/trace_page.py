"""A report as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pagoda.cli.trace_tables import TextTable, alongside, tables_of
from pagoda.telemetry.report.data import Limits, Report, RequestReport
from pagoda.telemetry.report.reasons import seconds

_TEMPLATE = Path(__file__).with_suffix(".html")
_WIDTH = 1000.0
"""Width of a picture, in its own units."""
_COLOURS = {
    "before the trace": "whole",
    "queued": "queue",
    "waiting for KV": "queue",
    "prefill": "prefill",
    "decode": "decode",
    "preempted": "lost",
    "recovering": "lost",
}


@dataclass(frozen=True)
class _Bar:
    x: float
    width: float
    colour: str
    title: str


@dataclass(frozen=True)
class _Slow:
    request: RequestReport
    end_to_end: str
    first_token: str
    bars: Sequence[_Bar]


def page_of(report: Report, limits: Limits) -> str:
    """The text of the file. Ids of requests come from clients: everything is escaped."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATE.parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    began = datetime.fromtimestamp(report.began_ns / 1e9, UTC)
    longest = max((it.end_to_end for it in report.slowest), default=0.0)
    tables: list[TextTable] = tables_of(report, limits)
    return environment.get_template(_TEMPLATE.name).render(
        began=f"{began:%Y-%m-%d %H:%M:%S} UTC",
        duration=seconds(report.seconds),
        processes=report.processes,
        notes=report.notes,
        tables=tables,
        alongside=alongside(report),
        slowest=[_slow(it, longest) for it in report.slowest],
        width=_WIDTH,
    )


def _slow(request: RequestReport, longest: float) -> _Slow:
    scale = _WIDTH / longest if longest else 0.0
    bars = [_Bar(0.0, request.end_to_end * scale, "whole", "outside of the engine")]
    bars += [
        _Bar(
            it.start * scale,
            it.seconds * scale,
            _COLOURS[it.name],
            f"{it.name}: {seconds(it.seconds)}",
        )
        for it in request.phases
    ]
    first = "-" if request.first_token is None else seconds(request.first_token)
    return _Slow(request, seconds(request.end_to_end), first, bars)
