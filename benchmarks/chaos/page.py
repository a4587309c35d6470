# SPDX-License-Identifier: Apache-2.0
"""docs/reliability.md: the table of all trials, with the figures and dates of their last runs."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.chaos.trial import Outcome, Trial
from pagoda.cli.machine_facts import cpu_name
from pagoda.version import __version__

_HERE = Path(__file__)
_RESULTS = _HERE.with_name("results.json")
_PAGE = _HERE.parents[2] / "docs" / "reliability.md"
_BEGIN = "<!-- table: make chaos -->"
_END = "<!-- end of table -->"


@dataclass(frozen=True)
class Result:
    """The outcome of a trial, and where and when it was measured."""

    name: str
    measured: str
    holds: bool
    date: str
    machine: str
    version: str


def result_of(trial: Trial, outcome: Outcome) -> Result:
    """`outcome` with today's date, this machine and this version."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    processor = cpu_name(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    machine = f"{os.cpu_count()} cores of {processor}"
    return Result(trial.name, outcome.measured, outcome.holds, today, machine, __version__)


def write_page(trials: Sequence[Trial], results: Sequence[Result]) -> None:
    """Keeps `results` beside those of other trials, and writes the table of the page anew."""
    kept = {result.name: result for result in _read()} | {result.name: result for result in results}
    ordered = [kept[trial.name] for trial in trials if trial.name in kept]
    _RESULTS.write_text(
        json.dumps([asdict(result) for result in ordered], indent=1) + "\n", encoding="utf-8"
    )
    before, _, rest = _PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    after = rest.partition(_END)[2]
    _PAGE.write_text(f"{before}{_BEGIN}\n{table(trials, kept)}\n{_END}{after}", encoding="utf-8")


def table(trials: Sequence[Trial], results: dict[str, Result]) -> str:
    """The Markdown table; a trial without a result says so."""
    rows = ["| trial | fault | asked | measured | date |", "|---|---|---|---|---|"]
    for trial in trials:
        result = results.get(trial.name)
        measured = "not measured yet" if result is None else result.measured
        if result is not None and not result.holds:
            measured = f"**Falls short**: {measured}"
        date = "" if result is None else result.date
        rows.append(f"| `{trial.name}` | {trial.fault} | {trial.asked} | {measured} | {date} |")
    machines = sorted(
        {f"{result.machine} (Pagoda {result.version})" for result in results.values()}
    )
    return "\n".join([*rows, "", f"Measured on: {'; '.join(machines)}."])


def _read() -> list[Result]:
    if not _RESULTS.exists():
        return []
    return [Result(**fields) for fields in json.loads(_RESULTS.read_text(encoding="utf-8"))]
