# SPDX-License-Identifier: Apache-2.0
"""`pagoda simulate recommend`: the cheapest fleet that keeps an SLO."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number

from pagoda.cli import output
from pagoda.cli.files import check_writable, write_json
from pagoda.cli.options import Count, GeneralOptions
from pagoda.errors import ConfigError
from pagoda.fleet.policies import POLICIES
from pagoda.messages.worker_config import Role
from pagoda.plugins.simulate.command import simulated
from pagoda.plugins.simulate.comparison import with_policy
from pagoda.plugins.simulate.options import WorkloadOptions
from pagoda.plugins.simulate.report import Report
from pagoda.plugins.simulate.topology import Topology, read_topology

_SPLITS = (0.2, 0.35, 0.5)
"""Shares of prefill hosts that are tried."""
_CLEARLY = 1.2
"""A fleet is given up when it has missed the SLO for so many times the share of requests that may miss it."""


class Candidate(NamedTuple):
    """A fleet that keeps the SLO with the fewest hosts of its kind."""

    policy: str
    num_hosts: int
    num_prefill: int
    """Hosts of these that compute prompts alone; 0: all do both."""
    part: float
    """Share of prefill hosts from which that number is."""
    report: Report

    @property
    def price(self) -> float:
        return float(self.report["price_per_hour"])


def recommend(
    topology: Path,
    *,
    workload: WorkloadOptions,
    share: Annotated[float, Parameter(validator=Number(gt=0, lte=1))] = 0.99,
    most: Count = 64,
    policies: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative=())] = (
        "prefix-affinity",
        "least-pending-tokens",
    ),
    splits: bool = True,
    output_file: Annotated[Path | None, Parameter(name="--output")] = None,
    general: GeneralOptions = GeneralOptions(),
) -> int:
    """Try numbers of hosts, policies, and hosts for prompts alone, and tell the cheapest fleet that keeps --slo.

    Args:
        topology: A YAML file with one router over hosts of one kind.
        share: Requests that are to keep the SLO.
        most: The most hosts to try.
        policies: Policies to try.
        splits: Try hosts of two roles, too.
        output_file: Write all that was tried as JSON to this file too.
    """
    general.apply()
    check_writable(output_file, "--output")
    read = read_topology(topology)
    if read.scaling:
        raise ConfigError(
            f"{topology} has scaling; recommend tries fixed numbers of hosts. Leave it out."
        )
    if not workload.slo:
        raise ConfigError("--slo is missing; name limits in ms such as ttft:500,tpot:60.")
    if list(read.routers) != [read.root] or len(read.hosts) != 1:
        raise ConfigError(
            f"{topology} is to have one router over hosts of one kind, of which numbers are tried."
        )
    unknown = set(policies) - POLICIES.keys()
    if unknown:
        raise ConfigError(f"--policies: {min(unknown)} is none of {', '.join(POLICIES)}.")
    search = _Search(read, workload, share, most)
    found = {it[:3]: it for policy in policies for it in search.of_policy(policy, splits=splits)}
    best = sorted(found.values(), key=lambda it: (it.price, -it.report["all"]["goodput"]))
    rows = [_row(it) for it in best]
    columns = ("fleet", "$/hour", "goodput", "TTFT p99", "TPOT p99", "one host fewer")
    title = f"The fewest hosts that keep {workload.slo} for {share:.1%} of requests"
    output.stdout().print(
        output.table(title, columns, [[*row, search.margin(it)] for row, it in rows])
    )
    output.stdout().print(f"step times: {'; '.join(read.errors())}")
    if output_file is not None:
        tried = [
            {"policy": key[0], "hosts": key[1], "prefill": key[2], "report": report}
            for key, report in search.tried.items()
        ]
        write_json(output_file, {"slo": workload.slo, "share": share, "tried": tried})
    if not found:
        output.stderr().print(
            f"No fleet of {most} hosts or fewer keeps {workload.slo}; try --most."
        )
    return 0 if found else 1


class _Search:
    """Fleets that were tried."""

    def __init__(
        self, topology: Topology, workload: WorkloadOptions, share: float, most: int
    ) -> None:
        self._topology = topology
        self._workload = workload
        self._share = share
        self._most = most
        self._start = 1
        self.tried: dict[tuple[str, int, int], Report] = {}

    def of_policy(self, policy: str, *, splits: bool) -> Iterator[Candidate]:
        for part in (0.0, *(_SPLITS if splits else ())):
            found = self._least(policy, part)
            if found is not None:
                yield found

    def margin(self, found: Candidate) -> str:
        """Goodput with one host fewer; `missed` where that ended before its last request."""
        fewer = found.num_hosts - 1
        report = self.tried.get((found.policy, fewer, _num_prefill(fewer, found.part)))
        if report is None:
            return "–"
        return "missed" if report["is_given_up"] else f"{report['all']['goodput']:.1%}"

    def _least(self, policy: str, part: float) -> Candidate | None:
        """Fewest hosts that keep the SLO; None if `most` do not. The search begins at the number found last, in
        steps that double."""
        least = 2 if part else 1
        if least > self._most:
            return None
        high = max(least, min(self._start, self._most))
        step = 1
        if self._keeps(policy, high, part):
            low = high - 1
            while low >= least and self._keeps(policy, low, part):
                step *= 2
                low, high = max(least - 1, low - step), low
        else:
            low = high
            while high == low or not self._keeps(policy, high, part):
                if high >= self._most:
                    return None
                low, high = high, min(self._most, high + step)
                step *= 2
        while high - low > 1:
            middle = (low + high) // 2
            if self._keeps(policy, middle, part):
                high = middle
            else:
                low = middle
        self._start = high
        num_prefill = _num_prefill(high, part)
        report = self.tried[policy, high, num_prefill]
        return Candidate(policy, high, num_prefill, part, report)

    def _keeps(self, policy: str, num_hosts: int, part: float) -> bool:
        key = policy, num_hosts, _num_prefill(num_hosts, part)
        if key not in self.tried:
            fleet = with_hosts(with_policy(self._topology, policy), num_hosts, key[2])
            what = _name(policy, num_hosts, key[2])
            misses = _CLEARLY * (1 - self._share)
            self.tried[key] = simulated(fleet, self._workload, misses=misses, what=what)[0]
        report = self.tried[key]
        return not report["is_given_up"] and bool(report["all"]["goodput"] >= self._share)


def _num_prefill(num_hosts: int, part: float) -> int:
    return min(num_hosts - 1, max(1, round(part * num_hosts))) if part else 0


def with_hosts(topology: Topology, num_hosts: int, num_prefill: int) -> Topology:
    """The topology, of one router and one kind of host, with so many hosts, some of them for prompts alone."""
    [(kind, host)] = topology.hosts.items()
    roles = {kind: Role.BOTH if num_hosts > 1 else Role.NONE}
    counts = {kind: num_hosts}
    if num_prefill:
        roles = {f"{kind}-prefill": Role.PREFILL, f"{kind}-decode": Role.DECODE}
        counts = dict(zip(roles, (num_prefill, num_hosts - num_prefill), strict=True))
    router = msgspec.structs.replace(topology.routers[topology.root], children=counts)
    return msgspec.structs.replace(
        topology,
        routers={topology.root: router},
        hosts={name: msgspec.structs.replace(host, role=role) for name, role in roles.items()},
        steps=dict.fromkeys(roles, topology.steps[kind]),
        prices=dict.fromkeys(roles, topology.prices[kind]),
        block_s=dict.fromkeys(roles, topology.block_s[kind]),
        faults=tuple(
            msgspec.structs.replace(fault, what=name) for fault in topology.faults for name in roles
        ),
        scaling=(),
    )


def _name(policy: str, num_hosts: int, num_prefill: int) -> str:
    split = f", {num_prefill} of them for prompts" if num_prefill else ""
    return f"{num_hosts} hosts, {policy}{split}"


def _row(found: Candidate) -> tuple[list[str], Candidate]:
    whole = found.report["all"]
    return [
        _name(found.policy, found.num_hosts, found.num_prefill),
        f"{found.price:,.2f}",
        f"{whole['goodput']:.1%}",
        f"{whole['ttft_ms']['p99']:,.0f} ms",
        f"{whole['tpot_ms']['p99'] or 0:,.1f} ms",
    ], found
