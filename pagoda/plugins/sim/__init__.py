# SPDX-License-Identifier: Apache-2.0
"""Workers that exist as a cost model only: `--executor sim`, without weights and torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagoda.executor.base import Executor
from pagoda.executor.plugin import ExecutorPlugin

if TYPE_CHECKING:
    from pagoda.executor.plugin import OpenGroup
    from pagoda.ipc.clock import Clock
    from pagoda.messages.engine_config import EngineConfig


def _open(config: EngineConfig, clock: Clock, _open_group: OpenGroup) -> Executor:
    from pagoda.plugins.sim.executor import SimExecutor  # by engines alone
    from pagoda.plugins.sim.faults import with_faults

    num_stages = config.worker.parallel.pipeline_parallel_size
    executor = SimExecutor(config.sim, clock=clock, num_stages=num_stages)
    return with_faults(executor, clock, config.worker.faults, config.step_timeout_s)


EXECUTOR = ExecutorPlugin(_open)
