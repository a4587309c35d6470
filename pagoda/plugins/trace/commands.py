# SPDX-License-Identifier: Apache-2.0
"""`pagoda trace`: makes one trace of what the processes of a server wrote, and says where the time went."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from pagoda.cli import output as out
from pagoda.cli.files import write_file
from pagoda.cli.machine_facts import measure_read_bandwidth
from pagoda.cli.options import GeneralOptions
from pagoda.errors import ConfigError
from pagoda.ipc.machine import available_cores
from pagoda.plugins.trace.merge.merging import merge_into_file
from pagoda.plugins.trace.page import alongside, page_of, tables_of
from pagoda.plugins.trace.report.data import Report, Roofline, seconds
from pagoda.plugins.trace.report.reporting import load_trace, report_of

Directories = Annotated[Path, Parameter(name="DIR")]
Recorded = Annotated[Path, Parameter(name="FILE|DIR")]
Rate = Annotated[float, Parameter(validator=Number(gt=0))]


def merge(
    *directories: Directories,
    output: Path | None = None,
    general: GeneralOptions = GeneralOptions(),
) -> int:
    """Make one file for Perfetto (ui.perfetto.dev) out of the fragments that processes traced.

    Args:
        directories: The directory given to a server as --profile-dir; for several hosts, a copy of each host's.
        output: The file; .gz compresses it. By default trace.json in the first directory.
    """
    general.apply()
    if not directories:
        raise ConfigError("Name a directory that fragments were traced to.")
    merged = merge_into_file(directories, output)
    _tell(merged.trace.notes)
    out.stdout().print(str(merged), soft_wrap=True)
    return 0


def _tell(notes: tuple[str, ...]) -> None:
    for note in notes:
        out.stderr().print(note, soft_wrap=True)


def report(
    recorded: Recorded,
    /,
    *,
    html: Path | None = None,
    limits: Annotated[bool, Parameter(negative=())] = False,
    bandwidth: Rate | None = None,
    flops: Rate | None = None,
    general: GeneralOptions = GeneralOptions(),
) -> int:
    """Show where the time of requests and steps went, and why the slowest requests were slow.

    Args:
        recorded: A trace that `pagoda trace merge` made, or a directory of fragments.
        html: Write the report to this file as well, as a page that needs nothing else.
        limits: Measure the memory bandwidth of this machine now, and compare.
        bandwidth: Memory bandwidth to compare with, in GB/s.
        flops: Speed of the processor to compare with, in TFLOP/s.
    """
    general.apply()
    found = report_of(load_trace(recorded))
    known = _limits(limits, bandwidth, flops)
    _tell(found.notes)
    _print(found, known)
    if html is not None:
        write_file(html, page_of(found, known).encode(), "--html")
        out.stdout().print(f"{html}: the same as a page.", soft_wrap=True)
    return 0


def _limits(measure: bool, bandwidth: float | None, flops: float | None) -> Roofline:
    """The given rates; bandwidth is measured only if it is not given."""
    bytes_per_s = None if bandwidth is None else bandwidth * 1e9
    if measure and bytes_per_s is None:
        bytes_per_s = measure_read_bandwidth(available_cores()).bytes_per_s
    return Roofline(bytes_per_s, None if flops is None else flops * 1e12)


def _print(found: Report, limits: Roofline) -> None:
    console = out.stdout()
    for number, table in enumerate(tables_of(found, limits)):
        console.print(out.table(table.title, table.columns, table.rows))
        if number == 0 and alongside(found):
            console.print(alongside(found))
    if found.slowest:
        console.print("The slowest requests", style="bold")
        rows = (
            (it.request, f"{seconds(it.end_to_end)}: {'; '.join(it.reasons)}")
            for it in found.slowest
        )
        console.print(out.facts(rows))
