# SPDX-License-Identifier: Apache-2.0
"""Reports of simulations, as objects of JSON and as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group as Stack

from pagoda.cli import output
from pagoda.plugins.simulate.records import Slo, by_kind, figures, millis, over_time
from pagoda.plugins.simulate.simulation import Outcome
from pagoda.plugins.simulate.topology import Topology

Report = dict[str, Any]


def make_report(
    topology: Topology, outcome: Outcome, slo: Slo, arguments: Mapping[str, object]
) -> Report:
    """All figures of a simulation. The same simulation gives the same object."""
    records = outcome.records
    whole = figures(records.requests, records.ended_at, slo)
    dollars = sum(topology.prices[kind] * it / 3600 for kind, it in outcome.host_s.items())
    hours = max(records.ended_at, 1e-9) / 3600
    tokens = whole.prompt_tokens + whole.output_tokens
    num_hosts = len(outcome.paths)
    return {
        "topology": topology.name,
        "arguments": dict(arguments),
        "hosts": num_hosts,
        "step_times": topology.errors(),
        "host_hours": round(sum(outcome.host_s.values()) / 3600, 6),
        "price_per_hour": round(dollars / hours, 4),
        "price_per_million_tokens": _per_million(dollars, tokens),
        "price_per_million_output_tokens": _per_million(dollars, whole.output_tokens),
        "slo": {"ttft_ms": _limit(slo.ttft), "tpot_ms": _limit(slo.tpot)},
        "is_given_up": records.is_given_up,
        "all": whole.as_json(),
        "itl_ms": {
            name: millis(records.itl.percentile(share))
            for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
        },
        "faults": records.num_faults,
        "hosts_lost": records.num_hosts_lost,
        "moves": records.num_moves,
        "errors": _errors(outcome),
        "by_kind": by_kind(records, slo, outcome.above),
        "over_time": over_time(records, slo),
        "hosts_over_time": {
            kind: [
                {
                    "at_s": round(it.at, 3),
                    "up": it.num_up,
                    "running": it.num_running,
                    "waiting": it.num_waiting,
                    "prompt_tokens": it.num_prompt_tokens,
                    "hit_tokens": it.num_prefix_hit_tokens,
                }
                for it in samples
            ]
            for kind, samples in records.samples.items()
        },
    }


def _per_million(dollars: float, num_tokens: int) -> float | None:
    return round(1e6 * dollars / num_tokens, 4) if num_tokens else None


def _limit(seconds: float) -> float | None:
    return None if seconds == float("inf") else millis(seconds)


def _errors(outcome: Outcome) -> dict[str, int]:
    counts: dict[str, int] = {}
    for record in outcome.records.requests:
        if record.error:
            counts[record.error] = counts.get(record.error, 0) + 1
    return counts


_ROWS = (
    ("requests/s", "requests_per_s", "{:,.2f}"),
    ("output tokens/s", "output_tokens_per_s", "{:,.0f}"),
    ("hit rate", "hit_rate", "{:.1%}"),
    ("goodput", "goodput", "{:.1%}"),
)


def headline(report: Report) -> list[str]:
    """The most important figures of a report, in the order of `HEADLINES`."""
    whole, itl, price = report["all"], report["itl_ms"], report["price_per_million_tokens"]
    return [
        *(pattern.format(whole[key]) for _, key, pattern in _ROWS),
        *(_ms(whole["ttft_ms"][name]) for name in ("p50", "p99")),
        *(_ms(whole["tpot_ms"][name]) for name in ("p50", "p99")),
        _ms(itl["p99"]),
        "–" if price is None else f"{price:.3f}",
        str(whole["lost"]),
    ]


HEADLINES = (
    *(name for name, _, _ in _ROWS),
    "TTFT p50",
    "TTFT p99",
    "TPOT p50",
    "TPOT p99",
    "ITL p99",
    "$/M tokens",
    "lost",
)


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f} ms"


def summary(report: Report) -> Stack:
    """Tables for a terminal."""
    whole = report["all"]
    rows = [
        ("hosts", _cost(report)),
        ("step times", "; ".join(report["step_times"])),
        ("requests", _counts(whole)),
        ("virtual time", f"{whole['duration_s']:,.1f} s"),
        ("tokens", f"{whole['prompt_tokens']:,} in, {whole['output_tokens']:,} out"),
        *zip(HEADLINES, headline(report), strict=True),
    ]
    if report["faults"]:
        lost = (
            f"{report['faults']} faults, {report['hosts_lost']} hosts lost, {report['moves']} moves"
        )
        rows.append(("faults", lost))
    columns = ("", "requests", "hit rate", "TTFT p50", "TTFT p99", "TPOT p50", "goodput")
    kinds = output.table("By kind of router and host", columns, _kind_rows(report["by_kind"]))
    return Stack(f"\n{report['topology']}\n", output.facts(rows), "", kinds)


def _cost(report: Report) -> str:
    text = f"{report['hosts']:,}, {report['price_per_hour']:,.2f} $ an hour"
    return f"{text}, {report['host_hours']:,.1f} host-hours"


def _counts(whole: Mapping[str, Any]) -> str:
    text = f"{whole['completed']:,} completed, {whole['lost']:,} lost"
    if whole["too_long"]:
        text += f", {whole['too_long']:,} too long for these hosts"
    if whole["refusals"]:
        text += f", {whole['refusals']:,} refusals"
    return text


def _kind_rows(kinds: Mapping[str, Mapping[str, Any]]) -> list[Sequence[str]]:
    return [
        (
            kind,
            f"{it['requests']:,}",
            f"{it['hit_rate']:.1%}",
            _ms(it["ttft_ms"]["p50"]),
            _ms(it["ttft_ms"]["p99"]),
            _ms(it["tpot_ms"]["p50"]),
            f"{it['goodput']:.1%}",
        )
        for kind, it in kinds.items()
    ]
