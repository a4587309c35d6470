# SPDX-License-Identifier: Apache-2.0
"""Traces as files: `pagoda trace merge` and `report`."""

from pagoda.cli.command import Command, CommandPlugin

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
