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

OpenGroup = Callable[[Launcher, str], Executor]
"""Starts workers by a launcher; they connect to an address, which is a ZeroMQ endpoint without a port."""


@dataclass(frozen=True)
class ExecutorPlugin:
    """Workers that are launched beyond this host, or an executor that has none."""

    open: Callable[[EngineConfig, Clock, OpenGroup], Executor]
    """Gives the executor of an engine; what launches workers gives that of the third argument.
    Raises ConfigError: there is no such cluster."""
