# SPDX-License-Identifier: Apache-2.0
"""Reports of simulations as one page of HTML, with charts in SVG and nothing that is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from pagoda.plugins.simulate.report import HEADLINES, Report, headline

_COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 560, 200, 64, 24
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem;
       color: #1c1917; background: #fff; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid #d6d3d1; text-align: right; }
th:first-child, td:first-child { text-align: left; }
figure { display: inline-block; margin: 0 1rem 1rem 0; }
figcaption { font-weight: 600; }
svg text { font: 11px system-ui, sans-serif; fill: currentColor; }
@media (prefers-color-scheme: dark) { body { color: #e7e5e4; background: #1c1917; }
  th, td { border-color: #57534e; } }
"""
Series = tuple[str, list[tuple[float, float]]]
"""A name, and points of time and value."""


def page(reports: Sequence[Report]) -> str:
    """One page about the reports, of which charts and tables show one beside the other."""
    names = [str(report["topology"]) for report in reports]
    title = f"Simulation: {' and '.join(dict.fromkeys(names))}"
    rows = [(name, *headline(report)) for name, report in zip(names, reports, strict=True)]
    parts = [
        f"<h1>{escape(title)}</h1>",
        _table(("", *HEADLINES), rows),
        *(f"<p>{escape(_about(report))}</p>" for report in reports),
        *_charts(reports),
    ]
    for name, report in zip(names, reports, strict=True):
        parts.append(f"<h2>{escape(name)}: by kind of router and host</h2>")
        parts.append(_table(_KIND_COLUMNS, _kind_rows(report)))
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>{body}</body></html>\n"
    )


def _about(report: Report) -> str:
    whole = report["all"]
    faults = (
        f"{report['faults']} faults, {report['hosts_lost']} hosts lost, {report['moves']} moves; "
    )
    arguments = ", ".join(f"{name} {value}" for name, value in report["arguments"].items())
    return (
        f"{report['topology']}: {report['hosts']:,} hosts at {report['price_per_hour']:,.2f} $ an hour; "
        f"{whole['completed']:,} requests completed, {whole['lost']} lost; {faults}"
        f"step times {'; '.join(report['step_times'])}; {arguments}."
    )


def _charts(reports: Sequence[Report]) -> list[str]:
    many = len(reports) > 1
    charts = []
    for title, key, inner in (
        ("TTFT p50, ms", "ttft_ms", "p50"),
        ("TTFT p99, ms", "ttft_ms", "p99"),
        ("TPOT p99, ms", "tpot_ms", "p99"),
        ("Goodput, share of requests", "goodput", None),
        ("Prefix hits, share of prompt tokens", "hit_rate", None),
        ("Requests a second, by arrival", "requests_per_s", None),
    ):
        series = [
            (str(report["topology"]), _points(report["over_time"], key, inner))
            for report in reports
        ]
        charts.append(_chart(title, series))
    for title, key in (
        ("Requests that wait", "waiting"),
        ("Requests that run", "running"),
        ("Hosts that are up", "up"),
    ):
        series = [
            (f"{report['topology']}: {kind}" if many else kind, _points(samples, key, None))
            for report in reports
            for kind, samples in report["hosts_over_time"].items()
        ]
        charts.append(_chart(title, series))
    return charts


def _points(
    rows: Sequence[dict[str, Any]], key: str, inner: str | None
) -> list[tuple[float, float]]:
    values = ((row["at_s"], row[key][inner] if inner else row[key]) for row in rows)
    return [(at, value) for at, value in values if value is not None]


def _chart(title: str, series: Sequence[Series]) -> str:
    last = max([at for _, points in series for at, _ in points], default=1.0) or 1.0
    top = max([value for _, points in series for _, value in points], default=1.0) or 1.0
    width, height = _WIDTH - _LEFT, _HEIGHT - _BOTTOM
    lines = []
    for number, (name, points) in enumerate(series):
        colour = _COLOURS[number % len(_COLOURS)]
        way = " ".join(
            f"{_LEFT + width * at / last:.1f},{6 + (height - 6) * (1 - value / top):.1f}"
            for at, value in points
        )
        lines.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{way}">'
            f"<title>{escape(name)}</title></polyline>"
        )
    axes = (
        f'<path d="M{_LEFT} 6V{height}H{_WIDTH}" fill="none" stroke="#78716c"/>'
        f'<text x="{_LEFT - 4}" y="14" text-anchor="end">{top:,.4g}</text>'
        f'<text x="{_LEFT - 4}" y="{height}" text-anchor="end">0</text>'
        f'<text x="{_WIDTH}" y="{_HEIGHT - 6}" text-anchor="end">{last:,.0f} s</text>'
    )
    legend = " ".join(
        f'<span style="color:{_COLOURS[number % len(_COLOURS)]}">■</span> {escape(name)}'
        for number, (name, _) in enumerate(series)
    )
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg role="img" aria-label="{escape(title)}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}">{axes}{"".join(lines)}</svg><div>{legend}</div></figure>'
    )


_KIND_COLUMNS = (
    "",
    "requests",
    "hit rate",
    "TTFT p50",
    "TTFT p99",
    "TPOT p50",
    "TPOT p99",
    "goodput",
)


def _kind_rows(report: Report) -> list[tuple[str, ...]]:
    def ms(value: float | None) -> str:
        return "–" if value is None else f"{value:,.1f} ms"

    return [
        (
            kind,
            f"{it['requests']:,}",
            f"{it['hit_rate']:.1%}",
            ms(it["ttft_ms"]["p50"]),
            ms(it["ttft_ms"]["p99"]),
            ms(it["tpot_ms"]["p50"]),
            ms(it["tpot_ms"]["p99"]),
            f"{it['goodput']:.1%}",
        )
        for kind, it in report["by_kind"].items()
    ]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
