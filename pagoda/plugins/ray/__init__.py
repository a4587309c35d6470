# SPDX-License-Identifier: Apache-2.0
"""Workers on the hosts of a Ray cluster: `--executor ray`. Importing this does not import Ray."""

import os

from pagoda.executor.base import Executor
from pagoda.executor.plugin import ExecutorPlugin, OpenGroup
from pagoda.ipc.addresses import bracketed
from pagoda.ipc.clock import Clock
from pagoda.messages.engine_config import EngineConfig


def _open(config: EngineConfig, _clock: Clock, open_group: OpenGroup) -> Executor:
    # Ray reads both when it is imported. Else it looks for a cluster that is gone for ten minutes, and a call
    # after the connection starts a cluster here, whose token in ~/.ray keeps nodes from joining later ones.
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    from pagoda.plugins.ray.launcher import RayLauncher  # takes a second, and is not always there

    launcher = RayLauncher(
        config.ray_address,
        config.worker.parallel,
        config.worker.num_threads,
        was_there=config.worker.kept_blocks is not None,
    )
    return open_group(launcher, f"tcp://{bracketed(launcher.node_address)}")


EXECUTOR = ExecutorPlugin(_open)
