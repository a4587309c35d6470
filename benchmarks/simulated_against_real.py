# SPDX-License-Identifier: Apache-2.0
"""Simulated replicas against real ones on this machine: `python -m benchmarks.simulated_against_real STEPS`.

STEPS is what `pagoda simulate fit` made of `pagoda bench steps --threads N`, with the threads of a replica here.
The same clients ask the same requests, at shares of what the replicas finish when all come at once, of the real
engine's dispatcher and of a simulated one.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pagoda.cli import output
from pagoda.fleet.fleet import Fleet
from pagoda.llm.engine_options import EngineOptions, ExecutorOptions, ParallelOptions
from pagoda.plugins.simulate.clients import Clients
from pagoda.plugins.simulate.records import Histogram, Records, Slo, figures
from pagoda.plugins.simulate.simulation import simulate
from pagoda.plugins.simulate.topology import read_topology
from pagoda.plugins.simulate.workload import Workload, read_workload

_FLEET = """
root: pool
routers: {{pool: {{children: {{host: {replicas}}}}}}}
hosts: {{host: {{steps: {steps}, block_size: 16, num_blocks: {blocks}, max_num_seqs: {seqs}}}}}
"""
_REQUESTS = """
duration_s: {seconds}
rate: {rate}
prompt_tokens: {{mean: 120, sigma: 0.7, most: 900}}
output_tokens: {{mean: 60, sigma: 0.6, most: 400}}
"""


@dataclass
class Seen:
    """Figures of one run: tokens a second, the others in seconds."""

    throughput: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float


def _seen(records: Records) -> Seen:
    whole = figures(records.requests, records.ended_at, Slo()).as_json()
    ttft = whole["ttft_ms"]
    itl: Histogram = records.itl
    return Seen(
        float(str(whole["output_tokens_per_s"])),
        ttft["p50"] / 1000,  # type: ignore[index]
        ttft["p99"] / 1000,  # type: ignore[index]
        itl.percentile(0.5) or 0.0,
        itl.percentile(0.99) or 0.0,
    )


async def _real(fleet: Fleet, workload: Workload) -> Records:
    records = Records()
    clients = Clients(
        workload,
        fleet.dispatcher.generate,
        records,
        known_lengths=True,
        max_model_len=fleet.dispatcher.limits.max_model_len,
        on_done=lambda: None,
    )
    await clients.run()
    records.ended_at = clients.now()
    return records


def main() -> None:
    """Prints a table of figures and how far the simulated ones are off."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", type=Path)
    parser.add_argument("--model", help="by default the embedded one")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of each replica")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load")
    parser.add_argument("--loads", nargs="+", type=float, default=(0.3, 0.7, 0.95, 1.2))
    parser.add_argument("--seqs", type=int, default=32, help="the most sequences of a replica")
    chosen = parser.parse_args()
    executor, engine = (
        ExecutorOptions(),
        EngineOptions(threads=chosen.threads, max_num_seqs=chosen.seqs),
    )
    files = executor.resolve(engine, chosen.model, ParallelOptions())
    parallel = ParallelOptions(data_parallel_size=chosen.replicas)
    config = executor.engine_config(engine, files.model, parallel)
    with tempfile.TemporaryDirectory() as folder:

        def drawn(rate: float, seconds: float, seed: int) -> Workload:
            path = Path(folder) / "requests.yaml"
            path.write_text(_REQUESTS.format(rate=rate, seconds=seconds))
            return read_workload(path, seed, scale=1, num_requests=None)

        # The clock of other event loops is coarse.
        rows = asyncio.run(_measure(config, chosen, drawn, Path(folder)))
    columns = ("load", "", "tokens/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99")
    title = f"{files.served_name}, {chosen.replicas} replicas of {chosen.threads} threads"
    output.stdout().print(output.table(title, columns, rows))


async def _measure(
    config: object,
    chosen: argparse.Namespace,
    drawn: Callable[[float, float, int], Workload],
    folder: Path,
) -> list[tuple[str, ...]]:
    fleet = Fleet.of_engines(config, "least-pending-tokens")  # type: ignore[arg-type]
    rows: list[tuple[str, ...]] = []
    try:
        await fleet.start()
        limits = fleet.dispatcher.limits
        text = _FLEET.format(
            replicas=chosen.replicas,
            steps=chosen.steps.resolve(),
            blocks=limits.num_blocks // chosen.replicas,
            seqs=chosen.seqs,
        )
        path = folder / "fleet.yaml"
        path.write_text(
            text.replace("children: {host", "policy: least-pending-tokens, children: {host")
        )
        topology = read_topology(path)
        await _real(fleet, drawn(50.0, 1.0, 7))  # warm
        full = await _real(fleet, drawn(400.0, 0.5 * chosen.replicas, 8))
        capacity = len(full.requests) / full.ended_at
        for load in chosen.loads:
            rate = load * capacity
            real = _seen(await _real(fleet, drawn(rate, chosen.seconds, 1)))
            outcome = await asyncio.to_thread(
                simulate, topology, drawn(rate, chosen.seconds, 1), 1, known_lengths=True
            )
            simulated = _seen(outcome.records)
            rows += _rows(load, real, simulated)
    finally:
        await fleet.close()
    return rows


def _rows(load: float, real: Seen, simulated: Seen) -> list[tuple[str, ...]]:
    def shown(name: str, seen: Seen) -> tuple[str, ...]:
        times = (seen.ttft_p50, seen.ttft_p99, seen.itl_p50, seen.itl_p99)
        return (name, f"{seen.throughput:,.0f}", *(f"{1000 * it:,.2f} ms" for it in times))

    pairs = [
        (getattr(simulated, name), getattr(real, name))
        for name in ("throughput", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99")
    ]
    return [
        (f"{load:.0%}", *shown("real", real)),
        ("", *shown("simulated", simulated)),
        ("", "off by", *(f"{ours / theirs - 1:+.1%}" for ours, theirs in pairs)),
    ]


if __name__ == "__main__":
    main()
