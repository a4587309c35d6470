# SPDX-License-Identifier: Apache-2.0
"""Plugins of executors, for workers on other hosts: objects of the entry-point group `pagoda.executors`.

Their names are values of `--executor`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pagoda.executor.launcher import Launcher
from pagoda.messages.engine_config import EngineConfig


@dataclass(frozen=True)
class ExecutorPlugin:
    """Workers that are launched beyond this host."""

    open_launcher: Callable[[EngineConfig], tuple[Launcher, str]]
    """Gives the launcher of an engine's workers, and the address of this host that they reach.
    Raises ConfigError: there is no such cluster."""
