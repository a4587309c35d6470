# SPDX-License-Identifier: Apache-2.0
"""`pagoda simulate compare`: fleets under the same arrivals."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import msgspec
from cyclopts import Parameter

from pagoda.cli import output
from pagoda.cli.files import check_writable, write_file, write_json
from pagoda.cli.options import GeneralOptions
from pagoda.errors import ConfigError
from pagoda.fleet.policies import PolicyName
from pagoda.plugins.simulate.command import simulated
from pagoda.plugins.simulate.html import page
from pagoda.plugins.simulate.options import WorkloadOptions
from pagoda.plugins.simulate.report import HEADLINES, headline
from pagoda.plugins.simulate.topology import Topology, read_topology


def compare(
    *topologies: Path,
    workload: WorkloadOptions,
    policies: Annotated[
        tuple[str, ...], Parameter(consume_multiple=True, negative=(), show_default=False)
    ] = (),
    output_file: Annotated[Path | None, Parameter(name="--output")] = None,
    html: Path | None = None,
    general: GeneralOptions = GeneralOptions(),
) -> int:
    """Run fleets in virtual time under the same arrivals, one after the other, and compare what clients would see.

    Args:
        topologies: YAML files of hosts, routers and faults.
        policies: Compare so many policies instead, each at all levels but for LEVEL=POLICY, which sets it at one.
        output_file: Write all reports as JSON to this file too.
        html: Write a report to this file, which a browser opens without a network.
    """
    general.apply()
    check_writable(output_file, "--output")
    check_writable(html, "--html")
    read = [read_topology(path) for path in topologies]
    if policies:
        read = [with_policy(topology, policy) for topology in read for policy in policies]
    if len(read) < 2:
        raise ConfigError("pagoda simulate compare takes two topologies or more, or --policies.")
    reports = [simulated(topology, workload)[0] for topology in read]
    rows = [(report["topology"], *headline(report)) for report in reports]
    output.stdout().print(output.table("The same arrivals", ("", *HEADLINES), rows))
    for topology in read[: len(topologies)]:
        output.stdout().print(f"step times of {topology.name}: {'; '.join(topology.errors())}")
    if output_file is not None:
        write_json(output_file, {"reports": reports})
    if html is not None:
        write_file(html, page(reports).encode(), "--html")
    return 1 if any(report["all"]["lost"] for report in reports) else 0


def with_policy(topology: Topology, policy: str) -> Topology:
    """The topology with another policy at all levels, or at one (`LEVEL=POLICY`). Raises ConfigError."""
    level, _, name = policy.rpartition("=")
    levels = {router.level for router in topology.routers.values()}
    if name not in get_args(PolicyName):
        known = ", ".join(get_args(PolicyName))
        raise ConfigError(f"--policies: {name} is none of {known}.")
    if level and level not in levels:
        known = ", ".join(sorted(levels))
        raise ConfigError(
            f"--policies: no router of {topology.name} is of the level {level}; there are {known}."
        )
    routers = {
        kind: msgspec.structs.replace(router, policy=name)
        if level in ("", router.level)
        else router
        for kind, router in topology.routers.items()
    }
    return msgspec.structs.replace(topology, name=f"{topology.name}: {policy}", routers=routers)
