# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.planned_fleet`: the planner over a simulated fleet against a fixed size and an oracle.

The day has a burst. It has twelve hours, so that it is simulated in minutes: its curve is twice as steep as that
of a real one.

The fleet is that of `pagoda simulate`: dispatcher, schedulers and the policy of `pagoda plan` are the product's,
which sees the texts of `/metrics`; step times are a roofline. The planner has seen no day before. The best
fixed size is the smallest number of hosts that keeps the objective. The oracle knows the true rate of every
interval, has hosts at once, and as little margin as just keeps the objective.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from pagoda.cli import output
from pagoda.cli.progress import progress
from pagoda.cli.yaml_file import YamlFile
from pagoda.messages.worker_config import Role
from pagoda.plugins.plan.capacity import hosts_needed
from pagoda.plugins.plan.figures import PlanConfig
from pagoda.plugins.plan.journal import replay
from pagoda.plugins.simulate.records import Patience, Slo
from pagoda.plugins.simulate.report import Report, make_report
from pagoda.plugins.simulate.scaling import plan_config
from pagoda.plugins.simulate.simulation import simulate
from pagoda.plugins.simulate.topology import Timed, Topology, read_topology
from pagoda.plugins.simulate.workload import Synthetic, read_workload

_FLEET = """
model: llama-3.1-8b
root: pool
routers: {pool: {policy: least-pending-tokens, children: {server: 24}}}
devices: {server: {tflops: 32, tb_per_s: 0.25, gib: 256, overhead_ms: 5, price_per_hour: 1}}
hosts: {server: {device: server, block_size: 512, max_num_batched_tokens: 512, start_s: 120}}
scaling: [{what: pool, begin: 5, slo: {ttft_s: 8, tpot_s: 0.4, share: 0.99}}]
"""
_DAY = """
duration_s: {day_s}
day_s: {day_s}
rate: 1.4
daily_swing: 0.8
bursts:
- {{at_s: {burst_s}, for_s: 60, factor: 1.2}}
- {{at_s: {second_s}, for_s: 60, factor: 1.4}}
- {{at_s: {third_s}, for_s: {long_s}, factor: 1.6}}
prompt_tokens: {{mean: 1500, sigma: 0.4}}
output_tokens: {{mean: 100, sigma: 0.5}}
"""
_PROMPT, _ANSWER = 1500, 100
"""Mean lengths of `_DAY`."""
_INTERVAL_S = 30.0
_MARGINS = tuple(0.8 + 0.1 * step for step in range(10))


class _Day(NamedTuple):
    """One way to run the day."""

    name: str
    report: Report
    keeps: bool

    @property
    def hours(self) -> float:
        return float(self.report["host_hours"])


class _Benchmark:
    """The day, and fleets that live it."""

    def __init__(self, folder: Path, scale: float, hours: float) -> None:
        self._folder = folder
        self._scale = scale
        self.journal = folder / "plan.jsonl"
        self._day, fleet = folder / "day.yaml", folder / "fleet.yaml"
        self._day.write_text(_day(hours))
        fleet.write_text(_FLEET)
        self._fleet: Topology = read_topology(fleet)
        [self._rule] = self._fleet.scaling
        self._config: PlanConfig = plan_config(self._fleet, self._rule)

    def planner(self) -> _Day:
        return self._live("planner", self._fleet, journal=self.journal)

    def fixed(self) -> _Day:
        """The smallest size that keeps the objective all day."""
        size = max(1, self._size(max(_rates(self._day, self._scale))) - 3)  # too few
        while not (day := self._live(f"{size} hosts", self._timed([Timed(0, size)]))).keeps:
            size += 1
            if size > self._config.max_hosts:
                raise SystemExit("The day is too much for all hosts; use a lower --scale.")
        return day._replace(name=f"best fixed size, {size} hosts")

    def oracle(self) -> _Day:
        """Hosts at once by the true rate, with the least margin that keeps the objective."""
        days = (
            self._live(f"oracle, {margin:.2f} × the rate", self._knowing(margin))
            for margin in _MARGINS
        )
        kept = next((day for day in days if day.keeps), None)
        if kept is None:
            raise SystemExit("The day is too much for all hosts; use a lower --scale.")
        return kept

    def _knowing(self, margin: float) -> Topology:
        rates = list(_rates(self._day, self._scale))
        sizes = [self._size(rate * margin) for rate in rates]
        table = [Timed(index * _INTERVAL_S, size) for index, size in enumerate(sizes)]
        changes = [
            it for it, before in zip(table[1:], table, strict=False) if it.hosts != before.hosts
        ]
        return self._timed([table[0], *changes], start_s=0.0)

    def _size(self, rate: float) -> int:
        """Hosts that the capacity model gives without a margin."""
        config = self._config
        slo = replace(config.slo, share=0.5)
        return hosts_needed(
            Role.NONE, rate, _PROMPT, _ANSWER, config.capacity, slo, config.max_hosts
        )

    def _timed(self, table: Iterable[Timed], **changes: float) -> Topology:
        [(kind, host)] = self._fleet.hosts.items()
        return replace(
            self._fleet,
            hosts={kind: replace(host, **changes)},
            scaling=(replace(self._rule, timetable=tuple(table)),),
        )

    def _live(self, name: str, topology: Topology, journal: Path | None = None) -> _Day:
        slo, began = self._config.slo, time.perf_counter()
        limits = Slo(slo.ttft_s, slo.tpot_s)
        workload = read_workload(self._day, 1, scale=self._scale, num_requests=None)
        patience = None
        if journal is None:
            patience = Patience(limits, (1 - slo.share) * workload.num_requests)
        with progress(name, workload.num_requests) as advance:
            outcome = simulate(
                topology,
                workload,
                1,
                on_done=advance,
                patience=patience,
                journal=journal,
            )
        report = make_report(topology, outcome, limits, {})
        keeps = not report["is_given_up"] and report["all"]["goodput"] >= slo.share
        day = _Day(name, report, keeps)
        took_s = time.perf_counter() - began
        output.stderr().print(
            f"{name}: {report['all']['goodput']:.2%} of {report['all']['requests']:,}, "
            f"{day.hours:.1f} host-hours, {took_s:.0f} s"
        )
        return day


def _day(hours: float) -> str:
    """A day of so many hours; for a fiftieth of it 1.6 times as many come, growing over two minutes."""
    burst_s = round(0.396 * 3600 * hours)
    return _DAY.format(
        day_s=round(3600 * hours),
        burst_s=burst_s,
        second_s=burst_s + 60,
        third_s=burst_s + 120,
        long_s=round(72 * hours),
    )


def _rates(day: Path, scale: float) -> Iterator[float]:
    """Highest true rate of each interval."""
    file = YamlFile(day, "day")
    plan = file.convert(file.value, Synthetic)
    for index in range(int(plan.duration_s / _INTERVAL_S)):
        at = [(index + part) * _INTERVAL_S for part in (0.0, 0.5, 0.999)]
        yield scale * (plan.rate or 0.0) * max(plan.factor(one) for one in at)


def main() -> int:
    """Prints a table; 1 if the planner misses the objective, or takes too many hosts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="users for each of the day's")
    parser.add_argument("--hours", type=float, default=12.0, help="of the day")
    parser.add_argument("--only", choices=("planner", "fixed", "oracle"), help="one of the three")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        benchmark = _Benchmark(Path(folder), chosen.scale, chosen.hours)
        names = (chosen.only,) if chosen.only else ("planner", "fixed", "oracle")
        days = {name: getattr(benchmark, name)() for name in names}
        if "planner" in days:
            states = [state for state in replay(benchmark.journal) if state.plan]
            same = all(state.is_same for state in states)
            output.stdout().print(f"{len(states)} decisions, replayed with the same bytes: {same}")
    rows = [
        (
            day.name,
            f"{day.report['all']['goodput']:.2%}",
            f"{day.hours:.1f}",
            *(f"{day.hours / days[to].hours:.2f}" for to in ("fixed", "oracle") if to in days),
        )
        for day in days.values()
    ]
    against = [f"of {to}" for to in ("fixed", "oracle") if to in days]
    columns = ("", "kept the objective", "host-hours", *against)
    output.stdout().print(output.table("A day with a burst", columns, rows))
    if chosen.only:
        return 0
    planner = days["planner"]
    is_cheap = planner.hours <= min(0.75 * days["fixed"].hours, 1.15 * days["oracle"].hours)
    return 0 if planner.keeps and is_cheap and same else 1


if __name__ == "__main__":
    raise SystemExit(main())
