# SPDX-License-Identifier: Apache-2.0
"""Fuzzes targets, and keeps what was found.

`python -m benchmarks.chaos.fuzz [--seconds N] [--keep DIR] [TARGET...]`
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.chaos.fuzz.runner import fuzz
from benchmarks.chaos.fuzz.targets import TARGETS
from pagoda.cli import output


def main() -> int:
    """Returns the exit status: 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=int, default=60, help="of each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="directory for findings; the corpus grows too")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="default: all")
    options = parser.parse_args()
    failed = False
    for name in options.targets or TARGETS:
        done = fuzz(TARGETS[name], options.seconds, seed=options.seed, keep=options.keep)
        failed = failed or bool(done.failures)
        said = "; ".join(done.failures) or "no failure"
        output.stdout().print(
            f"{name}: {done.runs:,} runs, {done.edges} edges, {said}", soft_wrap=True
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
