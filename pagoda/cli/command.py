# SPDX-License-Identifier: Apache-2.0
"""Plugins of the command line: objects of the entry-point group `pagoda.commands`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """One command, or a group of commands."""

    summary: str
    """One sentence."""
    target: str = ""
    """Module and function, as in `pagoda_x.command:run`, imported when the command is called or asked for its
    help. That of a group, if it has one, is what its name alone does."""
    details: str = ""
    """Help behind the summary."""


@dataclass(frozen=True)
class CommandPlugin:
    """Commands by their words, such as `bench serve`; a group comes before its members."""

    commands: Mapping[str, Command]
