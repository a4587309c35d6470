# SPDX-License-Identifier: Apache-2.0
"""The command `pagoda route`."""

from pagoda.cli.command import Command, CommandPlugin

COMMANDS = CommandPlugin(
    {
        "route": Command(
            "Serve a model over these APIs with the hosts that join this router.",
            "pagoda.plugins.router.command:route",
        )
    }
)
