# SPDX-License-Identifier: Apache-2.0
"""`pagoda simulate`: a fleet under a workload, in virtual time."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from pagoda.cli import output
from pagoda.cli.files import check_writable, write_file, write_json
from pagoda.cli.options import GeneralOptions
from pagoda.cli.progress import progress
from pagoda.errors import ConfigError
from pagoda.plugins.simulate.html import page
from pagoda.plugins.simulate.options import WorkloadOptions
from pagoda.plugins.simulate.records import Patience
from pagoda.plugins.simulate.report import Report, make_report, summary
from pagoda.plugins.simulate.simulation import simulate
from pagoda.plugins.simulate.topology import Topology, read_topology


def run(
    topology: Path,
    *,
    workload: WorkloadOptions,
    output_file: Annotated[Path | None, Parameter(name="--output")] = None,
    html: Path | None = None,
    journal: Path | None = None,
    general: GeneralOptions = GeneralOptions(),
) -> int:
    """Run a fleet in virtual time under a workload, and report what its clients would see.

    Args:
        topology: A YAML file of hosts, routers and faults.
        output_file: Write the figures as JSON to this file too.
        html: Write a report to this file, which a browser opens without a network.
        journal: Write the decisions of the planner in scaling to this file, for pagoda plan replay.
    """
    general.apply()
    check_writable(output_file, "--output")
    check_writable(html, "--html")
    read = read_topology(topology)
    if journal is not None:
        check_writable(journal, "--journal")
        if journal.stat().st_size:
            raise ConfigError(f"--journal: {journal} has something in it already; name a new file.")
    report, took_s = simulated(read, workload, journal=journal)
    output.stdout().print(summary(report))
    most_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    output.stderr().print(f"Took {took_s:.1f} s and {most_bytes / 2**30:.2f} GiB.")
    report["arguments"]["topology"] = str(topology)
    if output_file is not None:
        write_json(output_file, report)
    if html is not None:
        write_file(html, page([report]).encode(), "--html")
    return 1 if report["all"]["lost"] else 0


def simulated(
    topology: Topology,
    options: WorkloadOptions,
    *,
    misses: float | None = None,
    what: str = "requests",
    journal: Path | None = None,
) -> tuple[Report, float]:
    """The report of a simulation, and the seconds of this machine that it took.

    A simulation in which more than the share `misses` of requests misses the limits ends then. Its progress is
    shown as that of `what`; `journal` is as in `Scaling`.
    """
    slo, workload = options.limits(), options.read()
    began = time.perf_counter()
    patience = None if misses is None else Patience(slo, misses * workload.num_requests)
    with progress(what, workload.num_requests) as advance:
        outcome = simulate(
            topology,
            workload,
            options.seed,
            known_lengths=options.known_lengths,
            leap=options.leap,
            on_done=advance,
            patience=patience,
            journal=journal,
        )
    took_s = time.perf_counter() - began
    return make_report(topology, outcome, slo, options.as_json()), took_s
