# SPDX-License-Identifier: Apache-2.0
"""Conformance suite of backends: `pagoda backend check NAME`, and its checks for tests of one."""

from pagoda.cli.command import Command, CommandPlugin

COMMANDS = CommandPlugin(
    {
        "backend": Command("Backends, as serve --backend takes them."),
        "backend check": Command(
            "Check that a backend computes what it should, operation by operation.",
            "pagoda.plugins.backend_check.command:check",
            (
                "Each line is a check: ok, lacks where the backend says that it does not have "
                "something and refuses it, or FAILED and why. The reference backend says what is "
                "right. The exit status is 1 if a check failed, 2 if there is no such backend "
                "here."
            ),
        ),
    }
)
