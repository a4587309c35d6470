# SPDX-License-Identifier: Apache-2.0
"""Lives of a whole fleet in virtual time, one for each seed: `python -m benchmarks.simulation.seeds`.

`--seed 123 --verbose` lives one of them, and prints its plan, every message and event, and the SHA-256 of
these lines; `--digest` prints the SHA-256 alone. Exits with 1 if something is broken.
"""

from __future__ import annotations

import argparse
import os
import sys

from benchmarks.simulation.seeds.draw import draw
from benchmarks.simulation.seeds.life import Verdict, live
from benchmarks.simulation.seeds.runner import live_all
from pagoda.cli import output


def main() -> int:
    """Lives the seeds that are named. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulation.seeds", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--count", type=int, default=1, help="number of seeds (default: 1)")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count(), help="processes (default: one a core)"
    )
    parser.add_argument("--verbose", action="store_true", help="print every message and event")
    parser.add_argument("--digest", action="store_true", help="print the SHA-256 of each log")
    options = parser.parse_args()
    if options.verbose or options.digest:
        problems = [
            _tell(seed, options.verbose)
            for seed in range(options.seed, options.seed + options.count)
        ]
        return 1 if any(problems) else 0
    num_processes = min(options.processes, -(-options.count // 100))
    summary = live_all(options.seed, options.count, num_processes, _tell_broken)
    for name, number in sorted(summary.met.items()):
        output.stdout().print(f"{number:10} {name}")
    num_broken, elapsed_s = len(summary.broken), summary.elapsed_s
    rate = options.count / elapsed_s
    output.stdout().print(
        f"{num_broken} of {options.count} seeds broke something; {elapsed_s:.0f} s, {rate:.0f} a second"
    )
    return 1 if num_broken else 0


def _tell(seed: int, verbose: bool) -> str:
    verdict = live(draw(seed), logs=True)
    if verbose:
        output.stdout().print("\n".join(verdict.log))
    output.stdout().print(f"{seed} {verdict.digest}")
    return verdict.problem


def _tell_broken(verdict: Verdict) -> None:
    output.stdout().print(f"seed {verdict.seed}: {verdict.problem}")


if __name__ == "__main__":
    sys.exit(main())
