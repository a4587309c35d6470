# SPDX-License-Identifier: Apache-2.0
"""`pagoda simulate explain`: one request of a simulation, from its arrival to its end."""

from __future__ import annotations

from pathlib import Path

from pagoda.cli import output
from pagoda.cli.options import GeneralOptions
from pagoda.cli.progress import progress
from pagoda.errors import ConfigError
from pagoda.plugins.simulate.options import WorkloadOptions
from pagoda.plugins.simulate.simulation import simulate
from pagoda.plugins.simulate.topology import read_topology


def explain(
    name: str,
    topology: Path,
    *,
    workload: WorkloadOptions,
    general: GeneralOptions = GeneralOptions(),
) -> int:
    """Run a simulation again, and tell where one of its requests waited, and why.

    Args:
        name: The request: r0 is the first of a trace, s0.t0 the first turn of the first drawn session.
        topology: The YAML file of the simulation.
    """
    general.apply()
    read, requests = read_topology(topology), workload.read()
    with progress("requests", requests.num_requests) as advance:
        outcome = simulate(
            read,
            requests,
            workload.seed,
            known_lengths=workload.known_lengths,
            leap=workload.leap,
            watched=name,
            on_done=advance,
        )
    if not outcome.events:
        raise ConfigError(f"{name} is no request of {workload.workload}; r0 or s0.t0 may be one.")
    began = outcome.events[0][0]
    rows = [
        (f"{at:,.3f} s", f"+{1000 * (at - began):,.1f} ms: {text}") for at, text in outcome.events
    ]
    output.stdout().print(output.facts(rows))
    output.stdout().print(f"step times: {'; '.join(read.errors())}")
    return 0
