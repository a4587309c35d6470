# SPDX-License-Identifier: Apache-2.0
"""Fleets in virtual time with random faults, late loops and full queues, one for each seed."""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks.chaos.trial import Outcome, Trial
from benchmarks.simulation.seeds.life import Verdict
from benchmarks.simulation.seeds.runner import Summary, live_all
from pagoda.cli import output

_NUM_SEEDS = 100_000
_NUM_SHORT = 60
_NUM_REPEATED = 20
"""Seeds that are lived again in two other processes, whose hashes of strings differ."""


def outcome_of(summary: Summary, num_repeated: int) -> Outcome:
    """The row of the table for lives; logs of `num_repeated` of them were the same in every byte."""
    met = summary.met
    broken = ", ".join(str(verdict.seed) for verdict in summary.broken[:5])
    num_answers = sum(number for name, number in met.items() if name.startswith("answers: "))
    measured = (
        f"{summary.num_lives:,} seeds, {len(summary.broken)} broken{broken and f' ({broken}, …)'}: "
        f"{num_answers:,} requests, {met['steps']:,} steps, {met['deaths']:,} dead workers and engines, "
        f"{met['preemptions']:,} preemptions, {met['refusals']:,} refusals; "
        f"{num_repeated} logs repeat byte for byte"
    )
    return Outcome(measured, not summary.broken and num_repeated == _NUM_REPEATED)


def num_alike() -> int:
    """Number of seeds whose logs two other processes write alike."""
    first, second = (_digests(hash_seed) for hash_seed in ("1", "2"))
    return sum(one == other for one, other in zip(first, second, strict=True))


def _digests(hash_seed: str) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.simulation.seeds", "--digest"]
    done = subprocess.run(
        [*command, "--count", str(_NUM_REPEATED)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def _tell(verdict: Verdict) -> None:
    """Tells of a broken seed at once: the others take half an hour."""
    output.stderr().print(f"seed {verdict.seed}: {verdict.problem}", soft_wrap=True)


def _run(short: bool) -> Outcome:
    if short:
        summary = live_all(0, _NUM_SHORT)
    else:
        summary = live_all(0, _NUM_SEEDS, os.cpu_count() or 1, _tell)
    return outcome_of(summary, num_alike())


SIMULATION = Trial(
    "simulation",
    "engines, tiers, handoff, hosts and routers in virtual time: random faults, late loops, full queues",
    "100,000 seeds break no invariant; a seed repeats byte for byte",
    _run,
)
