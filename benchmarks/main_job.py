# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.main_job [NAME...]` measures what the main job promises and prints a table."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from benchmarks.accuracy import measure_accuracy
from benchmarks.figure import Figure
from benchmarks.http_load import measure_http_requests, measure_http_streams
from benchmarks.idle import measure_idle
from benchmarks.scheduling import measure_scheduling
from benchmarks.start_up import measure_memory, measure_start_up
from pagoda.cli import output
from pagoda.cli.options import GeneralOptions

MEASUREMENTS: dict[str, Callable[[], list[Figure]]] = {
    "start-up": measure_start_up,
    "memory": measure_memory,
    "scheduling": measure_scheduling,
    "http-streams": measure_http_streams,
    "http-requests": measure_http_requests,
    "idle": measure_idle,
    "accuracy": measure_accuracy,
}


def main() -> None:
    """Runs the measurements named, by default all, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MEASUREMENTS))
    names = parser.parse_args().names or list(MEASUREMENTS)
    unknown = sorted(set(names) - set(MEASUREMENTS))
    if unknown:
        parser.error(f"no measurement {unknown[0]}; there are {', '.join(MEASUREMENTS)}")
    GeneralOptions().apply()
    figures: list[Figure] = []
    for name in names:
        output.stderr().print(f"measuring {name} ...")
        figures += MEASUREMENTS[name]()
    rows = [(f.what, f.measured, f.target, f.command) for f in figures]
    output.stdout().print(output.table("", ("what", "measured", "target", "command"), rows))


if __name__ == "__main__":
    main()
