"""`pagoda trace`: makes one trace of what the processes of a server wrote, and says where the time went."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from pagoda.cli import output as out
from pagoda.cli.options import GeneralOptions
from pagoda.cli.sizes import format_bytes
from pagoda.errors import ConfigError
from pagoda.telemetry.merge.chrome import write_chrome_trace
from pagoda.telemetry.merge.merging import merge_fragments
from pagoda.telemetry.merge.model import Trace

_GENERAL = GeneralOptions()
_FILE_NAME = "trace.json"

Directories = Annotated[Path, Parameter(name="DIR")]


def merge(
    *directories: Directories, output: Path | None = None, general: GeneralOptions = _GENERAL
) -> int:
    """Make one file for Perfetto (ui.perfetto.dev) out of the fragments that processes traced.

    Args:
        directories: What a server was given as --profile-dir; of a trace of several hosts, a copy of each.
        output: The file; .gz compresses it. By default trace.json in the first directory.
    """
    general.apply()
    if not directories:
        raise ConfigError("Name a directory that fragments were traced to.")
    trace = merge_fragments(directories)
    path = output or directories[0] / _FILE_NAME
    num_flows = write_chrome_trace(trace, path)
    _tell(trace.notes)
    out.stdout().print(f"{path}: {_describe(trace, num_flows, path)}.", soft_wrap=True)
    return 0


def _tell(notes: tuple[str, ...]) -> None:
    for note in notes:
        out.stderr().print(note, soft_wrap=True)


def _describe(trace: Trace, num_flows: int, path: Path) -> str:
    ends = [row.spans[-1].end for it in trace.processes for row in it.rows if row.spans]
    return (
        f"{len(trace.processes)} processes, {num_flows:,} requests followed, "
        f"{max(ends, default=0) / 1e9:.3f} s, {format_bytes(path.stat().st_size)}"
    )
