# SPDX-License-Identifier: Apache-2.0
"""Plugins of executors, for workers that are no processes of this host: objects of the entry-point group
`pagoda.executors`.

Their names are values of `--executor`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pagoda.executor.base import Executor
from pagoda.executor.launcher import Launcher
from pagoda.ipc.clock import Clock
from pagoda.messages.engine_config import EngineConfig


@dataclass(frozen=True)
class ExecutorPlugin:
    """Workers that are launched beyond this host, or an executor that has none; one of the two is given."""

    open_launcher: Callable[[EngineConfig], tuple[Launcher, str]] | None = None
    """Gives the launcher of an engine's workers, and the address of this host that they reach.
    Raises ConfigError: there is no such cluster."""
    open_executor: Callable[[EngineConfig, Clock], Executor] | None = None
    """Gives what answers an engine's plans."""
