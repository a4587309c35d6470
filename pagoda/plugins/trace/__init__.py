# SPDX-License-Identifier: Apache-2.0
"""Traces as files: fragments merged into one, `pagoda trace merge` and `report`."""

from pathlib import Path

from pagoda.cli.command import Command, CommandPlugin
from pagoda.telemetry.plugin import TraceMerger

COMMANDS = CommandPlugin(
    {
        "trace": Command("Traces, as serve --profile records them."),
        "trace merge": Command(
            "Make one file for Perfetto out of the fragments that processes traced.",
            "pagoda.plugins.trace.commands:merge",
        ),
        "trace report": Command(
            "Show where the time of requests and steps went.",
            "pagoda.plugins.trace.commands:report",
        ),
    }
)


def _merge(directory: Path, run: str) -> Path:
    from pagoda.plugins.trace.merge.merging import merge_into_file  # a server may never need it

    return merge_into_file([directory], run=run).path


MERGER = TraceMerger(_merge)
