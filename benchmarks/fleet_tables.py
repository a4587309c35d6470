# SPDX-License-Identifier: Apache-2.0
"""Tables of simulated fleets, as the documentation has them: `python -m benchmarks.fleet_tables NAME [LOAD]`.

`policies` sets each policy at one of three levels, the others having the default; `affinity` compares 64 hosts
with one that is as large as all of them; `faults` loses 1 % of hosts a minute and cuts a region off; `handoff`
compares hosts for prompts with hosts that do both, by the most requests that keep a limit. LOAD is a trace or a
file of drawn sessions; by default it is `agents.yaml` beside this file.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from pagoda.cli import output
from pagoda.fleet.policies import PolicyName
from pagoda.plugins.simulate.comparison import with_policy
from pagoda.plugins.simulate.records import Patience, Slo
from pagoda.plugins.simulate.report import HEADLINES, Report, headline, make_report
from pagoda.plugins.simulate.simulation import simulate
from pagoda.plugins.simulate.topology import Topology, read_topology
from pagoda.plugins.simulate.workload import read_workload

_LEVELS = """
model: llama-3.1-8b
root: world
routers:
  world: {level: global, children: {region: 2}}
  region: {level: region, round_trip_ms: 40, children: {pool: 2}}
  pool: {level: pool, children: {h100: 4}}
hosts: {h100: {device: h100, block_size: 512, num_blocks: 250, max_num_batched_tokens: 8192}}
"""
_FAULTS = "faults: [{what: h100, every_s: 6000, for_s: 60}, {what: region, kind: cut, at_s: 120, for_s: 60}]\n"
_HOSTS = """
model: llama-3.1-8b
root: pool
routers: {pool: {children: {h100: 64}}}
hosts: {h100: {device: h100, block_size: 512, num_blocks: NUM_BLOCKS, max_num_batched_tokens: 8192}}
"""
_WHOLE = """
model: llama-3.1-8b
root: pool
routers: {pool: {children: {all: 1}}}
hosts:
  all: {device: h100, devices: 64, block_size: 512, num_blocks: 400000, max_num_batched_tokens: 524288,
        max_num_seqs: 16384}
"""
_APART = """
model: llama-3.1-8b
root: pod
routers: {pod: {children: {prefill: 1, decode: 2}}}
hosts:
  prefill: {device: DEVICE, role: prefill}
  decode: {device: DEVICE, role: decode}
"""
_TOGETHER = """
model: llama-3.1-8b
root: pod
routers: {pod: {children: {both: 3}}}
hosts: {both: {device: DEVICE, role: both}}
"""
_PROMPTS = """
duration_s: 20
rate: 1
prompt_tokens: {mean: PROMPT, sigma: 0.4}
output_tokens: {mean: ANSWER, sigma: 0.4}
"""
_AGENTS = Path(__file__).with_name("agents.yaml")
Row = Sequence[str]


class _Tables:
    """Simulations of one load, or of drawn requests."""

    def __init__(
        self,
        folder: Path,
        load: Path,
        requests: int,
        scale: float,
        devices: Sequence[str],
        num_blocks: int,
        tpot_ms: float,
    ) -> None:
        self._folder = folder
        self._load = load
        self._requests = requests
        self._scale = scale
        self._devices = devices
        self._num_blocks = num_blocks
        self._limits = Slo(1.0, tpot_ms / 1000)

    def policies(self) -> Iterator[Row]:
        base = self._topology(_LEVELS)
        yield ("all levels: prefix-affinity", *headline(self._replay(base)))
        for level in ("global", "region", "pool"):
            for policy in get_args(PolicyName):
                if policy != "prefix-affinity":
                    report = self._replay(with_policy(base, f"{level}={policy}"))
                    yield (f"{level}: {policy}", *headline(report))

    def affinity(self) -> Iterator[Row]:
        hosts = self._topology(_HOSTS.replace("NUM_BLOCKS", str(self._num_blocks)))
        whole = self._replay(self._topology(_WHOLE))
        yield ("one host as large, never full", *headline(whole))
        for policy in ("prefix-affinity", "least-pending-tokens", "round-robin"):
            yield (policy, *headline(self._replay(with_policy(hosts, policy))))

    def faults(self) -> Iterator[Row]:
        for name, text in (("no fault", _LEVELS), ("faults", _LEVELS + _FAULTS)):
            report = self._replay(self._topology(text))
            what = f"{report['hosts_lost']} hosts lost, {report['moves']} moves"
            yield (f"{name}: {what}", *headline(report))

    def handoff(self) -> Iterator[Row]:
        """The most requests a second of which 95 % keep the limits."""
        for device in self._devices:
            for prompt, answer in ((8000, 100), (4000, 200), (1000, 400)):
                drawn = _PROMPTS.replace("PROMPT", str(prompt)).replace("ANSWER", str(answer))
                apart, together = (
                    self._most(self._topology(text.replace("DEVICE", device)), drawn)
                    for text in (_APART, _TOGETHER)
                )
                ratio = f"{apart / together:.2f} ×" if together else "–"
                yield (device, f"{prompt} / {answer}", f"{apart:.1f}", f"{together:.1f}", ratio)

    def _most(self, topology: Topology, drawn: str) -> float:
        path = self._folder / "drawn.yaml"
        path.write_text(drawn)

        def keeps(rate: float) -> bool:
            workload = read_workload(path, 0, scale=rate, num_requests=None)
            patience = Patience(self._limits, 0.05 * workload.num_requests)
            simulate(topology, workload, 0, patience=patience)
            return not patience.is_over

        low, high = 0.0, 2.0
        while high < 200 and keeps(high):
            low, high = high, 2 * high
        for _ in range(4):
            middle = (low + high) / 2
            low, high = (middle, high) if keeps(middle) else (low, middle)
        return low

    def _replay(self, topology: Topology) -> Report:
        workload = read_workload(self._load, 0, scale=self._scale, num_requests=self._requests)
        return make_report(topology, simulate(topology, workload, 0), Slo(2.0, 0.05), {})

    def _topology(self, text: str) -> Topology:
        path = self._folder / "fleet.yaml"
        path.write_text(text)
        return read_topology(path)


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=("policies", "affinity", "faults", "handoff"))
    parser.add_argument("load", type=Path, nargs="?", default=_AGENTS, help="a workload")
    parser.add_argument("--requests", type=int, help="lines of a trace; all of them by default")
    parser.add_argument("--scale", type=float, default=2.0, help="users for each of the load")
    parser.add_argument("--blocks", type=int, default=0, help="of each host; 0: as have room")
    parser.add_argument("--devices", nargs="+", default=("h100", "h200", "l40s", "mi300x"))
    parser.add_argument(
        "--tpot-ms",
        type=float,
        default=30.0,
        help="most a token of handoff, beside 1 s to the first",
    )
    chosen = parser.parse_args()
    columns: Row = ("", *HEADLINES)
    if chosen.name == "handoff":
        columns = ("device", "prompt / answer", "1 prefill, 2 decode", "3 both", "apart")
    with tempfile.TemporaryDirectory() as folder:
        tables = _Tables(
            Path(folder),
            chosen.load,
            chosen.requests,
            chosen.scale,
            chosen.devices,
            chosen.blocks,
            chosen.tpot_ms,
        )
        rows = []
        for row in getattr(tables, chosen.name)():
            rows.append(row)
            output.stderr().print("  ".join(row))
    output.stdout().print(output.table(f"{chosen.name}", columns, rows))


if __name__ == "__main__":
    main()
