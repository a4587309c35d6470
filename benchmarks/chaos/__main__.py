# SPDX-License-Identifier: Apache-2.0
"""Runs trials, prints their table and writes it into docs/reliability.md.

`python -m benchmarks.chaos [--short] [--list] [NAME...]`, or `make chaos`

Exits with 1 if a figure is not what is asked for. The page keeps the last figures of trials that were not run.
The short form of a trial writes no page.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence

from benchmarks.chaos.page import Result, result_of, write_page
from benchmarks.chaos.trial import Outcome, TooLongError, Trial, limited
from benchmarks.chaos.trials import TRIALS
from pagoda.cli import output

_SHORT_LIMIT_S = 900.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the trials that are named, or all. Returns the exit status."""
    summary = __doc__.partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=summary)
    parser.add_argument(
        "--short", action="store_true", help="smaller numbers; docs/reliability.md stays as it is"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the names of all trials and exit"
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="trials to run (default: all)")
    options = parser.parse_args(arguments)
    by_name = {trial.name: trial for trial in TRIALS}
    if options.list:
        output.stdout().print("\n".join(by_name))
        return 0
    unknown = [name for name in options.names if name not in by_name]
    if unknown:
        parser.error(f"no trial is named {unknown[0]}; --list prints the names")
    chosen = [by_name[name] for name in options.names] or list(TRIALS)
    all_hold = True
    for trial in chosen:
        result = _run(trial, options.short)
        all_hold = all_hold and result.holds
        if not options.short:
            write_page(TRIALS, [result])
    return 0 if all_hold else 1


def _run(trial: Trial, short: bool) -> Result:
    """Runs a trial. One that raises falls short, and the others are tried all the same."""
    output.stdout().print(f"{trial.name}: {trial.fault}\n  asked: {trial.asked}")
    try:
        with limited(_SHORT_LIMIT_S if short else trial.limit_s):
            outcome = trial.run(short)
    except (Exception, TooLongError) as error:
        traceback.print_exc()
        outcome = Outcome(f"the trial ended with {type(error).__name__}: {error}", False)
    output.stdout().print(f"  {'holds' if outcome.holds else 'FALLS SHORT'}: {outcome.measured}")
    return result_of(trial, outcome)


if __name__ == "__main__":
    sys.exit(main())
