# SPDX-License-Identifier: Apache-2.0
"""A report as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pagoda.plugins.trace.report.data import Part, Report, Roofline, WorkerReport, seconds

_TEMPLATE = Path(__file__).with_suffix(".html")


def page_of(report: Report, limits: Roofline) -> str:
    """The text of the file. Ids of requests come from clients: everything is escaped."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATE.parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["duration"] = seconds
    return environment.get_template(_TEMPLATE.name).render(
        began=datetime.fromtimestamp(report.began_ns / 1e9, UTC),
        report=report,
        tables=tables_of(report, limits),
        alongside=alongside(report),
        longest=max((it.end_to_end for it in report.slowest), default=0.0),
    )


@dataclass(frozen=True)
class TextTable:
    """Rows of text under a title; the first column says what, the others how much."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    shares: tuple[float, ...] = ()
    """The share of each row, where rows are parts of a whole."""


def tables_of(report: Report, limits: Roofline) -> list[TextTable]:
    """All tables that have rows."""
    return [table for table in _tables(report, limits) if table.rows]


def alongside(report: Report) -> str:
    """The frontend's work beside the engines; empty if none was traced."""
    detokenize = sum(it.detokenize for it in report.requests)
    write = sum(it.write for it in report.requests)
    if not detokenize + write:
        return ""
    return f"Alongside, the frontend took {seconds(detokenize)} to detokenize and {seconds(write)} to write."


def _tables(report: Report, limits: Roofline) -> Iterator[TextTable]:
    num_running = sum(it.is_running for it in report.requests)
    running = f", {num_running:,} of them still running" if num_running else ""
    yield _parts(f"{len(report.requests):,} requests{running}", report.parts, len(report.requests))
    yield TextTable(
        "How long it took",
        ("what", "count", "p50", "p90", "p99"),
        tuple(
            (it.name, f"{it.count:,}", seconds(it.p50), seconds(it.p90), seconds(it.p99))
            for it in report.percentiles
        ),
    )
    for engine in report.engines:
        title = f"{engine.name}: {engine.num_steps:,} steps"
        yield _parts(title, engine.steps, engine.num_steps)
        yield _parts(f"{engine.name}: its loop", engine.loop, engine.num_steps)
    for worker in report.workers:
        title = f"{worker.name}: {worker.num_steps:,} steps"
        yield _parts(title, worker.parts, worker.num_steps)
        yield _operations(worker, limits)
        yield _forwards(worker, limits)


def _parts(title: str, parts: Sequence[Part], count: int) -> TextTable:
    shown = [part for part in parts if part.seconds]
    return TextTable(
        title,
        ("where", "time", "each", "share"),
        tuple(
            (it.name, seconds(it.seconds), seconds(it.seconds / max(1, count)), f"{it.share:.1%}")
            for it in shown
        ),
        tuple(it.share for it in shown),
    )


def _operations(worker: WorkerReport, limits: Roofline) -> TextTable:
    return TextTable(
        f"{worker.name}: operations",
        ("kind", "time", "share", *_rate_columns(limits)),
        tuple(
            (
                it.kind,
                seconds(it.seconds),
                f"{it.share:.1%}",
                *_rates(it.bytes_per_s, it.flops_per_s, limits),
            )
            for it in worker.operations
        ),
        tuple(it.share for it in worker.operations),
    )


def _forwards(worker: WorkerReport, limits: Roofline) -> TextTable:
    return TextTable(
        f"{worker.name}: forward passes",
        ("steps", "count", "tokens", "each", *_rate_columns(limits)),
        tuple(
            (
                it.steps,
                f"{it.count:,}",
                f"{it.tokens:,}",
                seconds(it.seconds / it.count),
                *_rates(it.bytes_per_s, it.flops_per_s, limits),
            )
            for it in worker.forwards
        ),
    )


def _rate_columns(limits: Roofline) -> Iterable[str]:
    yield "GB/s"
    if limits.bytes_per_s is not None:
        yield "of limit"
    yield "GFLOP/s"
    if limits.flops_per_s is not None:
        yield "of limit"


def _rates(
    bytes_per_s: float | None, flops_per_s: float | None, limits: Roofline
) -> tuple[str, ...]:
    cells = []
    for rate, limit in ((bytes_per_s, limits.bytes_per_s), (flops_per_s, limits.flops_per_s)):
        cells.append("-" if rate is None else f"{rate / 1e9:,.1f}")
        if limit is not None:
            cells.append("-" if rate is None else f"{rate / limit:.0%}")
    return tuple(cells)
