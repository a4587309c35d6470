# SPDX-License-Identifier: Apache-2.0
"""Simulated replicas against real ones on this machine: `python -m benchmarks.simulated_against_real STEPS`.

STEPS is what `pagoda simulate fit` made of `pagoda bench steps --threads N`, with the threads of a replica here.
The same clients ask the same requests of the dispatcher of real replicas and of simulated ones, at shares of what
the real ones finish when many come at once. Requests are none of those that steps were measured with. The clients
run in the process of the dispatcher, as those of `pagoda bench steps` did, so that what they take of the cores is
that of its frontend.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.engines_here import POLICY, ConfigOf, Load, Server, configs
from pagoda.cli import output
from pagoda.concurrency import event_loop
from pagoda.llm.engine_options import EngineOptions
from pagoda.messages.frontend import EngineReady
from pagoda.messages.worker_config import Role
from pagoda.plugins.simulate.records import Records, percentile
from pagoda.plugins.simulate.simulation import simulate
from pagoda.plugins.simulate.topology import Topology, read_topology

_FLEET = """
root: server
routers: {{server: {{cores: {cores}, policy: {policy}, children: {children}}}}}
hosts:
"""
_HOST = """
  {role}:
    {{role: {role}, steps: {steps}, block_size: {block_size}, num_blocks: {blocks}, max_num_seqs: {seqs},
      block_ms: {block_ms}}}
"""
_LIMITS = {"tokens/s": 0.05, "TTFT p50": 0.1, "TTFT p99": 0.2, "ITL p50": 0.1, "ITL p99": 0.2}
"""Relative error that a simulated figure may have."""


class Cell(msgspec.Struct, frozen=True):
    """Requests that both have answered; times in seconds."""

    model: str
    load: float
    rate: float
    """Requests a second."""
    seed: int
    real: dict[str, float]


class Kept(msgspec.Struct, frozen=True):
    """Figures of real replicas, and the flags that they were measured with."""

    flags: dict[str, str]
    cells: list[Cell]


def _flags(chosen: argparse.Namespace) -> dict[str, str]:
    """Flags on which real figures depend."""
    others = ("steps", "cores", "block_ms", "real", "only_real")
    return {name: str(value) for name, value in vars(chosen).items() if name not in others}


def _figures(records: Records) -> dict[str, float]:
    ttfts = sorted(it.ttft for it in records.requests if it.ttft is not None)
    tokens = sum(it.num_output_tokens for it in records.requests)
    values = (
        tokens / records.ended_at,
        *(percentile(ttfts, share) for share in (0.5, 0.99)),
        *(records.itl.percentile(share) for share in (0.5, 0.99)),
    )
    return {name: value or 0.0 for name, value in zip(_LIMITS, values, strict=True)}


def _rate(records: Records) -> float:
    """Requests a second that end while there are enough of them."""
    ends = sorted(it.ended or 0.0 for it in records.requests)
    first, last = len(ends) // 5, len(ends) * 4 // 5
    return (last - first) / (ends[last] - ends[first])


def _topology(chosen: argparse.Namespace, limits: EngineReady) -> str:
    """The same server for the simulator."""
    roles = Counter(str(role) for role in _roles(chosen))
    children = ", ".join(f"{role}: {count}" for role, count in roles.items())
    text = _FLEET.format(cores=chosen.cores, policy=POLICY, children=f"{{{children}}}")
    for role in roles:
        text += _HOST.format(
            role=role,
            steps=chosen.steps.resolve(),
            block_size=limits.block_size,
            blocks=limits.num_blocks,
            seqs=chosen.seqs,
            block_ms=chosen.block_ms,
        )
    return text


def _roles(chosen: argparse.Namespace) -> Sequence[Role]:
    return [Role.PREFILL, Role.DECODE] if chosen.pair else [Role.NONE] * chosen.replicas


async def _measure(
    config_of: ConfigOf, chosen: argparse.Namespace, name: str, topology_file: Path
) -> list[Cell]:
    """Asks real replicas, and writes the topology that stands for them."""
    load = Load(chosen.prompt, chosen.answer)
    cells: list[Cell] = []
    server = Server(config_of, _roles(chosen))
    try:
        await server.start()
        topology_file.write_text(_topology(chosen, server.limits))

        async def ask(rate: float, seconds: float, seed: int) -> Records:
            return await server.ask(load.drawn(rate, seconds, seed))

        await ask(chosen.seqs, 1.0, 7)  # warm
        capacity = _rate(await ask(4 * chosen.seqs * len(_roles(chosen)), 1.0, 8))
        for share in chosen.loads:
            rate = share * capacity
            seed = chosen.seed + len(cells)
            records = await ask(rate, max(chosen.seconds, chosen.requests / rate), seed)
            cells.append(Cell(name, share, rate, seed, _figures(records)))
    finally:
        await server.close()
    return cells


def _compare(
    cells: list[Cell], topology: Topology, chosen: argparse.Namespace
) -> list[tuple[str, ...]]:
    load, rows = Load(chosen.prompt, chosen.answer), []
    for cell in cells:
        seconds = max(chosen.seconds, chosen.requests / cell.rate)
        workload = load.drawn(cell.rate, seconds, cell.seed)
        outcome = simulate(topology, workload, cell.seed, known_lengths=True)
        simulated = _figures(outcome.records)
        rows.append((f"{cell.load:.0%}", "real", *_shown(cell.real)))
        rows.append(("", "simulated", *_shown(simulated)))
        offs = {name: simulated[name] / cell.real[name] - 1 for name in _LIMITS}
        marked = (f"{off:+.1%}{' !' * (abs(off) > _LIMITS[name])}" for name, off in offs.items())
        rows.append(("", "off by", *marked))
    return rows


def _shown(figures: dict[str, float]) -> list[str]:
    tokens_per_s, *times = figures.values()
    return [f"{tokens_per_s:,.0f}", *(f"{1000 * it:,.2f} ms" for it in times)]


def main() -> None:
    """Prints a table of figures and how far the simulated ones are off; `!` marks those outside the limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", type=Path)
    parser.add_argument("--model", help="by default the embedded one")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--pair", action="store_true", help="a prefill and a decode host instead")
    parser.add_argument("--threads", type=int, default=1, help="of each replica")
    parser.add_argument("--cores", type=int, default=os.cpu_count(), help="of this machine")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load, at least")
    parser.add_argument("--requests", type=int, default=200, help="of each load, at least")
    parser.add_argument("--loads", nargs="+", type=float, default=(0.3, 0.7, 0.95, 1.2))
    parser.add_argument("--seqs", type=int, default=32, help="the most sequences of a replica")
    parser.add_argument("--blocks", type=int, default=2048, help="KV blocks of a replica")
    parser.add_argument("--block-ms", type=float, default=0.1, help="to receive a block of KV")
    parser.add_argument("--prompt", type=int, default=120, help="tokens, on average")
    parser.add_argument("--answer", type=int, default=60, help="tokens, on average")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--real", type=Path, help="keep real figures here, or take those here")
    parser.add_argument("--only-real", action="store_true", help="compare in a later run")
    chosen = parser.parse_args()
    folder = chosen.real or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    cells_file, topology_file = folder / "cells.json", folder / "server.yaml"
    engine = EngineOptions(
        threads=chosen.threads, max_num_seqs=chosen.seqs, num_kv_blocks=chosen.blocks
    )
    config_of, name = configs(engine, chosen.model, folder)
    if cells_file.exists():
        kept = msgspec.json.decode(cells_file.read_bytes(), type=Kept)
        if kept.flags != _flags(chosen):
            parser.error(f"{folder} has figures of other flags: {kept.flags}")
    else:
        cells = event_loop.run(_measure(config_of, chosen, name, topology_file))
        kept = Kept(_flags(chosen), cells)
        cells_file.write_bytes(msgspec.json.encode(kept))
    if chosen.only_real:
        return
    rows = _compare(kept.cells, read_topology(topology_file), chosen)
    what = "a prefill and a decode host" if chosen.pair else f"{chosen.replicas} replicas"
    title = f"{name}, {what} of {chosen.threads} threads"
    output.stdout().print(output.table(title, ("load", "", *_LIMITS), rows))


if __name__ == "__main__":
    main()
